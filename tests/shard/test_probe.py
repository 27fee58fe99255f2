"""The probe by a clock that is told how long things take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kafila.shard import probe
from kafila.shard.config import DecoderConfig, parse_config
from kafila.shard.decoder import Shard
from kafila.shard.manifest import model_manifest
from kafila.shard.probe import measure, spread
from kafila.shard.torch_ops import TorchOps
from kafila.types import Capability, Segment
from tests.shard.test_config import LLAMA

TINY = parse_config(json.dumps(LLAMA))
MB = 1 << 20
BLOCK_S, OVERHEAD_S, ROW_S, HEAD_S = 0.002, 0.0005, 0.0001, 0.004


@dataclass
class Device:
    """Moves the clock by what a forward pass is meant to take, and by what placing a matrix is."""

    now: float = 0.0
    matrix_s: float = 0.0
    noise: Iterator[float] | None = None
    passes: list[tuple[int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def timed_tokens(self) -> int:
        return sum(1 for blocks, rows in self.passes if rows == 1 and blocks)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Every shard's forward pass takes a known time, and still does the work."""
    device = Device()
    forward, sample, matrix = Shard.forward, Shard.sample, TorchOps.matrix

    def slow_forward(shard: Any, segments: Sequence[Segment], *rest: Any) -> bytes:
        blocks, rows = len(shard._blocks), sum(segment.length for segment in segments)
        device.passes.append((blocks, rows))
        scale = next(device.noise) if device.noise and blocks and rows == 1 else 1.0
        device.now += OVERHEAD_S + blocks * (BLOCK_S * scale if rows == 1 else ROW_S * rows)
        result: bytes = forward(shard, segments, *rest)
        return result

    def slow_sample(shard: Any, *rest: Any) -> Any:
        device.now += HEAD_S
        return sample(shard, *rest)

    def slow_matrix(ops: TorchOps, *rest: Any) -> Any:
        device.now += device.matrix_s
        return matrix(ops, *rest)

    monkeypatch.setattr(Shard, "forward", slow_forward)
    monkeypatch.setattr(Shard, "sample", slow_sample)
    monkeypatch.setattr(TorchOps, "matrix", slow_matrix)
    monkeypatch.setattr(probe, "available_ram", lambda: 4000 * MB)
    return device


def _ops(dtype: str = "bfloat16") -> TorchOps:
    return TorchOps("cpu", dtype, threads=1)


def _measure(device: Device, config: DecoderConfig = TINY, dtype: str = "bfloat16", **more: Any) -> Capability:
    return measure(_ops(dtype), config, context=128, slots=2, clock=device.clock, last_level_cache=0, **more)


def test_bandwidths_overhead_and_arithmetic_come_out(device: Device) -> None:
    found = _measure(device)
    sizes = model_manifest("m", TINY, "bfloat16")
    assert found.bandwidth_bytes_per_s == pytest.approx(sizes.block_bytes / BLOCK_S)
    assert found.head_bytes_per_s == pytest.approx(sizes.head_read_bytes / HEAD_S)
    assert found.overhead_s == pytest.approx(OVERHEAD_S)
    assert found.flops == pytest.approx(2 * 64 * sizes.block_bytes / 2 / (OVERHEAD_S + 64 * ROW_S))
    assert found.bandwidth_spread == pytest.approx(0, abs=1e-6)
    assert found.memory_bytes == (4000 - 200 - 512) * MB
    assert found.device == "cpu (1 thread)"
    assert found.remarks == ()


def test_an_outlier_moves_neither_the_median_nor_the_spread(device: Device) -> None:
    device.noise = iter([1.0, 1.0, *(3.0 if turn == 3 else 1.0 for turn in range(25))])
    found = _measure(device)
    assert found.bandwidth_bytes_per_s == pytest.approx(model_manifest("m", TINY, "bfloat16").block_bytes / BLOCK_S)
    assert found.bandwidth_spread == pytest.approx(0, abs=1e-6)


def test_a_busy_machine_is_said_to_be_busy(device: Device) -> None:
    device.noise = iter([1.0, 1.0, *(1.4 if turn % 5 == 0 else 1.0 for turn in range(25))])
    found = _measure(device)
    assert found.bandwidth_spread == pytest.approx(0.4)
    (remark,) = found.remarks
    assert remark.startswith("this machine was busy while it was measured: its speed varied by 40%")


def test_the_spread_leaves_out_the_outermost_tenths() -> None:
    assert spread([1, 2, 3]) == 1
    assert spread([1, *[2.0] * 8, 50]) == 0
    assert spread([1, *[2.0] * 7, 4, 50]) == 1


def test_a_slow_device_is_timed_a_few_times_only(device: Device) -> None:
    device.noise = iter([1000.0] * 100)
    _measure(device)
    assert device.timed_tokens() == 1 + 3


def test_a_fast_device_is_timed_often(device: Device) -> None:
    _measure(device)
    assert device.timed_tokens() == 2 + 25


@pytest.mark.parametrize("matrix_s", [0.05, 0.2, 0.6])
def test_a_device_slow_to_take_weights_gets_fewer(device: Device, matrix_s: float) -> None:
    device.matrix_s = matrix_s
    found = _measure(device)
    assert found.bandwidth_bytes_per_s == pytest.approx(model_manifest("m", TINY, "bfloat16").block_bytes / BLOCK_S)
    # Four matrices a block: building stops with the block during which its time is over.
    assert max(blocks for blocks, _ in device.passes) == max(1, -(-0.7 // (4 * matrix_s)))


def test_the_owners_limit(device: Device) -> None:
    assert _measure(device, dtype="float32", memory_cap=7).memory_bytes == 7


def test_a_device_that_fails_has_memory_and_no_speed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TorchOps, "matrix", fail)
    found = _measure(device)
    assert (found.bandwidth_bytes_per_s, found.overhead_s, found.flops) == (None, None, None)
    assert found.memory_bytes > 0


def test_a_clock_that_stands_still_measures_nothing() -> None:
    found = measure(_ops(), TINY, context=128, slots=1, clock=lambda: 0.0, last_level_cache=0)
    assert found.bandwidth_bytes_per_s is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_for_real(dtype: str) -> None:
    config = replace(
        TINY, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, windows=(16, None, None, None), tied=False
    )
    found = measure(_ops(dtype), config, context=128, slots=1)
    assert found.bandwidth_bytes_per_s is not None
    assert found.bandwidth_bytes_per_s > 0
    assert found.head_bytes_per_s is not None
    assert found.head_bytes_per_s > 0
    assert found.flops is not None
    assert found.flops > 0
