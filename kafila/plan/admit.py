"""Admission: what a division asks of every member's memory, and what a member can hold (paper Section V-D).

A block brings its weights and the cache reserved for it: ``context`` tokens for each of ``concurrency`` requests. The
head brings its embedding, norm and unembedding, all resident. All of this is integer arithmetic on bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kafila.plan.cost import Limits
from kafila.plan.members import Member, ModelManifest, Workload

HEADROOM = 0.05
"""Share of a member's memory that no plan uses. Activations, logits and the allocator's fragmentation live there;
systems that pack devices to the brim run out of memory while serving."""

_MILLION = 10**6
"""The headroom counts in millionths, so that rooms are exact however large."""


class Need(NamedTuple):
    """What a model takes in memory at one workload, in bytes."""

    blocks: int
    per_block: int
    """One block's weights and its reserved cache."""
    head: int

    def of(self, count: int, *, is_head: bool) -> int:
        """Bytes resident for ``count`` blocks, and the head's if it is the head."""
        return count * self.per_block + (self.head if is_head else 0)

    @property
    def total(self) -> int:
        """Bytes of the whole model with its cache."""
        return self.of(self.blocks, is_head=True)


class Overload(NamedTuple):
    """A member that was given more than it can hold."""

    place: int
    blocks: int
    is_head: bool
    shortfall: int


def need_of(manifest: ModelManifest, workload: Workload) -> Need:
    """What ``manifest`` takes at ``workload``."""
    cache = workload.context * workload.concurrency * manifest.kv_bytes_per_token_per_block
    return Need(manifest.blocks, manifest.block_bytes + cache, manifest.head_bytes)


def room_of(member: Member, headroom: float = HEADROOM) -> int:
    """Bytes a plan may use on ``member``: its memory less the headroom, or exactly what its owner stated."""
    memory = max(0, member.memory_bytes)
    return memory if member.memory_is_exact else memory - memory * round(headroom * _MILLION) // _MILLION


def limits_of(room: int, need: Need) -> Limits:
    """Most blocks that fit in ``room`` bytes, without the head and with it; never more than the model has."""
    if need.per_block < 1:
        return Limits(need.blocks, need.blocks if room >= need.head else 0)
    plain = min(need.blocks, room // need.per_block)
    head = min(need.blocks, (room - need.head) // need.per_block)
    return Limits(plain, max(0, head))


def overloads(counts: Sequence[int], head: int, rooms: Sequence[int], need: Need) -> list[Overload]:
    """The members whose share does not fit, worst first; all arguments by the same places."""
    found = [
        Overload(place, count, place == head, need.of(count, is_head=place == head) - room)
        for place, (count, room) in enumerate(zip(counts, rooms, strict=True))
    ]
    return sorted((over for over in found if over.shortfall > 0), key=lambda over: -over.shortfall)


def heads_that_fit(limits: Sequence[Limits], need: Need, serving: Collection[int]) -> list[int]:
    """The places that can hold the head such that the others can hold the rest of the model.

    ``serving`` are the places that must hold at least a block each. This is exact: a chain may be cut anywhere, so a
    division within the limits exists when each of those limits is at least one and all of them add up.
    """
    if any(limits[place].plain < 1 for place in serving):
        return []
    plain = sum(limit.plain for limit in limits)
    return [
        place
        for place, limit in enumerate(limits)
        if limit.head >= 1 and plain - limit.plain + limit.head >= need.blocks and len({place, *serving}) <= need.blocks
    ]
