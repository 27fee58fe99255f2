"""The probe by a clock that is told how long things take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kafila.shard import probe
from kafila.shard.config import parse_config
from kafila.shard.decoder import Shard
from kafila.shard.manifest import model_manifest
from kafila.shard.probe import block_count, cache_bytes, measure, narrowed, padding
from kafila.shard.torch_ops import TorchOps
from kafila.types import Segment
from tests.shard.test_config import LLAMA

TINY = parse_config(json.dumps(LLAMA))
QWEN3_8B = replace(
    TINY, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, blocks=36, qk_norm=True
)
MB = 1 << 20
BLOCK_S, OVERHEAD_S, ROW_S = 0.002, 0.0005, 0.0001


@dataclass
class Device:
    """Moves the clock by what a forward pass is meant to take."""

    now: float = 0.0
    noise: Iterator[float] | None = None
    passes: list[tuple[int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Every shard's forward pass takes a known time, and still does the work."""
    device = Device()
    real: Any = Shard.forward

    def forward(shard: Any, segments: Sequence[Segment], *rest: Any) -> bytes:
        blocks, rows = len(shard._blocks), sum(segment.length for segment in segments)
        device.passes.append((blocks, rows))
        scale = next(device.noise) if device.noise and blocks > 1 and rows == 1 else 1.0
        device.now += OVERHEAD_S + blocks * (BLOCK_S * scale if rows == 1 else ROW_S * rows)
        result: bytes = real(shard, segments, *rest)
        return result

    monkeypatch.setattr(Shard, "forward", forward)
    monkeypatch.setattr(probe, "available_ram", lambda: 4000 * MB)
    return device


def _ops(dtype: str = "bfloat16") -> TorchOps:
    return TorchOps("cpu", dtype, threads=1)


def test_bandwidth_overhead_and_arithmetic_come_out(device: Device) -> None:
    found = measure(_ops(), TINY, clock=device.clock, last_level_cache=0)
    block_bytes = model_manifest("m", TINY, "bfloat16").block_bytes
    assert found.bandwidth_bytes_per_s == pytest.approx(block_bytes / BLOCK_S)
    assert found.overhead_s == pytest.approx(OVERHEAD_S)
    assert found.flops == pytest.approx(2 * 64 * block_bytes / 2 / (OVERHEAD_S + 64 * ROW_S))
    assert found.bandwidth_spread == pytest.approx(0, abs=1e-6)
    assert found.memory_bytes == pytest.approx((4000 - 200 - 512) * MB / padding(_ops(), TINY), rel=1e-9)
    assert found.device == "cpu (1 thread)"


def test_an_outlier_moves_the_spread_and_not_the_median(device: Device) -> None:
    device.noise = iter([1.0, 1.0, *(50.0 if turn == 3 else 1.0 for turn in range(25))])
    found = measure(_ops(), TINY, clock=device.clock, last_level_cache=0)
    assert found.bandwidth_bytes_per_s == pytest.approx(model_manifest("m", TINY, "bfloat16").block_bytes / BLOCK_S)
    assert found.bandwidth_spread == pytest.approx(49.0)


def test_a_slow_device_is_timed_a_few_times_only(device: Device) -> None:
    device.noise = iter([1000.0] * 100)
    measure(_ops(), TINY, clock=device.clock, last_level_cache=0)
    timed = [blocks for blocks, rows in device.passes if rows == 1 and blocks > 1]
    assert len(timed) == 2 + 5


def test_a_fast_device_is_timed_often(device: Device) -> None:
    measure(_ops(), TINY, clock=device.clock, last_level_cache=0)
    timed = [blocks for blocks, rows in device.passes if rows == 1 and blocks > 1]
    assert len(timed) == 2 + 25


def test_the_owners_limit(device: Device) -> None:
    found = measure(_ops("float32"), TINY, clock=device.clock, last_level_cache=0, memory_cap=7)
    assert found.memory_bytes == 7


def test_padding_is_taken_off_the_room() -> None:
    assert padding(_ops("float32"), TINY) == 1
    assert padding(_ops(), QWEN3_8B) == 1
    smollm2 = replace(TINY, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536)
    assert padding(_ops(), smollm2) == pytest.approx(1.58, abs=0.01)  # as measured by its resident memory


def test_a_device_that_fails_has_memory_and_no_speed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TorchOps, "matrix", fail)
    found = measure(_ops(), TINY, clock=device.clock, last_level_cache=0)
    assert (found.bandwidth_bytes_per_s, found.overhead_s, found.flops) == (None, None, None)
    assert found.memory_bytes > 0


def test_a_clock_that_stands_still_measures_nothing(device: Device) -> None:
    assert measure(_ops(), TINY, clock=lambda: 0.0, last_level_cache=0).bandwidth_bytes_per_s is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_for_real(dtype: str) -> None:
    config = replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, windows=(16, None, None, None))
    found = measure(_ops(dtype), config)
    assert found.bandwidth_bytes_per_s is not None
    assert found.bandwidth_bytes_per_s > 0
    assert found.flops is not None
    assert found.flops > 0


def test_blocks_do_not_fit_the_cache() -> None:
    assert block_count(7 * MB, 0) == 10  # 64 MB where the cache is unknown
    assert block_count(7 * MB, 32 * MB) == 14
    assert block_count(7 * MB, 512 * MB) == 23  # 160 MB at most
    assert block_count(200 * MB, 32 * MB) == 1
    assert block_count(1000, 32 * MB) == 32


def test_a_large_block_is_measured_narrower() -> None:
    narrow = narrowed(QWEN3_8B)
    assert narrow.hidden == 4096
    assert narrow.heads % narrow.kv_heads == 0
    assert 10_000_000 < probe._weights(narrow) <= probe.MAX_BLOCK_WEIGHTS
    assert narrowed(TINY) == TINY


def test_caches_as_linux_tells_them(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "512K", "32768K", "odd")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 32 * MB
    assert cache_bytes(tmp_path / "nowhere") == 0
