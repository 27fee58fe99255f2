"""The cost model: equation (2) of the paper, as exact integers.

A stage of ``n`` blocks costs ``o + n * read_bytes / bandwidth``, with experts the bytes of those that a token
goes through (:mod:`kafila.plan.reads`), and at the head ``head_read_bytes`` over its own rate more: the head reads its
unembedding once per token, while the embedding it also keeps resident is a lookup of one row. The paper reads it at the
blocks' bandwidth; one long matrix is read faster than a block's short ones, so where the member measured its head, that
rate is used.

Costs are integers, in ticks of one femtosecond. Algorithm 1 asks whether a stage fits under a bound that is itself
some stage's cost; in floating point ``(fixed + n * per - fixed) / per`` may come out below ``n`` and the bound refuse
the very division it came from. A femtosecond is a hundred-millionth of the shortest stage worth planning, so rounding
to it decides nothing that a measurement could.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kafila.plan.members import Member, ModelManifest, measured
from kafila.plan.reads import read_bytes

TICKS_PER_SECOND = 10**15


class Tier(Enum):
    """How well informed a division is (paper Section V-D)."""

    COST = "cost"
    """Everybody is priced by equation (2)."""
    FLOPS = "flops"
    """Somebody is not, but everybody reported arithmetic throughput: relative speeds, no head term."""
    MEMORY = "memory"
    """Nothing to search on: blocks in proportion to memory."""


class StageCost(NamedTuple):
    """One device in one role: ``n`` blocks cost ``fixed + n * per_block`` ticks, and at most ``limit`` blocks fit."""

    fixed: int
    per_block: int
    limit: int


class Device(NamedTuple):
    """One device in both roles; costs in ticks, limits in blocks."""

    overhead: int
    per_block: int
    head_read: int
    limit: int
    head_limit: int

    def stage(self, *, is_head: bool) -> StageCost:
        """Equation (2) and lim(i) for this role."""
        if is_head:
            return StageCost(self.overhead + self.head_read, self.per_block, self.head_limit)
        return StageCost(self.overhead, self.per_block, self.limit)


class Limits(NamedTuple):
    """Most blocks one member can hold, without the head and with it."""

    plain: int
    head: int


def to_ticks(seconds: float) -> int:
    """The nearest tick to a finite time in seconds."""
    above, below = seconds.as_integer_ratio()
    return (2 * above * TICKS_PER_SECOND + below) // (2 * below)


def to_seconds(ticks: int) -> float:
    """A number of ticks in seconds."""
    return ticks / TICKS_PER_SECOND


def read_ticks(size_bytes: int, bytes_per_s: float) -> int:
    """How long reading so many bytes takes; at least one tick, so that no block is ever free."""
    above, below = bytes_per_s.as_integer_ratio()
    return max(1, (2 * size_bytes * TICKS_PER_SECOND * below + above) // (2 * above))


def best_tier(members: Sequence[Member]) -> Tier:
    """The best informed tier that the measurements allow."""
    if all(member.priced for member in members):
        return Tier.COST
    if all(measured(member.flops, positive=True) for member in members):
        return Tier.FLOPS
    return Tier.MEMORY


def price(member: Member, manifest: ModelManifest, limits: Limits, tier: Tier) -> Device | None:
    """The member under ``tier``, or ``None`` where that tier has no price for anybody.

    Under :attr:`Tier.FLOPS` the figures are relative: a 16-bit block takes two operations per weight and two bytes per
    weight, so its operations are its bytes; overhead and head are not priced, as in the paper.
    """
    if tier is Tier.COST and member.bandwidth_bytes_per_s is not None and member.overhead_s is not None:
        return Device(
            overhead=to_ticks(member.overhead_s),
            per_block=read_ticks(read_bytes(manifest), member.bandwidth_bytes_per_s),
            head_read=read_ticks(manifest.head_read_bytes, _head_rate(member, member.bandwidth_bytes_per_s)),
            limit=limits.plain,
            head_limit=limits.head,
        )
    if tier is Tier.FLOPS and member.flops is not None:
        per_block = read_ticks(read_bytes(manifest), member.flops)
        return Device(0, per_block, 0, limits.plain, limits.head)
    return None


def _head_rate(member: Member, bandwidth_bytes_per_s: float) -> float:
    """Bytes a second at the head: as measured, else the blocks'."""
    rate = member.head_bytes_per_s
    return rate if rate is not None and measured(rate, positive=True) else bandwidth_bytes_per_s
