from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from kafila.demo import convert as conversion
from kafila.demo.convert import convert, is_whole
from kafila.demo.source import installed_gguf
from kafila.errors import ModelError, ModelNotFound, UsageError
from tests.demo.small import silent


def test_converting_again_does_nothing(tmp_path: Path, small_gguf: Path) -> None:
    lines: list[str] = []
    convert(small_gguf, tmp_path / "out", lines.append)
    assert [line for line in lines if "%" in line] == [f"converted {n}%" for n in (25, 50, 75, 100)]
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    convert(tmp_path / "no such file", tmp_path / "out", silent)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.lock"]


@pytest.mark.parametrize("damage", ["cut", "missing", "older", "garbage", "huge header"])
def test_a_folder_that_is_not_whole_is_made_anew(
    tmp_path: Path, small_gguf: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder, path = tmp_path / "out", tmp_path / "out" / "model.safetensors"
    if damage == "older":
        monkeypatch.setattr(conversion, "CONVERSION", "0")
    convert(small_gguf, folder, silent)
    monkeypatch.undo()
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "garbage":
        path.write_bytes(b"\x10" + bytes(7) + b"[1, 2, 3, 4]    ")
    elif damage == "huge header":
        path.write_bytes(b"\xff" * 100)
    assert not is_whole(folder)
    convert(small_gguf, folder, silent)
    assert is_whole(folder)


def test_a_killed_conversion_leaves_nothing_taken_for_whole(tmp_path: Path, small_gguf: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from kafila.demo import convert, weights\n"
        "gguf, out = map(pathlib.Path, sys.argv[1:])\n"
        "kill = lambda line: os.kill(os.getpid(), signal.SIGKILL) if line == 'converted 50%' else None\n"
        "convert.convert(gguf, out, kill)\n"
    )
    folder = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", script, small_gguf, folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert (tmp_path / "out.partial").is_dir()
    convert(small_gguf, folder, silent)
    assert is_whole(folder)
    assert not (tmp_path / "out.partial").exists()


def test_an_interrupted_conversion_cleans_up(tmp_path: Path, small_gguf: Path) -> None:
    def interrupt(line: str) -> None:
        if "%" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(small_gguf, tmp_path / "out", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["out.lock"]


def test_somebody_elses_folder_is_left_alone(tmp_path: Path, small_gguf: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        convert(small_gguf, tmp_path / "out", silent)
    with pytest.raises(UsageError, match="is a file"):
        convert(small_gguf, tmp_path / "out" / "thesis.tex", silent)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_a_full_disk_is_said_before_writing(tmp_path: Path, small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    with pytest.raises(ModelError, match="make room"):
        convert(small_gguf, tmp_path / "out", silent)


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="No space left"):
        convert(small_gguf, tmp_path / "out", silent)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_the_real_model_answers(tmp_path: Path) -> None:
    try:
        path = installed_gguf()
    except ModelNotFound as error:
        pytest.skip(str(error))
    convert(path, tmp_path / "out", silent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert tokenizer("Hello world 12")["input_ids"] == [19556, 905, 216, 33, 34]
    question = [{"role": "user", "content": "What is the capital of France, and why is it famous?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("The capital of France is Paris.")
