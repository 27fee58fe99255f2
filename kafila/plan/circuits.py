"""The shortest circuit under a bound on every stage, two ways, each for one head.

:class:`FixedRing` has its members settled: the fastest of them take all they may, O(m). :class:`FreeRing` may leave
members out: the ring is walked from the head, and ``best[j][b]`` is the cheapest way to have placed ``b`` blocks with
member ``j`` the last to take some. Costs are linear in the count, so what ``j`` takes is a sliding-window minimum, and
the whole is O(m^2 k). Trying every fixed ring is the quicker way for few members, the free ones for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import add, sub

from kafila.plan.cost import Device, StageCost
from kafila.plan.placement import Latencies, Placement, hops

NEVER = 1 << 120
"""Dearer than any ring: about 10^21 seconds in ticks, and half of it still is."""


class FixedRing:
    """The ring of just these members.

    ``circuit`` are their positions as a token visits them, the head first; ``devices`` and ``latencies`` are by
    position.
    """

    def __init__(self, blocks: int, circuit: Sequence[int], devices: Sequence[Device], latencies: Latencies) -> None:
        self.blocks = blocks
        self.stages = [devices[position].stage(is_head=not place) for place, position in enumerate(circuit)]
        self._circuit = circuit
        self._size = len(devices)
        self._fastest_first = sorted(range(len(circuit)), key=lambda place: self.stages[place].per_block)
        self._left = blocks - len(circuit)
        # What every division costs: the edges, the fixed costs and one block each.
        self._least = sum(latencies[source][target] for source, target in hops(circuit))
        self._least += sum(stage.fixed + stage.per_block for stage in self.stages)

    def shortest(self, bound: int | None) -> int:
        """Ticks of the shortest circuit with no stage above ``bound`` (``None``: any stage); ``NEVER`` if none fits."""
        left, ticks = self._left, self._least
        for place in self._fastest_first:
            fixed, per_block, limit = self.stages[place]
            reach = left + 1 if bound is None else (bound - fixed) // per_block
            more = min(limit, reach, left + 1) - 1
            if more < 0:
                return NEVER
            ticks += more * per_block
            left -= more
        return NEVER if left else ticks

    def placement(self, bound: int | None) -> Placement:
        """The division behind :meth:`shortest`, which must not be ``NEVER``."""
        counts = [0] * self._size
        left = self._left
        for place in self._fastest_first:
            more = min(left, cap(self.stages[place], self.blocks, bound) - 1)
            counts[self._circuit[place]] = 1 + more
            left -= more
        return Placement(self._circuit[0], tuple(counts))


class FreeRing:
    """Every ring with this head: the others take part or not. The anchor, at position 0, cannot be left out if it
    ``anchor_serves``."""

    def __init__(
        self, blocks: int, head: int, devices: Sequence[Device], latencies: Latencies, *, anchor_serves: bool
    ) -> None:
        size = len(devices)
        ring = [(head + step) % size for step in range(size)]
        self.blocks = blocks
        self.stages = [devices[position].stage(is_head=position == head) for position in ring]
        self._head = head
        self._latencies = [[latencies[source][target] for target in ring] for source in ring]
        self._required = -head % size if anchor_serves else 0
        """A place that may not be skipped, counted from the head; 0, the head itself, where none is."""

    def shortest(self, bound: int | None) -> int:
        """Ticks of the shortest circuit with no stage above ``bound`` (``None``: any stage); ``NEVER`` if none fits."""
        ticks, _ = self._closing(self._walk(bound))
        return ticks if ticks < NEVER // 2 else NEVER

    def placement(self, bound: int | None) -> Placement:
        """The division behind :meth:`shortest`, which must not be ``NEVER``, read backwards from where it closes."""
        best = self._walk(bound)
        counts = [0] * len(self.stages)
        (_, place), left = self._closing(best), self.blocks
        while place:
            taken, source = self._step_back(best, place, left, bound)
            counts[(self._head + place) % len(counts)] = taken
            place, left = source, left - taken
        counts[self._head] = left
        return Placement(self._head, tuple(counts))

    def _walk(self, bound: int | None) -> list[list[int]]:
        """``best[j][b]``, see the module, without the edge that closes the ring."""
        best: list[list[int]] = []
        for place, stage in enumerate(self.stages):
            before = self._arrive(best, place) if place else [0] + [NEVER] * self.blocks
            best.append(_take(stage, before, cap(stage, self.blocks, bound)))
        return best

    def _closing(self, best: Sequence[Sequence[int]]) -> tuple[int, int]:
        """The least cost with all blocks placed and the ring closed, and the place it closes from."""
        ends = range(self._required, len(best))
        return min((best[place][-1] + self._latencies[place][0], place) for place in ends)

    def _arrive(self, best: Sequence[list[int]], place: int) -> list[int]:
        """The cheapest way to reach ``place`` over an edge, for every number of blocks placed before it."""
        rows = [map(add, best[source], repeat(self._latencies[source][place])) for source in self._sources(place)]
        return list(rows[0]) if len(rows) == 1 else list(map(min, *rows))

    def _sources(self, place: int) -> range:
        """The places from which ``place`` may be reached without skipping the required one."""
        return range(self._required if self._required < place else 0, place)

    def _step_back(self, best: Sequence[list[int]], place: int, left: int, bound: int | None) -> tuple[int, int]:
        """How many blocks ``place`` took of the ``left`` placed by then, and who came before."""
        stage = self.stages[place]
        before = self._arrive(best, place)
        taken = next(
            count
            for count in range(1, cap(stage, self.blocks, bound) + 1)
            if before[left - count] + stage.fixed + count * stage.per_block == best[place][left]
        )
        source = next(
            source
            for source in self._sources(place)
            if best[source][left - taken] + self._latencies[source][place] == before[left - taken]
        )
        return taken, source


def cap(stage: StageCost, blocks: int, bound: int | None) -> int:
    """Most blocks the stage may take under ``bound``; below 1 where it may take none."""
    most = min(blocks, stage.limit)
    return most if bound is None else min(most, (bound - stage.fixed) // stage.per_block)


def _take(stage: StageCost, before: list[int], most: int) -> list[int]:
    """Costs after the stage has taken 1 to ``most`` blocks, for every number of blocks placed by then."""
    if most < 1:
        return [NEVER] * len(before)
    # Less its own price per block, what came before is compared on equal terms whatever the stage takes.
    levelled = list(map(sub, before, range(0, stage.per_block * len(before), stage.per_block)))
    prices = range(stage.fixed + stage.per_block, stage.fixed + stage.per_block * len(before), stage.per_block)
    return [NEVER, *map(add, _window_minimum(levelled, most), prices)]


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
