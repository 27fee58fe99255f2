"""Who holds how many blocks and who holds the head, in ring order, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kafila.plan.cost import Device

Latencies = Sequence[Sequence[int]]
"""One-way edge latencies in ticks, by position in ring order."""


class Placement(NamedTuple):
    """Counts by position in ring order; a member left out of the ring has none. ``head`` is a position."""

    head: int
    counts: tuple[int, ...]

    @property
    def circuit(self) -> tuple[int, ...]:
        """The positions that hold blocks, in the order a token visits them, from the head."""
        size = len(self.counts)
        return tuple(
            position for position in ((self.head + step) % size for step in range(size)) if self.counts[position]
        )


def stage_ticks(placement: Placement, devices: Sequence[Device]) -> tuple[int, ...]:
    """What each stage costs, in circuit order."""
    costs = []
    for position in placement.circuit:
        stage = devices[position].stage(is_head=position == placement.head)
        costs.append(stage.fixed + placement.counts[position] * stage.per_block)
    return tuple(costs)


def hops(circuit: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The ring's edges as pairs of positions: none for one member, two over the same pair for two."""
    if len(circuit) < 2:
        return ()
    return tuple(zip(circuit, (*circuit[1:], circuit[0]), strict=True))


def circuit_ticks(placement: Placement, devices: Sequence[Device], latencies: Latencies) -> int:
    """Equation (1): every stage and every edge, once."""
    network = sum(latencies[source][target] for source, target in hops(placement.circuit))
    return sum(stage_ticks(placement, devices)) + network


def token_ticks(placement: Placement, devices: Sequence[Device], latencies: Latencies, users: int) -> int:
    """Ticks from one token of a user to the next with ``users`` at once: max(users * bottleneck, circuit).

    The rate over all users is ``users`` divided by it, min(1/bottleneck, users/circuit).
    """
    slowest = max(stage_ticks(placement, devices))
    return max(users * slowest, circuit_ticks(placement, devices, latencies))
