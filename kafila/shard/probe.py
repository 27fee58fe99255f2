"""What a device can do, measured before any weight is fetched (paper, Sections V-B and V-C: b_i and o_i).

Random blocks of the model's own shapes (`kafila.shard.rig`), enough that they do not fit the processor's caches, decode
a token by the very code that will serve: reading them takes their bytes over the effective bandwidth, which so includes
what every block costs besides reading. A stage without blocks gives the fixed overhead. A random unembedding is timed
by itself, because one long matrix is read at another speed than a block's short ones. Nothing is fitted to a served
stage's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import floor
from statistics import median
from typing import TypeVar

from kafila.shard.config import DecoderConfig
from kafila.shard.memory import available_ram, room_bytes
from kafila.shard.ops import Ops
from kafila.shard.rig import CHUNK, Clock, Rig, Round, build_rig, cache_bytes
from kafila.shard.worker import DEVICE_FAULTS
from kafila.shard.workspace import block_memory_bytes, head_memory_bytes, workspace_bytes
from kafila.types import Capability

T = TypeVar("T")

BUDGET_S = 2.2
"""When repeats stop. With the step being done then, which cannot be stopped, a probe stays under three seconds."""
REPEATS = (3, 25)
"""At least and at most so many timed tokens: of three, one outlier does not move the median."""
BUSY_SPREAD = 0.25
"""A speed that varies by more is said to the device's owner, and not believed for long: on a machine that does nothing
else, memory reads vary by 2 to 8%."""


def measure(
    ops: Ops[T],
    config: DecoderConfig,
    *,
    context: int,
    slots: int,
    memory_cap: int | None = None,
    clock: Clock = time.perf_counter,
    last_level_cache: int | None = None,
) -> Capability:
    """Measure the device behind ``ops`` for a model of ``config``'s shapes served in ``ops.dtype``.

    ``slots`` requests of ``context`` tokens each are what it would serve. Speeds are None where the device failed at
    the work. ``memory_cap`` in bytes is the owner's limit. ``last_level_cache`` in bytes is looked up unless given;
    ``clock`` counts seconds.
    """
    sized = memory_of(ops, config, context=context, slots=slots, memory_cap=memory_cap)
    until = clock() + BUDGET_S
    try:
        rig = build_rig(ops, config, clock, cache_bytes() if last_level_cache is None else last_level_cache)
        rig.chunk_s(clock)
        chunk_s = rig.chunk_s(clock)
        return summary(sized, rig, take_rounds(rig, until, clock), chunk_s)
    except DEVICE_FAULTS:
        return sized


def memory_of(
    ops: Ops[T], config: DecoderConfig, *, context: int, slots: int, memory_cap: int | None = None
) -> Capability:
    """What the device holds and what the model takes on it; no speeds."""
    device_free = ops.memory_bytes()
    return Capability(
        device=ops.device,
        memory_bytes=room_bytes(available_ram() if device_free is None else device_free, memory_cap),
        bandwidth_bytes_per_s=None,
        overhead_s=None,
        flops=None,
        block_memory_bytes=block_memory_bytes(ops, config),
        head_memory_bytes=head_memory_bytes(ops, config),
        workspace_bytes=workspace_bytes(config, context=context, slots=slots, on_host=device_free is None),
    )


def take_rounds(rig: Rig[T], until: float, clock: Clock) -> list[Round]:
    """Time tokens until the clock says ``until``. The first passes compile and fault pages in: they do not count."""
    rig.round(clock)
    if clock() < until:
        rig.round(clock)
    rounds: list[Round] = []
    least, most = REPEATS
    while len(rounds) < most and (len(rounds) < least or clock() < until):
        rounds.append(rig.round(clock))
    return rounds


def summary(sized: Capability, rig: Rig[T], rounds: Sequence[Round], chunk_s: float) -> Capability:
    """The medians of ``rounds`` as speeds, beside the sizes in ``sized``; without speeds where a clock stood still."""
    slopes = [(one.blocks_s - one.overhead_s) / rig.count for one in rounds]
    block_s, head_s = median(slopes), median(one.head_s for one in rounds)
    if block_s <= 0 or head_s <= 0 or chunk_s <= 0:
        return sized
    varied = spread(slopes)
    return Capability(
        device=sized.device,
        memory_bytes=sized.memory_bytes,
        bandwidth_bytes_per_s=rig.block_sizes.block_bytes / block_s,
        overhead_s=median(one.overhead_s for one in rounds),
        flops=2 * CHUNK * rig.weights / chunk_s,
        bandwidth_spread=varied,
        head_bytes_per_s=rig.head_sizes.head_read_bytes / head_s,
        block_memory_bytes=sized.block_memory_bytes,
        head_memory_bytes=sized.head_memory_bytes,
        workspace_bytes=sized.workspace_bytes,
        remarks=(busy_remark(varied),) if varied > BUSY_SPREAD else (),
    )


def spread(values: Sequence[float]) -> float:
    """By how much of their median values vary, the smallest and the largest tenth left out."""
    ordered = sorted(values)
    outer = floor(len(ordered) / 10)
    inner = ordered[outer : len(ordered) - outer]
    return (inner[-1] - inner[0]) / median(ordered)


def busy_remark(varied: float) -> str:
    """What an owner is told of a measurement that cannot be trusted."""
    return (
        f"this machine was busy while it was measured: its speed varied by {varied:.0%}; "
        "close what else runs and start again for a better division"
    )
