"""Quantized models in rings against transformers on the same numbers, and their files' mistakes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kafila.errors import ModelIncomplete
from kafila.shard.formats import Affine
from kafila.shard.load import host_matrix, load_shard
from kafila.shard.manifest import open_checkpoint
from kafila.shard.ops import AttentionShape, Mlp, QuantizedTensor
from kafila.shard.quantize import dequantize, to_float32
from kafila.shard.schemes import SCHEMES, with_scheme
from kafila.shard.tensor_files import read_tensor
from kafila.shard.torch_ops import TorchOps
from kafila.types import BlockRange, Segment
from tests.shard.checkpoints import make_checkpoint, reference_answer, reference_logits
from tests.shard.quantized import SINGLE, WIDE, Override, mlx_checkpoint
from tests.shard.rings import LocalRing

DOWN = "model.layers.1.mlp.down_proj"
K = "model.layers.0.self_attn.k_proj"
MIXED: dict[str, Override] = {
    DOWN: {"bits": 8, "group_size": 32},
    K: {"bits": 8, "group_size": 64},
    "model.layers.2.mlp.gate_proj": False,
    "model.layers.3.self_attn.o_proj": {"bits": 6, "group_size": 32},
    "lm_head": {"bits": 8, "group_size": 128},
}
CASES: dict[str, tuple[str, Affine, dict[str, Override], bool]] = {
    "4 bits in 64s, mixed": ("llama", Affine(4, 64), MIXED, False),
    "4 bits in 32s, tied": ("qwen2", Affine(4, 32), {}, True),
    "8 bits in 128s": ("qwen3", Affine(8, 128), {}, False),
}
PROMPT = [5, 17, 99, 3, 3, 120, 64, 8, 1, 77, 2, 41, 30]
COUNT = 16

Pairs = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """A case's checkpoint and twin, made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def pair(case: str) -> tuple[Path, Path]:
        if case not in made:
            family, form, overrides, tied = CASES[case]
            made[case] = mlx_checkpoint(tmp_path_factory.mktemp("mlx"), family, form, overrides, tied=tied)
        return made[case]

    return pair


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is not quantized."""
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "qwen2", **WIDE)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_the_same_numbers_in_float32(case: str, pairs: Pairs) -> None:
    stored, twin = pairs(case)
    expected = reference_answer(twin, PROMPT, COUNT)
    assert len(set(expected)) > 4, "an answer that repeats itself tests little"
    for counts in [(4,), (1, 3)]:
        assert LocalRing(stored, counts).answer(PROMPT, COUNT) == expected, counts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernels", [True, False])
def test_sixteen_bits_are_about_as_close_as_transformers_on_the_same_numbers(
    case: str, dtype: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch, *, kernels: bool
) -> None:
    """The 4-bit kernel's activations are bfloat16, whatever the session's are."""
    if not kernels:
        for name in ("_can_pack", "few_bits.can_pack_int4", "few_bits.can_pack_int8"):
            monkeypatch.setattr(f"kafila.shard.torch_ops.{name}", lambda: False)
    stored, twin = pairs(case)
    exact = reference_logits(twin, PROMPT)
    theirs = (reference_logits(twin, PROMPT, "bfloat16") - exact).abs().mean()
    assert (_logits(LocalRing(stored, (2, 2), dtype=dtype)) - exact).abs().mean() <= 1.5 * theirs


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", [True, False])
def test_quantizing_while_loading_gives_what_numpy_says_it_should(
    scheme: str, dtype: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, kernels: bool
) -> None:
    if not kernels:
        for name in ("_can_pack", "few_bits.can_pack_int4", "few_bits.can_pack_int8"):
            monkeypatch.setattr(f"kafila.shard.torch_ops.{name}", lambda: False)
    twin = _dequantized_twin(plain, scheme, tmp_path)
    exact = reference_logits(twin, PROMPT)
    ours = _logits(_quantizing_ring(plain, scheme, dtype, monkeypatch))
    if dtype == "float32":  # 8-bit rows go through 13 bits of activation
        np.testing.assert_allclose(ours, exact, atol=0.004 * float(exact.abs().max()))
    else:
        theirs = (reference_logits(twin, PROMPT, "bfloat16") - exact).abs().mean()
        assert (ours - exact).abs().mean() <= 1.5 * theirs


@pytest.mark.parametrize("case", CASES)
def test_processors_with_the_4_bit_kernel_alone_agree(case: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another make: activations of 16 bits between the matrices."""
    monkeypatch.setattr("kafila.shard.torch_ops._can_pack", lambda: False)
    stored, twin = pairs(case)
    exact = reference_logits(twin, PROMPT)
    theirs = (reference_logits(twin, PROMPT, "bfloat16") - exact).abs().mean()
    assert (_logits(LocalRing(stored, (2, 2), dtype="bfloat16")) - exact).abs().mean() <= 1.7 * theirs


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_do_not_depend_on_what_shares_their_batch(
    scheme: str, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = _quantizing_ring(plain, scheme, "bfloat16", monkeypatch)
    alone = ring.forward([Segment(0, 0, 5, sample=False)], PROMPT[:5])
    together = ring.forward([Segment(1, 0, 8, sample=False), Segment(0, 0, 5, sample=False)], PROMPT[5:] + PROMPT[:5])
    np.testing.assert_allclose(_floats(together)[8:], _floats(alone), atol=0.02 * float(_floats(alone).max()))


def test_a_matrix_is_read_as_it_stands(pairs: Pairs) -> None:
    stored, twin = pairs("4 bits in 64s, mixed")
    checkpoint = open_checkpoint(stored)
    matrix = host_matrix(checkpoint, DOWN, read_tensor)
    assert isinstance(matrix, QuantizedTensor)
    assert (matrix.bits, matrix.group_size, matrix.codes.dtype.name) == (8, 32, "uint32")
    np.testing.assert_array_equal(dequantize(matrix), load_file(twin / SINGLE)[f"{DOWN}.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(f"{DOWN}.scales"), f"has no tensor {DOWN}.scales"),
        (lambda tensors: tensors.pop(f"{DOWN}.biases"), f"has no tensor {DOWN}.biases"),
        (lambda tensors: tensors.update({f"{K}.weight": torch.zeros(32, 128)}), rf"{K}.weight has shape \[32, 128\]"),
        (lambda tensors: tensors.update({f"{K}.weight": torch.zeros(32, 32)}), f"{K}.weight is F32; supported are U32"),
        (lambda tensors: tensors.update({f"{K}.scales": torch.zeros(32, 9)}), rf"{K}.scales has shape \[32, 9\]"),
        (
            lambda tensors: tensors.update({f"{K}.scales": torch.zeros(32, 2, dtype=torch.uint32)}),
            f"{K}.scales is U32; supported are F32, BF16, F16",
        ),
    ],
)
def test_a_file_that_does_not_hold_it_so_is_named(
    change: Callable[[dict[str, Any]], object], said: str, pairs: Pairs, tmp_path: Path
) -> None:
    stored, _ = pairs("4 bits in 64s, mixed")
    tensors = load_file(stored / SINGLE)
    change(tensors)
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_bytes((stored / "config.json").read_bytes())
    with pytest.raises(ModelIncomplete, match=said):
        open_checkpoint(tmp_path)


def test_widths_that_are_no_whole_groups_are_named(plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization": {"bits": 4, "group_size": 64}, "intermediate_size": 80}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelIncomplete, match=r"down_proj\.weight has 80 inputs, which are not whole groups of 64"):
        open_checkpoint(tmp_path)


def _logits(ring: LocalRing) -> torch.Tensor:
    hidden = ring.forward([Segment(0, 0, len(PROMPT), sample=False)], PROMPT)
    head = ring.shards[0]
    weights, ops = head.head, head._ops
    assert weights is not None
    with torch.inference_mode():
        rows = ops.from_bytes(hidden, ring.dtype, ring.config.hidden)
        return torch.from_numpy(ops.to_numpy(weights.unembedding(ops.rms_norm(rows, weights.norm))))


def _floats(hidden: bytes) -> Any:
    rows = torch.frombuffer(bytearray(hidden), dtype=torch.bfloat16)
    return rows.view(-1, WIDE["hidden_size"]).float().numpy()


def _quantizing_ring(folder: Path, scheme: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> LocalRing:
    def opened(folder: Path) -> Any:
        checkpoint = open_checkpoint(folder)
        return dataclasses.replace(checkpoint, config=with_scheme(checkpoint.config, scheme))

    monkeypatch.setattr("tests.shard.rings.open_checkpoint", opened)
    return LocalRing(folder, (3, 1), dtype=dtype)


def _dequantized_twin(folder: Path, scheme: str, into: Path) -> Path:
    """The checkpoint with its matrices replaced by what they are quantized to; the embedding looked up stays."""
    checkpoint = open_checkpoint(folder)
    checkpoint = dataclasses.replace(checkpoint, config=with_scheme(checkpoint.config, scheme))
    tensors = load_file(folder / SINGLE)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name:
            matrix = host_matrix(checkpoint, name.removesuffix(".weight"), read_tensor)
            assert isinstance(matrix, QuantizedTensor)
            tensors[name] = torch.from_numpy(dequantize(matrix))
    save_file(tensors, into / SINGLE, {"format": "pt"})
    (into / "config.json").write_bytes((folder / "config.json").read_bytes())
    return into


@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_may_be_held_in_another_dtype(held: str, dtype: str, plain: Path) -> None:
    checkpoint = open_checkpoint(plain)
    shard = load_shard(
        TorchOps("cpu", dtype, threads=1), checkpoint, BlockRange(0, 4), holds_head=True, slots=1, context=32,
        kv_dtype=held,
    )  # fmt: skip
    ring = LocalRing(plain, (4,), dtype=dtype)
    assert {str(storage.dtype) for storage in shard._cache.storage} == {f"torch.{held}"}
    ring.shards = [shard]
    exact = reference_logits(plain, PROMPT)
    error = (_logits(ring) - exact).abs().mean() / exact.abs().mean()
    assert error < (1e-5 if held == dtype == "float32" else 0.03)


def test_what_is_read_is_what_numpy_reads(pairs: Pairs) -> None:
    stored, _ = pairs("8 bits in 128s")
    checkpoint = open_checkpoint(stored)
    scales = read_tensor(stored, checkpoint.tensors[f"{DOWN}.scales"])
    np.testing.assert_array_equal(to_float32(scales), load_file(stored / SINGLE)[f"{DOWN}.scales"].float())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fused_block_gives_the_same_numbers(scheme: str, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [Segment(1, 0, 7, sample=False), Segment(0, 0, 1, sample=False), Segment(2, 0, 5, sample=False)]
    fused = _quantizing_ring(plain, scheme, "bfloat16", monkeypatch).forward(segments, PROMPT)
    asked = []
    monkeypatch.setattr(TorchOps, "fused_block", lambda *_: asked.append(1))
    assert _quantizing_ring(plain, scheme, "bfloat16", monkeypatch).forward(segments, PROMPT) == fused
    assert len(asked) == 4


def test_blocks_in_few_bits_are_fused(plain: Path) -> None:
    checkpoint = open_checkpoint(plain)
    for scheme in SCHEMES:
        config = with_scheme(checkpoint.config, scheme)
        ops = TorchOps("cpu", "bfloat16", threads=1)
        few = dataclasses.replace(checkpoint, config=config)
        shard = load_shard(ops, few, BlockRange(0, 1), holds_head=False, slots=1, context=8)
        block = shard.weights[0]
        assert isinstance(block.mlp, Mlp)
        kinds = [type(matrix).__name__ for matrix in (block.qkv, block.o, block.mlp.up_gate, block.mlp.down)]
        mixed = ["StackedMatrix", "Int4Matrix", "Int4Matrix", "RowMatrix"]
        assert kinds == (["RowMatrix"] * 4 if scheme == "int8" else mixed)
        shape = AttentionShape(few.config.heads, few.config.kv_heads, few.config.head_dim, 0)
        assert ops.fused_block(block, shape) is not None


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.002), ("int4", 0.2)])
def test_predictions_stay_near_those_of_all_bits(
    scheme: str, most: float, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kullback-Leibler divergence in nats; random weights have no slack, trained models lose a tenth of that."""
    exact = reference_logits(plain, PROMPT).log_softmax(-1)
    ours = _logits(_quantizing_ring(plain, scheme, "float32", monkeypatch)).log_softmax(-1)
    divergence = float((exact.exp() * (exact - ours)).sum(-1).mean())
    assert 0 < divergence < most
