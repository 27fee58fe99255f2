"""Torch's operations against their definitions, and RoPE against transformers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kafila.errors import DeviceError
from kafila.shard import torch_attention as attention
from kafila.shard import torch_kernels as kernels
from kafila.shard import torch_prompts as prompts
from kafila.shard import torch_script as script
from kafila.shard.config import parse_config
from kafila.shard.formats import Affine
from kafila.shard.ops import AttentionShape, HostTensor
from kafila.shard.quantize import dequantize, quantize
from kafila.shard.rope import LinearRope, Llama3Rope
from kafila.shard.torch_matrices import DenseMatrix, PackedMatrix, StackedMatrix
from kafila.shard.torch_ops import TorchOps
from kafila.shard.torch_quantized import CodesMatrix, RowMatrix, Scratch
from kafila.shard.workspace import INT8_ROWS
from tests.shard.test_config import LLAMA, LLAMA3

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _ops(dtype: str = "float32") -> TorchOps:
    return TorchOps("cpu", dtype, threads=1)


def _host(values: Tensor, dtype: str = "F32") -> HostTensor:
    if dtype == "BF16":
        return HostTensor("BF16", values.bfloat16().view(torch.int16).numpy().view(np.uint16))
    return HostTensor(dtype, values.numpy() if dtype == "F32" else values.half().numpy())


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_device_that_is_not_there() -> None:
    for name in ("cuda:17", "mps" if not torch.backends.mps.is_available() else "cuda:17", "meta"):
        with pytest.raises(DeviceError, match=f"no device {name} here; it has .*cpu.*--device"):
            TorchOps(name, "float32")
    with pytest.raises(DeviceError, match=r"'gpu' is no device.*--device"):
        TorchOps("gpu", "float32")


def test_a_device_says_what_it_is() -> None:
    assert TorchOps("cpu", "float32", threads=1).device == "cpu (1 thread)"
    assert _ops("float16").dtype == "float16"
    assert _ops().memory_bytes() is None
    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert TorchOps("auto", "float32", threads=1).device.startswith(kind)


@pytest.mark.parametrize("compiled", [True, False])
def test_kernels_are_compiled_where_torch_can_and_the_same_where_not(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outermost = (
        attention.attention, kernels.packed_block, kernels.few_bits_block, kernels.packed_experts,
        kernels.few_bits_experts, prompts.prompt_block,
    )  # fmt: skip
    assert all(isinstance(function, torch.jit.ScriptFunction) for function in outermost)
    if not compiled:
        monkeypatch.setattr(torch.jit, "script", lambda _: (_ for _ in ()).throw(RuntimeError("gone")))

    def double(x: Tensor) -> Tensor:
        return x * 2

    assert script.compiled(double)(torch.ones(1)).item() == 2
    assert (script.compiled(double) is double) == (not compiled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_of_parts(dtype: str, stored: str, *, bias: bool) -> None:
    parts = [_host(_random(8, 16, seed=1), stored), _host(_random(24, 16, seed=2), "BF16")]
    biases = [_host(_random(8, seed=3), stored), _host(_random(24, seed=4))] if bias else None
    ops = _ops(dtype)
    x = _random(3, 16, seed=5)
    weight = torch.cat([_random(8, 16, seed=1), _random(24, 16, seed=2)])
    expected = F.linear(x, weight, torch.cat([_random(8, seed=3), _random(24, seed=4)]) if bias else None)
    matrix = ops.matrix(parts, biases)
    assert isinstance(matrix, DenseMatrix if dtype == "float32" else PackedMatrix)
    torch.testing.assert_close(matrix(x).float(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("bias", [False, True])
def test_a_large_matrix_is_packed_in_pieces(monkeypatch: pytest.MonkeyPatch, *, bias: bool) -> None:
    parts = [_host(_random(8, 16, seed=1)), _host(_random(5, 16, seed=2))]
    biases = [_host(_random(8, seed=3)), _host(_random(5, seed=4))] if bias else None
    whole = _ops("bfloat16").matrix(parts, biases)
    monkeypatch.setattr("kafila.shard.torch_matrices.PACK_WEIGHTS", 3 * 16)
    pieces = _ops("bfloat16").matrix(parts, biases)
    assert isinstance(pieces, StackedMatrix)
    assert len(pieces.parts) == 3 + 2
    x = _random(2, 16, seed=5)
    torch.testing.assert_close(pieces(x), whole(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_divided_matrix_is_held_once_and_gives_the_same_numbers(
    dtype: str, monkeypatch: pytest.MonkeyPatch, *, tied: bool
) -> None:
    weight, x = _host(_random(200, 16, seed=1), "BF16"), _random(3, 16, seed=5)
    ops = _ops(dtype)
    one = ops.tied_matrix(ops.table(weight)) if tied else ops.matrix([weight], None)
    for most in (1 << 26, 50 * 16):  # in one piece, or several
        monkeypatch.setattr("kafila.shard.torch_matrices.PACK_WEIGHTS", most)
        whole, own = (
            ops.divided_tied_matrix(ops.table(weight), 64) if tied else ops.divided_matrix(weight, 64)
        )  # fmt: skip
        torch.testing.assert_close(whole(x), one(x), rtol=0, atol=0)
        assert own(x).shape == (3, 64)
        if dtype == "float32":
            assert isinstance(whole, DenseMatrix)
            assert isinstance(own, DenseMatrix)
            assert own.weight.data_ptr() == whole.weight.data_ptr()
            torch.testing.assert_close(own(x), one(x)[:, :64])
        else:
            assert isinstance(whole, StackedMatrix)
            assert all(isinstance(part, PackedMatrix) for part in whole.parts)
            mine = own.parts if isinstance(own, StackedMatrix) else (own,)
            assert len(mine) < len(whole.parts)
            assert all(part is other for part, other in zip(mine, whole.parts, strict=False))
            torch.testing.assert_close(own(x), one(x)[:, :64], rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_what_half_precision_cannot_hold_is_divided_in_bfloat16(*, tied: bool) -> None:
    """Wherever it is: both parts are held as the whole would be."""
    values = _random(200, 16)
    values[190, 0] = 1e6
    weight, ops = _host(values, "BF16"), _ops("bfloat16")
    whole, own = ops.divided_tied_matrix(ops.table(weight), 64) if tied else ops.divided_matrix(weight, 64)
    assert isinstance(whole, DenseMatrix)
    assert isinstance(own, DenseMatrix)
    assert own.weight.dtype == torch.bfloat16
    assert own.weight.data_ptr() == whole.weight.data_ptr()


@pytest.mark.parametrize(
    ("outputs", "bits", "group", "kind"),
    [
        (192, 4, 32, "Int4Matrix"),
        (192, 8, 32, "Int4Matrix"),
        (200, 4, 32, "CodesMatrix"),
        (192, 6, 32, "CodesMatrix"),
        (200, 8, 0, "RowMatrix"),
    ],
)
def test_a_divided_matrix_in_few_bits(outputs: int, bits: int, group: int, kind: str) -> None:
    tensor = quantize(_host(_random(outputs, 64, seed=1)), Affine(bits, group))
    x, ops = _random(3, 64, seed=5), _ops("bfloat16")
    one = ops.matrix([tensor], None)
    whole, own = ops.divided_matrix(tensor, 64)
    assert isinstance(whole, StackedMatrix)
    assert {type(part).__name__ for part in whole.parts} == {type(one).__name__} == {kind}
    assert own is whole.parts[0]
    torch.testing.assert_close(whole(x), one(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own(x), one(x)[:, :64], rtol=1e-6, atol=1e-6)


def test_a_table_in_few_bits_is_divided_in_its_own_memory() -> None:
    """As on a GPU, where the table is the unembedding."""
    table = CodesMatrix(quantize(_host(_random(200, 64)), Affine(4, 32)), None, torch.device("cpu"), torch.float32)
    whole, own = _ops().divided_tied_matrix(table, 64)
    assert whole is table
    assert isinstance(own, CodesMatrix)
    assert own.codes.data_ptr() == table.codes.data_ptr()
    x = _random(3, 64, seed=5)
    torch.testing.assert_close(own(x), whole(x)[:, :64])


@pytest.mark.parametrize("bias", [False, True])
def test_rows_through_a_matrix_of_8_bits_are_the_same_whatever_is_beside_them(*, bias: bool) -> None:
    """More of them than are applied at once."""
    own = [HostTensor("F32", np.arange(24, dtype=np.float32))] if bias else None
    matrix = _ops("bfloat16").matrix([quantize(_host(_random(24, 64, seed=1)), Affine(8, 0))], own)
    assert isinstance(matrix, RowMatrix)
    for rows in (INT8_ROWS, INT8_ROWS + 1, 2 * INT8_ROWS + 7):
        x = _random(rows, 64, seed=rows)
        assert torch.equal(matrix(x), torch.cat([matrix(x[row : row + 1]) for row in range(rows)]))


@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_unpack_to_the_same_room_in_turn(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """By the tensors' own values, in parts and whole."""
    tensors = [quantize(_host(_random(outputs, 64, seed=outputs)), Affine(bits, 32)) for outputs in (40, 200)]
    ops = _ops()
    matrices = [ops.matrix([tensor], None) for tensor in tensors]
    x = _random(3, 64, seed=5)
    expected = [F.linear(x, torch.from_numpy(dequantize(tensor))) for tensor in tensors]
    for at_once in (1 << 21, 64 * 48):
        monkeypatch.setattr("kafila.shard.torch_quantized.UNPACKED_AT_ONCE", (at_once, at_once))
        with ops.scope():
            found = [matrix(x) for matrix in matrices]
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right)


def test_room_is_made_once() -> None:
    scratch = Scratch()
    large = scratch.of(torch.Size((4, 5)))
    assert scratch.of(torch.Size((2, 3))).shape == (2, 3)
    assert scratch.of(torch.Size((20,))).data_ptr() == large.data_ptr()


def test_values_beyond_half_precision_are_kept_in_bfloat16() -> None:
    weight = _random(4, 8)
    weight[0, 0] = 1e6
    matrix = _ops("bfloat16").matrix([_host(weight, "BF16")], None)
    assert isinstance(matrix, DenseMatrix)
    x = torch.eye(8)
    assert matrix(x).dtype == torch.float32
    torch.testing.assert_close(matrix(x).t()[0, 0], torch.tensor(1e6), rtol=0.01, atol=0.0)
    table = _ops("bfloat16").table(_host(weight, "BF16"))
    assert isinstance(_ops("bfloat16").tied_matrix(table), DenseMatrix)


def test_a_bfloat16_weight_survives_packing() -> None:
    """Exactly from 2^-14 on; below, half precision's smallest step is 2^-24."""
    exponents = torch.arange(-24.0, 16.0)
    weight = (torch.tensor([1.0, 1.0078125, 1.9921875, -1.5]).unsqueeze(1) * 2**exponents).bfloat16().float()
    matrix = _ops("bfloat16").matrix([_host(weight, "BF16")], None)
    assert isinstance(matrix, PackedMatrix)
    back = matrix(torch.eye(len(exponents))).t()
    large = weight.abs() >= 2**-14
    assert (back[large] == weight[large]).all()
    assert ((back - weight).abs() <= 2**-25).all()


@given(rows=st.integers(1, 4), heads=st.integers(1, 3), pairs=st.integers(1, 4), start=st.integers(0, 60))
def test_complex_and_real_rotations_agree(rows: int, heads: int, pairs: int, start: int) -> None:
    frequencies = [10000 ** (-index / pairs) for index in range(pairs)]
    x = _random(rows, heads, 2 * pairs)
    turned = x.clone()
    attention.rotate(turned, _ops().rope(frequencies, 64).narrow(0, start, rows))
    for dtype in (torch.float32, torch.bfloat16):
        real = x.to(dtype, copy=True)
        with_pairs = torch.outer(torch.arange(64.0), torch.tensor(frequencies))
        attention.rotate(real, torch.stack((with_pairs.cos(), with_pairs.sin()), 1).narrow(0, start, rows))
        tolerance = 1e-6 if dtype is torch.float32 else 0.03
        torch.testing.assert_close(real.float(), turned, rtol=tolerance, atol=tolerance)


ROPES = {
    "plain": ({"rope_type": "default", "rope_theta": 5e5}, None),
    "linear": ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, LinearRope(4.0)),
    "llama3": ({"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, Llama3Rope(8.0, 1.0, 4.0, 8192)),
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    parameters, scaling = ROPES[kind]
    keys: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 131072}
    theirs = transformers.LlamaConfig(rope_parameters=parameters, **keys)
    if kind == "plain":
        expected = 1 / 5e5 ** (torch.arange(0, 128, 2).float() / 128)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    config = parse_config(json.dumps(LLAMA | {"rope_parameters": parameters, **keys}))
    assert config.ropes[0].scaling == scaling
    torch.testing.assert_close(torch.tensor(config.ropes[0].frequencies(128)), expected)


def test_attention_shapes_are_values() -> None:
    assert dataclasses.replace(AttentionShape(2, 1, 4, 0), window=3) == AttentionShape(2, 1, 4, 3)
