"""What a device can do, measured before any weight is fetched (paper, Sections V-B and V-C: b_i and o_i).

Random blocks of the model's own shapes, enough that they do not fit the processor's caches, decode a token by the very
code that will serve: reading them takes their bytes over the effective bandwidth, which so includes what every block
costs besides reading. A stage without blocks gives the fixed overhead. Nothing is fitted to a served stage's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from kafila.shard.cache import KvCache
from kafila.shard.config import DecoderConfig
from kafila.shard.decoder import Shard
from kafila.shard.load import build_block
from kafila.shard.manifest import DTYPE_BYTES, block_tensors, model_manifest
from kafila.shard.memory import available_ram, room_bytes
from kafila.shard.ops import HostTensor, Ops
from kafila.shard.worker import DEVICE_FAULTS
from kafila.types import BlockRange, Capability, Segment

T = TypeVar("T")
Clock = Callable[[], float]

BUDGET_S = 2.5
"""When repeats stop. With what cannot be stopped, building, a probe stays under three seconds."""
REPEATS = (5, 25)
"""At least and at most so many timed tokens: five give a median an outlier cannot move."""
CACHES_OVER = 3
"""The blocks' bytes over the last-level cache's: at twice, a cache that does not replace strictly by age still keeps
part of what is read in turn."""
WORKING_SET_LIMITS = (64 << 20, 160 << 20)
"""Bytes: for machines that do not tell their cache, and for those whose cache is larger than two seconds can fill."""
MAX_BLOCK_WEIGHTS = 25_000_000
"""Larger blocks are made narrower: a matrix of this size already runs at the memory's speed, and packing more does not
fit the time (60 million weights a second)."""
MAX_BLOCKS = 32
"""Of a model so small that its blocks never leave the cache, there is nothing more to learn from many."""
CHUNK = 64
"""Rows of the prefill-shaped pass that arithmetic is measured by; also the tokens in the cache at the timed token."""
_PATTERN = 1 << 16
_SEGMENT = [Segment(slot=0, start=CHUNK, length=1, sample=False)]


@dataclass(frozen=True, slots=True)
class _Stages:
    """The same blocks as three stages: none of them, one, all."""

    none: Callable[[], object]
    chunk_through_one: Callable[[], object]
    all: Callable[[], object]


def measure(
    ops: Ops[T],
    config: DecoderConfig,
    *,
    memory_cap: int | None = None,
    clock: Clock = time.perf_counter,
    last_level_cache: int | None = None,
) -> Capability:
    """Measure the device behind ``ops`` for a model of ``config``'s shapes served in ``ops.dtype``.

    Speeds are None where the device failed at the work. ``memory_cap`` in bytes is the owner's limit.
    ``last_level_cache`` in bytes is looked up unless given; ``clock`` counts seconds.
    """
    device_free = ops.memory_bytes()
    room = room_bytes(available_ram() if device_free is None else device_free, memory_cap)
    # Plans count weights at their plain size: what padding takes, this device does not have.
    room = int(room / padding(ops, config))
    began = clock()
    try:
        shape = narrowed(config)
        sizes = model_manifest("probe", shape, ops.dtype)
        cache = cache_bytes() if last_level_cache is None else last_level_cache
        count = block_count(sizes.block_bytes, cache)
        stages = _build(ops, shape, count, sizes.hidden_bytes)
        slopes, overheads = _time_tokens(stages, count, began + BUDGET_S, clock)
        stages.chunk_through_one()
        chunk_s = _time(stages.chunk_through_one, clock)
    except DEVICE_FAULTS:
        return Capability(ops.device, room, None, None, None)
    block_s = median(slopes)
    if block_s <= 0 or chunk_s <= 0:
        return Capability(ops.device, room, None, None, None)
    return Capability(
        device=ops.device,
        memory_bytes=room,
        bandwidth_bytes_per_s=sizes.block_bytes / block_s,
        overhead_s=median(overheads),
        flops=2 * CHUNK * _weights(shape) / chunk_s,
        bandwidth_spread=(max(slopes) - min(slopes)) / block_s,
    )


def narrowed(config: DecoderConfig) -> DecoderConfig:
    """``config`` with fewer heads and a smaller intermediate size, until a block is no larger than is measured."""
    divisor = 1
    narrow = config
    while _weights(narrow) > MAX_BLOCK_WEIGHTS and divisor < config.intermediate:
        divisor *= 2
        kv_heads = max(1, config.kv_heads // divisor)
        narrow = replace(
            config,
            kv_heads=kv_heads,
            heads=kv_heads * max(1, config.heads // config.kv_heads // max(1, divisor // config.kv_heads)),
            intermediate=config.intermediate // divisor,
        )
    return narrow


def padding(ops: Ops[T], config: DecoderConfig) -> float:
    """What a block's matrices take on this device over what their weights take plainly."""
    shapes = [shape for shape in block_tensors(config, 0).values() if len(shape) == 2]
    plain = sum(prod(shape) for shape in shapes) * DTYPE_BYTES[ops.dtype]
    return sum(ops.matrix_bytes(*shape) for shape in shapes) / plain


def block_count(block_bytes: int, last_level_cache: int) -> int:
    """Blocks whose bytes do not fit the cache."""
    low, high = WORKING_SET_LIMITS
    return min(MAX_BLOCKS, ceil(min(high, max(low, CACHES_OVER * last_level_cache)) / block_bytes))


def cache_bytes(root: Path = Path("/")) -> int:
    """The largest cache of the first processor as Linux tells it, else 0."""
    sizes = [0]
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        digits = text.rstrip("KM")
        sizes.append(int(digits) * factor if digits.isdigit() else 0)
    return max(sizes)


def _weights(config: DecoderConfig) -> int:
    return sum(prod(shape) for shape in block_tensors(config, 0).values())


def _build(ops: Ops[T], config: DecoderConfig, count: int, hidden_bytes: int) -> _Stages:
    prefix = "model.layers.0."
    shapes = {name.removeprefix(prefix): shape for name, shape in block_tensors(config, 0).items()}
    pattern = np.random.default_rng(0).standard_normal(_PATTERN, dtype=np.float32)

    def get(name: str) -> HostTensor:
        shape = shapes[name]
        scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
        bits = (pattern * np.float32(scale)).view(np.uint32) >> np.uint32(16)
        return HostTensor("BF16", np.resize(bits.astype(np.uint16), shape))

    with ops.scope():
        blocks = [build_block(ops, config, get) for _ in range(count)]

    def stage(size: int) -> Shard[T]:
        held = BlockRange(0, size)
        windows = replace(config, windows=(config.windows[0],) * count)
        cache = KvCache(ops, windows, held, slots=1, context=CHUNK + 1)
        return Shard(ops, windows, held, blocks[:size], None, cache)

    chunk = [Segment(slot=0, start=0, length=CHUNK, sample=False)]
    row = bytes(hidden_bytes)
    rows = row * CHUNK
    none, one, everything = stage(0), stage(1), stage(count)
    for shard in (none, everything):
        shard.forward(chunk, None, rows, ops.dtype)
    return _Stages(
        none=lambda: none.forward(_SEGMENT, None, row, ops.dtype),
        chunk_through_one=lambda: one.forward(chunk, None, rows, ops.dtype),
        all=lambda: everything.forward(_SEGMENT, None, row, ops.dtype),
    )


def _time_tokens(stages: _Stages, count: int, until: float, clock: Clock) -> tuple[list[float], list[float]]:
    """Seconds a block, and seconds besides blocks, of each repeat."""
    slopes: list[float] = []
    overheads: list[float] = []
    for _ in range(2):  # the first passes compile and fault pages in
        stages.all()
        stages.none()
    least, most = REPEATS
    while len(slopes) < most and (len(slopes) < least or clock() < until):
        whole = _time(stages.all, clock)
        # Right after the blocks, so that what the overhead consists of is out of the caches as it is when served.
        nothing = _time(stages.none, clock)
        slopes.append((whole - nothing) / count)
        overheads.append(nothing)
    return slopes, overheads


def _time(work: Callable[[], object], clock: Clock) -> float:
    began = clock()
    work()
    return clock() - began
