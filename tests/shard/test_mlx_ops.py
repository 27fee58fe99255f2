"""What is MLX's own: weights in few bits, caches that stay in place, and when things are evaluated."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kafila.errors import DeviceError
from kafila.shard.formats import Affine
from kafila.shard.ops import AttentionShape, HostTensor, QuantizedTensor
from kafila.types import Segment
from tests.shard.checkpoints import make_checkpoint
from tests.shard.rings import LocalRing
from tests.shard.test_ops import host, numbers, random, rows_of

mx = pytest.importorskip("mlx.core", reason="MLX is not installed; not every platform has a wheel")

from kafila.shard.mlx_matrices import QuantizedMatrix, StackedMatrix  # noqa: E402  - only where MLX is
from kafila.shard.mlx_ops import (  # noqa: E402  - it imports mlx
    CACHE_BYTES,
    EVALUATED_ROWS,
    WORKSPACE_BYTES,
    MlxOps,
)


def quantized(outputs: int, inputs: int, bits: int, group: int, seed: int = 0) -> tuple[QuantizedTensor, torch.Tensor]:
    """A random matrix in few bits, and the same in full."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 1 << bits, (outputs, inputs), dtype=np.uint64)
    places = (codes[:, :, None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    words = np.packbits(places.astype(np.uint8).reshape(outputs, -1), axis=1, bitorder="little").view("<u4")
    scales, biases = (random(outputs, inputs // group, seed=seed + i) / 2**bits for i in (1, 2))
    full = codes.astype(np.float32) * scales.numpy().repeat(group, 1) + biases.numpy().repeat(group, 1)
    return QuantizedTensor(words, host(scales), host(biases), bits, group), torch.from_numpy(full)


def applied(ops: MlxOps, parts: list[Any], x: torch.Tensor) -> npt.NDArray[np.float32]:
    """What the matrix of ``parts`` makes of ``x``."""
    return numbers(ops, ops.matrix(parts, None)(rows_of(ops, x)))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_matrix_in_few_bits(bits: int, group: int) -> None:
    part, full = quantized(12, 256, bits, group)
    x = random(3, 256, seed=9)
    np.testing.assert_allclose(applied(MlxOps("float32"), [part], x), (x @ full.t()).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "group"), [(256, 256), (96, 96), (64, 16), (80, 80)])
def test_groups_that_no_kernel_takes(inputs: int, group: int) -> None:
    """Constants are repeated where groups can be divided, else the matrix is held in full; sizes say so."""
    part, full = quantized(1200, inputs, 8, group)
    x, ops = random(3, inputs, seed=9), MlxOps("bfloat16")
    np.testing.assert_allclose(applied(MlxOps("float32"), [part], x), (x @ full.t()).numpy(), rtol=1e-4, atol=1e-4)
    mx.clear_cache()  # a buffer that is taken from there may be larger than what it is for
    before = mx.get_active_memory()
    matrix = ops.matrix([part], None)
    taken = mx.get_active_memory() - before
    assert taken == pytest.approx(ops.matrix_bytes(1200, inputs, Affine(8, group)), rel=0.02)
    assert isinstance(matrix, QuantizedMatrix) == (group >= 96)


def test_parts_that_are_stored_differently_lie_beside_each_other() -> None:
    parts = [quantized(4, 128, 4, 64), quantized(3, 128, 4, 64, seed=3), quantized(5, 128, 8, 32, seed=6)]
    plain, biases = random(2, 128, seed=20), [random(n, seed=n) for n in (4, 3, 5, 2)]
    weight, x = torch.cat([full for _, full in parts] + [plain]), random(3, 128, seed=9)
    ops = MlxOps("float32")
    matrix = ops.matrix([*(part for part, _ in parts), host(plain)], [host(bias) for bias in biases])
    assert isinstance(matrix, StackedMatrix)
    assert len(matrix.parts) == 3
    expected = torch.nn.functional.linear(x, weight, torch.cat(biases))
    np.testing.assert_allclose(numbers(ops, matrix(rows_of(ops, x))), expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "turned", "few bits"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_divided_matrix_is_held_once(kind: str, monkeypatch: pytest.MonkeyPatch, *, tied: bool) -> None:
    if kind != "turned":
        monkeypatch.setattr("kafila.shard.mlx_matrices.TURNED_WEIGHTS", 0)
    few, full = quantized(1024, 256, 4, 64)
    weight, ops, x = (
        few if kind == "few bits" else host(full),
        MlxOps("float32"),
        rows_of(MlxOps("float32"), random(3, 256)),
    )
    table = ops.table(weight) if tied else None
    mx.clear_cache()
    before = mx.get_active_memory()
    whole, own = ops.divided_tied_matrix(table, 192) if tied else ops.divided_matrix(weight, 192)
    gc.collect()
    taken = mx.get_active_memory() - before
    once = ops.matrix_bytes(1024, 256, Affine(4, 64) if kind == "few bits" else None)
    assert taken <= (0 if tied else once) + 64
    logits = numbers(ops, whole(x))
    np.testing.assert_allclose(logits, np.array(x) @ full.numpy().T, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(numbers(ops, own(x)), logits[:, :192], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_in_few_bits(bits: int) -> None:
    part, full = quantized(10, 64, bits, 32)
    ops = MlxOps("float32")
    table = ops.table(part)
    np.testing.assert_allclose(numbers(ops, ops.embed(table, [7, 7, 0])), full[[7, 7, 0]].numpy(), rtol=1e-5, atol=1e-6)
    x = random(2, 64)
    tied = numbers(ops, ops.tied_matrix(table)(rows_of(ops, x)))
    np.testing.assert_allclose(tied, (x @ full.t()).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [[0], [0, 1, 2], [2, 0]])
def test_caches_are_written_in_place(batch: list[int]) -> None:
    """A pass takes a few rows beside the cache and not a second one, whoever shares the batch."""
    ops, shape = MlxOps("float32"), AttentionShape(4, 2, 64, 0)
    kv = ops.kv_storage(3, 4096, 2, 64)
    rope = ops.rope([1.0] * 32, 4096)
    one_slot = 2 * 2 * 4096 * 64 * 4
    held = mx.get_active_memory()
    for position in range(4):
        mx.reset_peak_memory()
        segments = [Segment(slot, position, 1, sample=False) for slot in batch]
        rows = rows_of(ops, random(len(batch), 8 * 64))
        ops.to_bytes(ops.attention(rows, shape, None, kv, ops.place(segments, rope)), "float32")
        assert mx.get_peak_memory() - held < one_slot / 4


def test_a_long_pass_is_evaluated_block_by_block(tmp_path: Path) -> None:
    """So that its memory is one block's, and an interrupt is heeded between blocks."""
    ring = LocalRing(make_checkpoint(tmp_path, "llama"), (4,), backends=("mlx",))
    shard, length, ran = ring.shards[0], EVALUATED_ROWS + 1, 0

    def counting(x: Any, kv: Any, placement: Any, run: Any = shard._prompt_blocks[0]) -> Any:
        nonlocal ran
        ran += 1
        shard.interrupt()
        return run(x, kv, placement)

    shard._prompt_blocks[0] = counting
    with pytest.raises(DeviceError, match="stopped"):
        ring.forward([Segment(0, 0, length, sample=False)], [1] * length)
    assert ran == 1


def test_memory_is_metals_working_set_or_what_cuda_has_free_and_a_cpus_is_counted_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MlxOps("float32").memory_bytes() is None
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 12 << 30, "device_name": "M9"})
    limit = mx.set_memory_limit(1 << 40)
    try:
        metal = MlxOps("float32", memory_cap=4 << 30)
        assert mx.set_memory_limit(1 << 40) == (4 << 30) + WORKSPACE_BYTES
        MlxOps("float32")
        assert mx.set_memory_limit(limit) == 12 << 30
    finally:
        mx.set_memory_limit(limit)
    kept = mx.ones((1 << 20,))
    mx.eval(kept)
    free = metal.memory_bytes()
    assert free == (12 << 30) - mx.get_active_memory() <= (12 << 30) - kept.nbytes
    monkeypatch.setattr(mx, "device_info", lambda: {"free_memory": 3 << 30, "architecture": "sm_90"})
    cuda = MlxOps("float32")
    cuda._on_cpu = False
    assert cuda.memory_bytes() == 3 << 30
    assert cuda.device == "mlx sm_90"


def test_little_is_kept_of_what_is_freed() -> None:
    MlxOps("float32")
    for _ in range(3):
        mx.eval(mx.zeros((CACHE_BYTES // 4 + 1,)))
    gc.collect()
    assert mx.get_cache_memory() <= CACHE_BYTES


def test_an_embedding_is_no_view_of_the_file() -> None:
    values = np.ones((4, 8), np.float32)
    ops = MlxOps("float32")
    table = ops.table(HostTensor("F32", values))
    values[:] = 2
    assert (numbers(ops, ops.embed(table, [0])) == 1).all()
