"""How large a rig is built."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

from kafila.shard.config import parse_config
from kafila.shard.rig import block_count, block_weights, build_rig, cache_bytes, narrowed
from kafila.shard.torch_ops import TorchOps
from tests.shard.test_config import LLAMA

TINY = parse_config(json.dumps(LLAMA))
QWEN3_8B = replace(
    TINY, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, blocks=36, qk_norm=True
)
MB = 1 << 20


def test_blocks_do_not_fit_the_cache() -> None:
    assert block_count(7 * MB, 0) == 10  # 64 MB where the cache is unknown
    assert block_count(7 * MB, 32 * MB) == 14
    assert block_count(7 * MB, 512 * MB) == 23  # 160 MB at most
    assert block_count(200 * MB, 32 * MB) == 1
    assert block_count(1000, 32 * MB) == 32


def test_a_large_block_is_measured_narrower() -> None:
    narrow = narrowed(QWEN3_8B, 25e6)
    assert narrow.hidden == 4096
    assert narrow.heads % narrow.kv_heads == 0
    assert 10_000_000 < block_weights(narrow) <= 25_000_000
    assert narrowed(TINY, 25e6) == TINY
    assert narrowed(QWEN3_8B, 1e12) == QWEN3_8B


def test_a_device_that_takes_weights_slowly_gets_the_least_rig() -> None:
    seconds = itertools.count()  # every look at this clock is a second later
    rig = build_rig(TorchOps("cpu", "bfloat16", threads=1), QWEN3_8B, lambda: float(next(seconds)), 32 * MB)
    assert rig.count == 1
    assert rig.weights <= 1 << 22 or rig.weights == block_weights(narrowed(QWEN3_8B, 0))
    assert rig.head_sizes.head_read_bytes <= (1 << 22) * 2 + 2 * 4096
    assert rig.block_sizes.hidden_bytes == 2 * 4096
    assert rig.round(lambda: float(next(seconds))).blocks_s == 1


def test_caches_as_linux_tells_them(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "512K", "32768K", "odd")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 32 * MB
    assert cache_bytes(tmp_path / "nowhere") == 0
