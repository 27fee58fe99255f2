"""The ring that yields the most tokens per second for ``users`` requests at once, for a fixed ring order.

A ring yields min(1/bottleneck, users/circuit). The fullest ring is rarely the fastest for few users: every member adds
an edge that each token pays, and subdividing the work does not shorten it. So members may be left out.

The answer is a search over the bound on every stage: raising it shortens the shortest circuit under it and lengthens
the bottleneck, so the best is where the two cross, at one of the O(km) stage costs. Everything is exact integer
arithmetic; what is minimised is ``max(users * bottleneck, circuit)``, the ticks between one user's tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

from kafila.plan.circuits import NEVER, FixedRing, FreeRing
from kafila.plan.cost import Device
from kafila.plan.placement import Latencies, Placement, token_ticks

SUBSETS_LIMIT = 8
"""Up to so many members every subset and head is tried, m * 2^(m-1) rings; beyond, walks that leave members out are
quicker. Both are exact."""


def fastest_rings(
    blocks: int,
    devices: Sequence[Device],
    latencies: Latencies,
    users: Collection[int],
    *,
    anchor_serves: bool = False,
    known: Sequence[Placement] = (),
) -> dict[int, Placement]:
    """For every number of ``users``, the placement with the smallest :func:`token_ticks`; empty where none fits.

    ``devices`` and ``latencies`` are in ring order, the anchor at position 0; ``anchor_serves`` keeps the anchor in the
    ring. ``known`` placements are to be beaten: among equally fast rings they win.
    """
    rings = [(ring.shortest(None), ring) for ring in _rings(blocks, devices, latencies, anchor_serves)]
    hopeful = sorted(((least, ring) for least, ring in rings if least < NEVER), key=lambda pair: pair[0])
    rivals = list(known)
    fastest: dict[int, Placement] = {}
    for count in sorted(users):

        def ticks(placement: Placement, count: int = count) -> int:
            return token_ticks(placement, devices, latencies, count)

        winner = min(rivals, key=ticks, default=None)
        goal = NEVER * count if winner is None else ticks(winner)
        for least, ring in hopeful:
            if least >= goal:
                break
            faster = _faster(ring, count, goal)
            if faster is not None:
                winner, goal = faster, ticks(faster)
        if winner is not None:
            fastest[count] = winner
            rivals.append(winner)
    return fastest


def _rings(
    blocks: int, devices: Sequence[Device], latencies: Latencies, anchor_serves: bool
) -> Iterator[FixedRing | FreeRing]:
    size = len(devices)
    if size > SUBSETS_LIMIT:
        for head in range(size):
            yield FreeRing(blocks, head, devices, latencies, anchor_serves=anchor_serves)
        return
    for count in range(1, min(size, blocks) + 1):
        for members in combinations(range(size), count):
            if sum(devices[position].limit for position in members) < blocks or (anchor_serves and members[0]):
                continue
            for place in range(count):
                yield FixedRing(blocks, (*members[place:], *members[:place]), devices, latencies)


def _faster(ring: FixedRing | FreeRing, users: int, goal: int) -> Placement | None:
    """The ring's division with the smallest max(users * bottleneck, circuit), if that is below ``goal``."""
    if not _within(ring, users, goal - 1):
        return None
    # For one user the circuit decides alone: no stage of it is longer.
    return ring.placement(None if users == 1 else _crossing(ring, users, goal))


def _crossing(ring: FixedRing | FreeRing, users: int, goal: int) -> int:
    """The bound at which ``users`` bottlenecks and the shortest circuit weigh the same, or the better of the two stage
    costs next to it."""
    bounds = sorted(
        {
            cost
            for stage in ring.stages
            for cost in range(
                stage.fixed + stage.per_block,
                stage.fixed + min(ring.blocks, stage.limit) * stage.per_block + 1,
                stage.per_block,
            )
            if users * cost < goal
        }
    )
    place = bisect_left(bounds, True, key=lambda bound: _within(ring, users, users * bound))
    # Between one bound and the next nothing more fits, so there the circuit alone decides.
    if place == len(bounds) or (place and ring.shortest(bounds[place - 1]) <= users * bounds[place]):
        return bounds[place - 1]
    return bounds[place]


def _within(ring: FixedRing | FreeRing, users: int, value: int) -> bool:
    """Whether the ring has a division with both ``users * bottleneck`` and its circuit within ``value``."""
    return ring.shortest(value // users) <= value
