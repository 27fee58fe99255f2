from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from gguf import GGMLQuantizationType as Quantization

from kafila.demo import weights
from kafila.demo.convert import convert
from tests.demo.small import gguf_tensors, network, silent, write_gguf


@pytest.mark.parametrize(("tied", "biased"), [(True, False), (False, True)])
def test_the_checkpoint_computes_what_the_original_did(tmp_path: Path, tied: bool, biased: bool) -> None:
    original = network(tied=tied, biased=biased)
    convert(write_gguf(tmp_path / "x.gguf", gguf_tensors(original), Quantization.F32), tmp_path / "out", silent)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, value in original.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value.to(torch.bfloat16).float(), rtol=0, atol=0)
    ids = torch.tensor([[1, 9, 40, 200, 77, 3, 2]])
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)
    assert loaded.config.rope_parameters["rope_theta"] == 1000.0
    assert loaded.config.tie_word_embeddings is tied


@pytest.mark.parametrize("quantization", [Quantization.Q4_1, Quantization.Q8_0, Quantization.F16])
def test_quantized_rows_are_the_readers_own_rounded(
    tmp_path: Path, model: transformers.LlamaForCausalLM, quantization: Quantization
) -> None:
    stored = gguf_tensors(model)
    convert(write_gguf(tmp_path / "x.gguf", stored, quantization), tmp_path / "out", silent)
    made = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    rows = stored["blk.1.ffn_down.weight"]
    dequantized = gguf.quants.dequantize(gguf.quants.quantize(rows, quantization), quantization)
    assert torch.equal(made["model.layers.1.mlp.down_proj.weight"], torch.from_numpy(dequantized).to(torch.bfloat16))
    assert {value.dtype for value in made.values()} == {torch.bfloat16}


def test_rows_are_converted_in_runs(tmp_path: Path, small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(small_gguf, tmp_path / "whole", silent)
    monkeypatch.setattr(weights, "ROWS_AT_ONCE", 7)
    convert(small_gguf, tmp_path / "runs", silent)
    whole, runs = (tmp_path / name / "model.safetensors" for name in ("whole", "runs"))
    assert whole.read_bytes() == runs.read_bytes()


def test_bfloat16_rounds_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    exact_ties = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x00008000], dtype=np.uint32).view(np.float32)
    values = np.concatenate(
        [rng.normal(size=4000).astype(np.float32), exact_ties, np.array([0, -0.0, 1e-40], dtype=np.float32)]
    )
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(weights.to_bfloat16(values), expected)
