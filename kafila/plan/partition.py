"""Algorithm 1 of the paper: exact chain-on-chain placement of blocks on devices in a fixed order.

The bottleneck of any division is ``fixed(i) + n * per(i)`` for some device and count, so the optimum is one of at most
``k * m`` values; they are sorted and binary-searched for the smallest that is feasible: O(km log km).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kafila.plan.cost import StageCost


class Division(NamedTuple):
    """Blocks per device, in the order given, and the slowest stage in ticks."""

    counts: tuple[int, ...]
    bottleneck: int


def partition(blocks: int, stages: Sequence[StageCost]) -> Division | None:
    """The division of ``blocks`` with the smallest bottleneck, at least one block a device; ``None`` if none fits."""
    candidates = sorted(
        {stage.fixed + count * stage.per_block for stage in stages for count in range(1, min(blocks, stage.limit) + 1)}
    )
    place = bisect_left(candidates, True, key=lambda bound: fill(blocks, stages, bound) is not None)
    if place == len(candidates):
        return None
    counts = fill(blocks, stages, candidates[place])
    return None if counts is None else Division(counts, candidates[place])


def fill(blocks: int, stages: Sequence[StageCost], bound: int) -> tuple[int, ...] | None:
    """FEASIBLE of Algorithm 1: each device in turn takes what it can within ``bound`` and its limit, leaving one block
    for every device still to come. ``None`` where the chain does not fit under the bound."""
    left = blocks
    to_come = len(stages)
    counts = []
    for fixed, per_block, limit in stages:
        to_come -= 1
        count = min((bound - fixed) // per_block, limit, left - to_come)
        if count < 1:
            return None
        counts.append(count)
        left -= count
    return tuple(counts) if left == 0 else None
