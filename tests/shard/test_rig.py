"""How large a rig is built."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kafila.shard.config import parse_config
from kafila.shard.experts import ExpertShape
from kafila.shard.manifest import block_bytes, block_tensors, model_manifest, tensor_bytes
from kafila.shard.rig import block_count, block_weights, build_rig, cache_bytes, narrowed
from kafila.shard.schemes import with_scheme
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


def test_experts_are_measured_each_of_its_own_size_as_many_as_a_token_goes_through() -> None:
    experts = ExpertShape(count=128, active=8, intermediate=768, normalised=True, sparse=(False, *(True,) * 35))
    sparse = replace(QWEN3_8B, hidden=2048, kv_heads=4, experts=experts)
    whole, narrow = narrowed(sparse, 1e12), narrowed(sparse, 25e6)
    assert whole == replace(sparse, experts=replace(experts, count=8))
    assert narrow.experts == replace(experts, count=2, active=2)
    assert block_weights(narrow) <= 25_000_000


@pytest.mark.parametrize("scheme", ["", "int4"])
def test_a_rig_of_experts_reads_what_it_was_built_of(scheme: str) -> None:
    experts = ExpertShape(count=6, active=2, intermediate=64, normalised=True, sparse=(False, True, False, True))
    config = replace(TINY, blocks=4, hidden=64, windows=(None,) * 4, ropes=TINY.ropes[:1] * 4, experts=experts)
    config = with_scheme(config, scheme)
    seconds = itertools.count()
    rig = build_rig(TorchOps("cpu", "bfloat16", threads=1), config, lambda: float(next(seconds)), 0)
    sizes = model_manifest("m", config, "bfloat16")
    assert sizes.experts is not None
    # Of four experts that no token goes through, neither weights nor rows of the router.
    left_out = block_bytes(config, 1, 2) - rig.block_sizes.block_bytes
    assert (
        left_out
        == sum(
            tensor_bytes(config, name, shape, 2)
            for name, shape in block_tensors(config, 1).items()
            if any(f"experts.{index}." in name for index in range(2, 6))
        )
        + 4 * 64 * 2
    )
    assert rig.round(lambda: float(next(seconds))).blocks_s == 1
    assert rig.chunk_s(lambda: float(next(seconds))) == 1


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
