from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kafila.demo import default_folder
from kafila.demo.__main__ import main


def test_the_command(tmp_path: Path, small_gguf: Path) -> None:
    arguments = ["--gguf", str(small_gguf), "--output", str(tmp_path / "out")]
    first = CliRunner().invoke(main, arguments)
    assert (first.exit_code, first.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert "converted 100%" in first.stderr
    second = CliRunner().invoke(main, arguments)
    assert (second.exit_code, second.stdout, second.stderr) == (0, f"{tmp_path / 'out'}\n", "")
    missing = CliRunner().invoke(main, ["--gguf", str(tmp_path / "none"), "--output", str(tmp_path / "other")])
    assert missing.exit_code == 1
    assert missing.stderr == f"error: there is no file {tmp_path / 'none'}\n"


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CACHE_HOME", "/srv/cache")
    assert default_folder() == Path("/srv/cache/kafila/models/SmolLM2-135M-Instruct")
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_folder() == Path("/home/ada/.cache/kafila/models/SmolLM2-135M-Instruct")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_folder() == Path("/home/ada/Library/Caches/kafila/models/SmolLM2-135M-Instruct")
