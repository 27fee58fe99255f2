"""Weights into few bits and back: against the definition, and against MLX where it is installed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ModelIncomplete, UnsupportedModel, UsageError
from kafila.shard.config import parse_config
from kafila.shard.formats import SUPPORTED_BITS, SUPPORTED_GROUPS, Affine, Quantization, parse_quantization
from kafila.shard.manifest import model_manifest
from kafila.shard.ops import HostTensor, QuantizedTensor
from kafila.shard.quantize import dequantize, pack_codes, quantize, stacked, unpack_codes
from kafila.shard.schemes import with_scheme
from tests.shard.test_config import LLAMA


def _weights(outputs: int, inputs: int, seed: int = 0) -> HostTensor:
    values = np.random.default_rng(seed).standard_normal((outputs, inputs), np.float32)
    return HostTensor("F32", values * np.float32(0.02))


@given(bits=st.sampled_from(SUPPORTED_BITS), seed=st.integers(0, 99), rows=st.integers(1, 5), words=st.integers(1, 4))
def test_codes_survive_packing(bits: int, seed: int, rows: int, words: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 32 * words), np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, words * bits)
    none = HostTensor("F32", np.zeros((rows, words), np.float32))
    np.testing.assert_array_equal(unpack_codes(QuantizedTensor(packed, none, none, bits, 32)), codes)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("group", [*SUPPORTED_GROUPS, 0])
def test_no_weight_errs_by_more_than_plain_rounding_could(bits: int, group: int) -> None:
    weight = _weights(24, 256)
    tensor = quantize(weight, Affine(bits, group))
    assert (tensor.outputs, tensor.inputs, tensor.group_size) == (24, 256, group or 256)
    error = dequantize(tensor) - weight.data
    grouped = weight.data.reshape(24, -1, group or 256)
    span = 2 * np.abs(grouped).max(-1) if not group else np.ptp(grouped, -1)
    rounding = span / ((1 << bits) - (1 if group else 2)) / np.sqrt(12)
    mean_square = np.square(error.reshape(grouped.shape)).mean(-1)
    assert np.sqrt(mean_square.mean() / np.square(rounding).mean()) < 1.08


def test_four_bits_err_less_than_plain_rounding() -> None:
    weight = _weights(64, 256)
    grouped = weight.data.reshape(64, -1, 32)
    low, span = grouped.min(-1, keepdims=True), np.ptp(grouped, -1, keepdims=True)
    plain = np.rint((grouped - low) / span * 15) * span / 15 + low
    ours = dequantize(quantize(weight, Affine(4, 32))).reshape(plain.shape)
    assert np.square(ours - grouped).mean() < 0.93 * np.square(plain - grouped).mean()


def test_a_group_of_one_value_is_that_value() -> None:
    weight = HostTensor("F32", np.full((2, 64), 0.25, np.float32))
    for form in (Affine(4, 32), Affine(8, 64), Affine(8, 0)):
        np.testing.assert_allclose(dequantize(quantize(weight, form)), weight.data, rtol=0.01)
    zeros = HostTensor("F32", np.zeros((2, 64), np.float32))
    for form in (Affine(4, 32), Affine(8, 0)):
        np.testing.assert_allclose(dequantize(quantize(zeros, form)), 0, atol=1e-6)


def test_what_is_worked_on_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(_weights(9, 64), Affine(4, 32))
    monkeypatch.setattr("kafila.shard.quantize.AT_ONCE", 200)
    np.testing.assert_array_equal(quantize(_weights(9, 64), Affine(4, 32)).codes, whole.codes)


def test_half_precision_sources_are_read() -> None:
    weight = _weights(4, 64)
    bits = (weight.data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    for host in (HostTensor("BF16", bits), HostTensor("F16", weight.data.astype(np.float16))):
        np.testing.assert_allclose(dequantize(quantize(host, Affine(8, 32))), weight.data, atol=6e-4)


def test_rows_and_stacks() -> None:
    whole = quantize(_weights(6, 64), Affine(4, 32))
    again = stacked([whole.rows(slice(0, 2)), whole.rows([2, 3, 4, 5])])
    np.testing.assert_array_equal(dequantize(again), dequantize(whole))
    np.testing.assert_array_equal(dequantize(whole.rows([5, 0])), dequantize(whole)[[5, 0]])


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("group", SUPPORTED_GROUPS)
def test_mlx_means_the_same_by_its_codes(bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core")
    packed = mx.quantize(mx.array(_weights(8, 256).data), group_size=group, bits=bits)
    codes, scales, biases = map(np.array, packed)
    ours = QuantizedTensor(codes, HostTensor("F32", scales), HostTensor("F32", biases), bits, group)
    theirs = np.array(mx.dequantize(*packed, group_size=group, bits=bits))
    np.testing.assert_allclose(dequantize(ours), theirs, atol=1e-6)


def test_what_mlx_writes_is_understood() -> None:
    module, other = "model.layers.0.mlp.up_proj", "lm_head"
    found = parse_quantization(
        {"bits": 4, "group_size": 64, module: {"bits": 8}, other: False, "model.embed_tokens": True}
    )
    assert found == Quantization(Affine(4, 64), {module: Affine(8, 64), other: None})
    assert found.of("model.embed_tokens") == Affine(4, 64)
    assert parse_quantization(None) is None


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ({"bits": 7, "group_size": 64}, UnsupportedModel, "7 bits in groups of 64 .*2, 3, 4, 5, 6, 8 bits"),
        ({"bits": 4, "group_size": 16}, UnsupportedModel, "groups of 16 .*32, 64, 128"),
        ({"bits": 4}, UnsupportedModel, "groups of None"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, UnsupportedModel, "'mxfp4'.*affine"),
        ({"bits": 4, "group_size": 32, "lm_head": {"bits": 1}}, UnsupportedModel, "lm_head: 1 bits"),
        ([4], ModelIncomplete, "not a JSON object"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(values: object, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        parse_quantization(values)


SHAPES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}


def test_sizes_are_those_of_what_is_held() -> None:
    plain = parse_config(json.dumps(LLAMA | SHAPES))
    eight, four = with_scheme(plain, "int8"), with_scheme(plain, "int4")
    assert with_scheme(plain, "") is plain
    sizes = {
        name: model_manifest("m", config, "bfloat16") for name, config in [("p", plain), ("8", eight), ("4", four)]
    }
    weights = (sizes["p"].block_bytes - 2 * 128 * 2) // 2
    assert sizes["8"].block_bytes == pytest.approx(weights, rel=0.08)
    v, down = plain.kv_heads * plain.head_dim * 128, 128 * 256
    assert sizes["4"].block_bytes == pytest.approx((weights - v - down) * 5 / 8 + v + down, rel=0.04)
    assert sizes["4"].head_bytes == sizes["8"].head_bytes < 0.55 * sizes["p"].head_bytes
    assert sizes["p"].kv_bytes_per_token_per_block == sizes["4"].kv_bytes_per_token_per_block
    wide = model_manifest("m", four, "bfloat16", "float32")
    assert wide.kv_bytes_per_token_per_block == 2 * sizes["4"].kv_bytes_per_token_per_block


def test_the_largest_block_counts() -> None:
    config = parse_config(json.dumps(LLAMA | SHAPES | {"quantization": {"bits": 4, "group_size": 64}}))
    wide = {"bits": 4, "group_size": 64, "model.layers.1.mlp.up_proj": {"bits": 8}}
    mixed = parse_config(json.dumps(LLAMA | SHAPES | {"quantization": wide}))
    more = model_manifest("m", mixed, "bfloat16").block_bytes - model_manifest("m", config, "bfloat16").block_bytes
    assert more == 128 * 256 // 2


def test_a_matrix_that_does_not_divide_stays_in_more_bits() -> None:
    odd = with_scheme(parse_config(json.dumps(LLAMA | SHAPES | {"intermediate_size": 68})), "int4").quantization
    assert odd is not None
    assert odd.of("model.layers.0.mlp.down_proj") == Affine(8, 0)
    assert odd.of("model.layers.0.mlp.up_proj") == Affine(4, 32)
    assert odd.of("lm_head") == Affine(8, 0)


def test_a_checkpoint_is_not_quantized_twice() -> None:
    config = parse_config(json.dumps(LLAMA | {"quantization": {"bits": 4, "group_size": 64}}))
    with pytest.raises(UsageError, match="quantized already: leave --quantize away"):
        with_scheme(config, "int8")
