"""Admission: what a division asks of every member's memory, and what a member can hold (paper Section V-D).

A block brings its weights and the cache reserved for it: ``context`` tokens for each of ``concurrency`` requests. The
head brings its embedding, norm and unembedding, all resident. A device may pad weights, and needs a workspace to load
and compute in; members say so, and a plan counts it. All of this is integer arithmetic on bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kafila.plan.cost import Limits
from kafila.plan.members import Member, ModelManifest, Workload

HEADROOM = 0.05
"""Share of a member's memory that no plan uses. The allocator's fragmentation lives there, and whatever else grows on
the machine; systems that pack devices to the brim run out of memory while serving."""

_MILLION = 10**6
"""The headroom counts in millionths, so that rooms are exact however large."""


class Need(NamedTuple):
    """What a model takes in one member's memory at one workload, in bytes."""

    blocks: int
    per_block: int
    """One block's weights and its reserved cache."""
    head: int
    workspace: int = 0
    """Whatever it holds."""

    def of(self, count: int, *, is_head: bool) -> int:
        """Bytes for ``count`` blocks, and the head's if it is the head."""
        return self.workspace + count * self.per_block + (self.head if is_head else 0)

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


def need_of(manifest: ModelManifest, workload: Workload, member: Member | None = None) -> Need:
    """What ``manifest`` takes at ``workload``, on ``member`` if its device is known to take another amount."""
    cache = workload.context * workload.concurrency * manifest.kv_bytes_per_token_per_block
    block, head, workspace = manifest.block_bytes, manifest.head_bytes, 0
    if member is not None:
        block = block if member.block_memory_bytes is None else max(0, member.block_memory_bytes)
        head = head if member.head_memory_bytes is None else max(0, member.head_memory_bytes)
        workspace = max(0, member.workspace_bytes)
    return Need(manifest.blocks, block + cache, head, workspace)


def room_of(member: Member, headroom: float = HEADROOM) -> int:
    """Bytes a plan may use on ``member``: its memory less the headroom, or exactly what its owner stated."""
    memory = max(0, member.memory_bytes)
    return memory if member.memory_is_exact else memory - memory * round(headroom * _MILLION) // _MILLION


def limits_of(room: int, need: Need) -> Limits:
    """Most blocks that fit in ``room`` bytes, without the head and with it; never more than the model has."""
    left = room - need.workspace
    if need.per_block < 1:
        return Limits(need.blocks if left >= 0 else 0, need.blocks if left >= need.head else 0)
    plain = min(need.blocks, left // need.per_block)
    head = min(need.blocks, (left - need.head) // need.per_block)
    return Limits(max(0, plain), max(0, head))


def overloads(counts: Sequence[int], head: int, rooms: Sequence[int], needs: Sequence[Need]) -> list[Overload]:
    """The members whose share does not fit, worst first; all arguments by the same places."""
    found = [
        Overload(place, count, place == head, need.of(count, is_head=place == head) - room)
        for place, (count, room, need) in enumerate(zip(counts, rooms, needs, strict=True))
    ]
    return sorted((over for over in found if over.shortfall > 0), key=lambda over: -over.shortfall)


def heads_that_fit(limits: Sequence[Limits], blocks: int, serving: Collection[int]) -> list[int]:
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
        if limit.head >= 1 and plain - limit.plain + limit.head >= blocks and len({place, *serving}) <= blocks
    ]
