"""The ring that yields the most tokens per second for ``users`` requests at once, for a fixed ring order.

A ring yields min(1/bottleneck, users/circuit). The fullest ring is rarely the fastest for few users: every member adds an
edge that each token pays, and subdividing the work does not shorten it. So members may be left out.

For one head and one bound on every stage, the shortest circuit is a shortest path: the ring is walked from the head, and
``best[j][b]`` is the cheapest way to have placed ``b`` blocks with member ``j`` the last to take some. Costs are linear in
the count, so the best count for ``j`` is a sliding-window minimum: O(m^2 k) for a head. The rate is then a search over the
bound: raising it shortens the circuit and lengthens the bottleneck, so the optimum is where the two cross, at one of the
O(km) stage costs. Everything is exact integer arithmetic; the time per token is kept as ``max(users * bottleneck, circuit)``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

from kafila.plan.cost import Device, StageCost
from kafila.plan.placement import Latencies, Placement

_NEVER = 1 << 120
"""Dearer than any ring: about 10^21 seconds in ticks, and half of it still is."""


class _Walk(NamedTuple):
    """The ring from one head: its stages, its latencies and how far one may skip."""

    blocks: int
    head: int
    stages: list[StageCost]
    latencies: list[list[int]]
    required: int
    """A place in the walk that may not be skipped; 0, the head itself, where none is."""


class _Shortest(NamedTuple):
    circuit: int
    last: int
    best: list[list[int]]
    """``best[j][b]``, see above, without the edge that closes the ring."""


def fastest_ring(
    blocks: int,
    devices: Sequence[Device],
    latencies: Latencies,
    users: int,
    *,
    anchor_serves: bool = False,
    to_beat: int | None = None,
) -> Placement | None:
    """The placement with the smallest max(users * bottleneck, circuit), in ticks.

    ``devices`` and ``latencies`` are in ring order, the anchor at position 0; ``anchor_serves`` keeps the anchor in the
    ring. With ``to_beat``, only a ring strictly better than that many ticks is wanted. ``None`` where there is none.
    """
    walks = [_walk(blocks, devices, latencies, head, anchor_serves) for head in range(len(devices))]
    unbounded = [(found.circuit, walk) for walk in walks if (found := _shortest(walk, None)) is not None]
    unbounded.sort(key=lambda pair: pair[0])
    goal = _NEVER if to_beat is None else to_beat
    winner: _Walk | None = None
    for circuit, walk in unbounded:
        if circuit >= goal:
            break
        reached = _fastest_from(walk, users, goal)
        if reached is not None:
            goal, winner = reached, walk
    return None if winner is None else _rebuild(winner, goal // users, len(devices))


def _walk(
    blocks: int, devices: Sequence[Device], latencies: Latencies, head: int, anchor_serves: bool
) -> _Walk:
    size = len(devices)
    ring = [(head + step) % size for step in range(size)]
    return _Walk(
        blocks=blocks,
        head=head,
        stages=[devices[position].stage(is_head=position == head) for position in ring],
        latencies=[[latencies[source][target] for target in ring] for source in ring],
        required=(-head) % size if anchor_serves else 0,
    )


def _fastest_from(walk: _Walk, users: int, goal: int) -> int | None:
    """The smallest max(users * bottleneck, circuit) with this head, if it is below ``goal``."""
    if not _within(walk, users, goal - 1):
        return None
    bounds = sorted(
        {
            stage.fixed + count * stage.per_block
            for stage in walk.stages
            for count in range(1, min(walk.blocks, stage.limit) + 1)
            if users * (stage.fixed + count * stage.per_block) < goal
        }
    )
    place = bisect_left(bounds, True, key=lambda bound: _within(walk, users, users * bound))
    # Between one bound and the next nothing more fits, so there the circuit alone decides.
    under = _shortest(walk, bounds[place - 1]) if place else None
    values = [users * bounds[place]] if place < len(bounds) else []
    if under is not None:
        values.append(under.circuit)
    return min(values)


def _within(walk: _Walk, users: int, value: int) -> bool:
    """Whether a ring has both ``users * bottleneck`` and its circuit within ``value``."""
    found = _shortest(walk, value // users)
    return found is not None and found.circuit <= value


def _shortest(walk: _Walk, bound: int | None) -> _Shortest | None:
    """The shortest circuit with no stage above ``bound`` ticks."""
    best: list[list[int]] = []
    for place, stage in enumerate(walk.stages):
        if place == 0:
            before = [0] + [_NEVER] * walk.blocks
        else:
            before = _arrive(walk, best, place)
        best.append(_take(stage, before, _cap(stage, walk.blocks, bound)))
    closing = [
        (row[walk.blocks] + walk.latencies[place][0], place)
        for place, row in enumerate(best)
        if place >= walk.required
    ]
    circuit, last = min(closing)
    return None if circuit >= _NEVER // 2 else _Shortest(circuit, last, best)


def _arrive(walk: _Walk, best: list[list[int]], place: int) -> list[int]:
    """The cheapest way to reach ``place`` over an edge, for every number of blocks placed before it."""
    first = walk.required if walk.required < place else 0
    rows = [
        list(map(add, best[source], [walk.latencies[source][place]] * (walk.blocks + 1)))
        for source in range(first, place)
    ]
    return rows[0] if len(rows) == 1 else list(map(min, *rows))


def _take(stage: StageCost, before: list[int], cap: int) -> list[int]:
    """Costs after the stage has taken 1 to ``cap`` blocks, for every number of blocks placed by then."""
    blocks = len(before) - 1
    if cap < 1:
        return [_NEVER] * (blocks + 1)
    slope = range(0, stage.per_block * (blocks + 1), stage.per_block)
    cheapest = _window_minimum(list(map(sub, before, slope)), cap)
    return [_NEVER, *(low + stage.fixed + rise for low, rise in zip(cheapest, slope[1:], strict=False))]


def _cap(stage: StageCost, blocks: int, bound: int | None) -> int:
    most = min(blocks, stage.limit)
    return most if bound is None else min(most, (bound - stage.fixed) // stage.per_block)


def _window_minimum(values: list[int], width: int) -> list[int]:
    """The minimum over the last ``width`` values up to each, in linear time.

    Cut into runs of ``width``: a window is the tail of one run and the start of the next, both by running minima.
    """
    if width >= len(values):
        return list(accumulate(values, min))
    runs = [values[start : start + width] for start in range(0, len(values), width)]
    starts = [low for run in runs for low in accumulate(run, min)]
    tails = [low for run in runs for low in reversed(list(accumulate(reversed(run), min)))]
    return [*starts[: width - 1], *map(min, tails, starts[width - 1 :])]


def _rebuild(walk: _Walk, bound: int, size: int) -> Placement | None:
    """The placement behind the shortest circuit under ``bound``, read backwards from where it closes."""
    found = _shortest(walk, bound)
    if found is None:
        return None
    counts = [0] * size
    place, left = found.last, walk.blocks
    while True:
        taken, source = _step_back(walk, found.best, place, left, bound)
        counts[(walk.head + place) % size] = taken
        left -= taken
        if source is None:
            return Placement(walk.head, tuple(counts))
        place = source


def _step_back(
    walk: _Walk, best: list[list[int]], place: int, left: int, bound: int
) -> tuple[int, int | None]:
    """How many blocks ``place`` took and who came before, ``None`` before the head."""
    if place == 0:
        return left, None
    stage = walk.stages[place]
    before = _arrive(walk, best, place)
    taken = next(
        count
        for count in range(1, _cap(stage, walk.blocks, bound) + 1)
        if before[left - count] + stage.fixed + count * stage.per_block == best[place][left]
    )
    first = walk.required if walk.required < place else 0
    source = next(
        source
        for source in range(first, place)
        if best[source][left - taken] + walk.latencies[source][place] == before[left - taken]
    )
    return taken, source
