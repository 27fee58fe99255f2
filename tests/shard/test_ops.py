"""Every backend's operations against their definitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kafila.shard.ops import AttentionShape, HostTensor, Norm, Ops
from kafila.types import Segment
from tests.shard.backends import BACKENDS, make_ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02, "float16": 0.003}

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def host(values: Tensor, dtype: str = "F32") -> HostTensor:
    """As a checkpoint stores it."""
    if dtype == "BF16":
        return HostTensor("BF16", values.bfloat16().view(torch.int16).numpy().view(np.uint16))
    return HostTensor(dtype, values.numpy() if dtype == "F32" else values.half().numpy())


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_of(ops: Ops[Any], values: Tensor) -> Any:
    """(rows, width) as activations."""
    return ops.from_bytes(values.contiguous().numpy().tobytes(), "float32", values.shape[-1])


def numbers(ops: Ops[Any], x: Any) -> npt.NDArray[np.float32]:
    """Back again."""
    with ops.scope():
        return ops.to_numpy(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_of_parts(backend: str, dtype: str, stored: str, *, bias: bool) -> None:
    parts = [host(random(8, 16, seed=1), stored), host(random(24, 16, seed=2), "BF16")]
    biases = [host(random(8, seed=3), stored), host(random(24, seed=4))] if bias else None
    ops = make_ops(backend, dtype)
    x = random(3, 16, seed=5)
    weight = torch.cat([random(8, 16, seed=1), random(24, 16, seed=2)])
    expected = F.linear(x, weight, torch.cat([random(8, seed=3), random(24, seed=4)]) if bias else None)
    with ops.scope():
        np.testing.assert_allclose(
            numbers(ops, ops.matrix(parts, biases)(rows_of(ops, x))), expected.numpy(), rtol=0.02, atol=0.1
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(backend: str, dtype: str) -> None:
    ops = make_ops(backend, dtype)
    weight, x = 1 + 0.2 * random(48), random(5, 48, seed=1)
    x[2] = 0
    rows = rows_of(ops, x)
    before = numbers(ops, rows)
    expected = F.rms_norm(torch.from_numpy(before), (48,), weight, 1e-5)
    with ops.scope():
        normed = numbers(ops, ops.rms_norm(rows, ops.norm(host(weight), 1e-5)))
    np.testing.assert_allclose(normed, expected.numpy(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert (numbers(ops, rows) == before).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate(backend: str, activation: str) -> None:
    ops, x = make_ops(backend), random(3, 20)
    gate = F.silu(x[:, 10:]) if activation == "silu" else F.gelu(x[:, 10:], approximate="tanh")
    with ops.scope():
        gated = numbers(ops, ops.gated(rows_of(ops, x), activation))
    np.testing.assert_allclose(gated, (x[:, :10] * gate).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_scaled_and_capped(backend: str, dtype: str) -> None:
    ops, x, kind = make_ops(backend, dtype), 10 * random(3, 20), DTYPES[dtype]
    given = numbers(ops, rows_of(ops, x))
    factor = torch.tensor(7.3, dtype=kind).item()
    with ops.scope():
        scaled = numbers(ops, ops.scaled(rows_of(ops, x), 7.3))
        capped = numbers(ops, ops.capped(rows_of(ops, x), 5))
    np.testing.assert_allclose(scaled, given * factor, rtol=torch.finfo(kind).eps, atol=1e-6)
    np.testing.assert_allclose(capped, 5 * np.tanh(given / 5), rtol=1e-5, atol=1e-6)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, start: int, window: int, scale: float | None = None, cap: float = 0
) -> Tensor:
    """By definition: q (length, heads, dim) at positions from ``start``; k, v (end, kv_heads, dim)."""
    length, heads, dim = q.shape
    group = heads // k.size(1)
    out = torch.zeros(length, heads, dim)
    for row in range(length):
        position = start + row
        first = max(0, position + 1 - window) if window else 0
        for head in range(heads):
            keys, values = k[first : position + 1, head // group], v[first : position + 1, head // group]
            scores = keys @ q[row, head] * (dim**-0.5 if scale is None else scale)
            out[row, head] = torch.softmax(cap * torch.tanh(scores / cap) if cap else scores, 0) @ values
    return out.reshape(length, heads * dim)


def _turned(x: Tensor, frequencies: list[float], start: int) -> Tensor:
    """Neighbouring pairs of ``x`` (rows, heads, dim) by their positions' angles."""
    angles = torch.outer(torch.arange(start, start + x.size(0), dtype=torch.float64), torch.tensor(frequencies))
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:2], -1, 2))
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.view_as_real(turned).reshape(x.shape).float()


@given(rows=st.integers(1, 4), heads=st.integers(1, 3), pairs=st.integers(1, 4), start=st.integers(0, 5000))
def test_neighbours_are_turned_by_their_positions_angle(
    backend: str, rows: int, heads: int, pairs: int, start: int
) -> None:
    ops, dim = make_ops(backend), 2 * pairs
    frequencies = [10000 ** (-index / pairs) for index in range(pairs)]
    q, k, v = (random(rows, heads, dim, seed=seed) for seed in range(3))
    shape = AttentionShape(heads, heads, dim, rows)  # what lies before is out of the window
    before = torch.zeros(start, heads, dim)
    keys, values = torch.cat([before, _turned(k, frequencies, start)]), torch.cat([before, v])
    expected = _attend(_turned(q, frequencies, start), keys, values, start, rows)[-1]
    with ops.scope():
        placement = ops.place([Segment(0, start, rows, sample=False)], ops.rope(frequencies, 5004))
        qkv = rows_of(ops, torch.cat([q, k, v], 1).reshape(rows, -1))
        out = numbers(ops, ops.attention(qkv, shape, None, ops.kv_storage(1, 5004, heads, dim), placement))
    np.testing.assert_allclose(out[-1], expected.numpy(), rtol=2e-3, atol=2e-3)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    window=st.sampled_from([0, 1, 3, 100]),
)
def test_attention_over_ragged_batches(
    backend: str, lengths: list[tuple[int, int]], heads: tuple[int, int], window: int
) -> None:
    """Against the definition, with slots that grow over several batches; no rotation (frequency 0), no norm."""
    ops, (many, few), dim, context = make_ops(backend), heads, 4, 40
    shape = AttentionShape(many, few, dim, window)
    kv = ops.kv_storage(4, context, few, dim)
    rope = ops.rope([0.0] * (dim // 2), context)
    held: list[list[Tensor]] = [[] for _ in range(4)]
    for turn in range(2):
        segments, rows, expected = [], [], []
        for number, (slot, length) in enumerate(lengths):
            start = len(held[slot])
            new = random(length, many + 2 * few, dim, seed=10 * turn + number)
            segments.append(Segment(slot, start, length, sample=False))
            rows.append(new.reshape(length, -1))
            held[slot].extend(new[:, many:])
            past = torch.stack(held[slot])
            expected.append(_attend(new[:, :many], past[:, :few], past[:, few:], start, window))
        with ops.scope():
            out = ops.attention(rows_of(ops, torch.cat(rows)), shape, None, kv, ops.place(segments, rope))
        np.testing.assert_allclose(numbers(ops, out), torch.cat(expected).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [None, 0.8])
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 40])
def test_scores_are_scaled_and_capped(backend: str, scale: float | None, cap: float, window: int) -> None:
    """In a prompt longer than the rows that are done at once, a chunk after it, and a token."""
    ops, dim, start = make_ops(backend), 4, 0
    shape, kv = AttentionShape(4, 2, dim, window, scale, cap), ops.kv_storage(1, 160, 2, dim)
    rope, past = ops.rope([0.0] * (dim // 2), 160), 2 * random(160, 8, dim)
    for length in (140, 5, 1):
        end = start + length
        q, k, v = past[start:end, :4], past[:end, 4:6], past[:end, 6:]
        with ops.scope():
            rows = rows_of(ops, past[start:end].reshape(length, -1))
            out = ops.attention(rows, shape, None, kv, ops.place([Segment(0, start, length, sample=False)], rope))
        expected = _attend(q, k, v, start, window, scale, cap)
        np.testing.assert_allclose(numbers(ops, out), expected.numpy(), rtol=1e-4, atol=1e-5)
        start = end


@pytest.mark.parametrize("window", [0, 40])
def test_a_long_chunk_far_into_a_conversation(backend: str, window: int) -> None:
    """More rows than are done at once where a mask says who sees whom, the last of them a few."""
    ops, dim, start, length = make_ops(backend), 4, 70, 600
    shape, kv = AttentionShape(2, 1, dim, window), ops.kv_storage(1, 700, 1, dim)
    rope, past = ops.rope([0.0] * (dim // 2), 700), random(start + length, 4, dim)
    with ops.scope():
        for begin, end in ((0, start), (start, start + length)):
            rows = rows_of(ops, past[begin:end].reshape(end - begin, -1))
            placement = ops.place([Segment(0, begin, end - begin, sample=False)], rope)
            out = ops.attention(rows, shape, None, kv, placement)
    expected = _attend(past[start:, :2], past[:, 2:3], past[:, 3:], start, window)
    np.testing.assert_allclose(numbers(ops, out), expected.numpy(), rtol=1e-4, atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    start=st.integers(0, 6),
    window=st.sampled_from([0, 1, 3, 100]),
    cap=st.sampled_from([0.0, 1.5]),
)
def test_only_last_rows_attend_where_others_go_nowhere(
    backend: str, lengths: list[int], start: int, window: int, cap: float
) -> None:
    """The same numbers, and the same keys and values."""
    ops, dim = make_ops(backend), 4
    shape = AttentionShape(4, 2, dim, window, cap=cap)
    segments = [Segment(slot, start, length, sample=False) for slot, length in enumerate(lengths)]
    rope = ops.rope([0.3] * (dim // 2), 16)
    more = Segment(0, start + lengths[0], 1, sample=True)
    outputs, written = [], []
    for last_only in (False, True):
        kv = ops.kv_storage(4, 16, 2, dim)
        with ops.scope():
            if start:
                before = ops.place([Segment(slot, 0, start, sample=False) for slot in range(len(lengths))], rope)
                past = rows_of(ops, random(start * len(lengths), 8 * dim, seed=1))
                ops.attention(past, shape, None, kv, before)
            placement = dataclasses.replace(ops.place(segments, rope), last_only=last_only)
            rows = rows_of(ops, random(sum(lengths), 8 * dim))
            out = ops.attention(rows, shape, None, kv, placement)
            outputs.append(numbers(ops, out if last_only else ops.take_rows(out, placement.last_rows())))
            after = ops.attention(rows_of(ops, random(1, 8 * dim)), shape, None, kv, ops.place([more], rope))
        written.append(numbers(ops, after))
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(written[1], written[0])


def test_q_and_k_are_normalised_and_v_is_not(backend: str) -> None:
    ops, shape = make_ops(backend), AttentionShape(2, 1, 4, 0)
    weight = 1 + 0.3 * random(3, 4, seed=9)
    qkv = random(5, 16)
    rows = qkv.view(5, 4, 4).clone()
    rows[:, :3] = F.rms_norm(rows[:, :3], (4,), None, 1e-5) * weight

    def attended(values: Tensor, norm: Norm[Any] | None) -> npt.NDArray[np.float32]:
        placement = ops.place([Segment(0, 0, 5, sample=False)], ops.rope([1.0, 0.1], 8))
        with ops.scope():
            out = ops.attention(rows_of(ops, values), shape, norm, ops.kv_storage(1, 8, 1, 4), placement)
        return numbers(ops, out)

    plain = attended(rows.reshape(5, 16), None)
    np.testing.assert_allclose(attended(qkv, ops.norm(host(weight), 1e-5)), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", DTYPES)
def test_rows_go_out_and_come_in(backend: str, dtype: str, wire: str) -> None:
    ops = make_ops(backend, dtype)
    x = random(3, 8).to(DTYPES[wire]).to(DTYPES[dtype]).to(DTYPES[wire]).float()
    with ops.scope():
        data = ops.to_bytes(rows_of(ops, x), wire)
        assert len(data) == 24 * (4 if wire == "float32" else 2)
        back = ops.from_bytes(data, wire, 8)
        assert (numbers(ops, back) == x.numpy()).all()
        ops.add(back, back)  # memory of its own
        assert ops.to_bytes(ops.from_bytes(data, wire, 8), wire) == data
        assert ops.to_bytes(ops.take_rows(ops.from_bytes(data, wire, 8), [2, 0]), wire) == (
            data[2 * len(data) // 3 :] + data[: len(data) // 3]
        )
    assert numbers(ops, back).dtype == np.float32


def test_what_is_embedded_does_not_touch_the_table(backend: str) -> None:
    ops = make_ops(backend)
    values = random(6, 4)
    with ops.scope():
        table = ops.table(host(values.clone()))
        ops.add(ops.embed(table, [3, 3, 0]), rows_of(ops, torch.ones(3, 4)))
        again = numbers(ops, ops.embed(table, list(range(6))))
        np.testing.assert_array_equal(again, values.numpy())
        logits = numbers(ops, ops.tied_matrix(table)(rows_of(ops, values)))
    np.testing.assert_allclose(logits, (values @ values.t()).numpy(), rtol=1e-5, atol=1e-5)
