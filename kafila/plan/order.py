"""Ring order: who is next to whom (paper Section V-B).

First pass, when somebody has no round trip: count. A pair relays when one is restrictive and the other is not
permissive (the "rule predicts" column of the paper's Table III), so alternating permissive and restrictive members
gives the fewest relayed edges, in linear time.

With every pair priced: the cheapest cycle. A relayed edge costs r_A + r_B, the path it takes; a direct one at least
|r_A - r_B|; a verified one what was measured. Where rings cost the same, the one whose neighbours are at similar
distances from the rendezvous wins, because an edge that turns out better than predicted then joins members who are
near.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kafila.plan.cost import to_ticks
from kafila.plan.members import KnownEdge, KnownEdges, Member, measured
from kafila.plan.placement import hops
from kafila.plan.tours import cheapest_cycle
from kafila.types import NatClass, PathKind


class Ordering(Enum):
    """How a ring's order was found."""

    CHEAPEST = "cheapest"
    """The least sum of edge costs."""
    COUNTED = "counted"
    """The fewest relayed edges, because some pair has no price."""
    GIVEN = "given"
    """The order of the members as listed."""


class Pair(NamedTuple):
    """What the planner takes a pair's path to be."""

    kind: PathKind
    rtt: int | None
    """Round trip in ticks; ``None`` where nothing prices it."""
    verified: bool
    """The round trip was measured on this very path."""


Pairs = Sequence[Sequence[Pair]]
"""By member index, symmetric; the diagonal is not used."""


class Arrangement(NamedTuple):
    """Members round the ring, the anchor first."""

    order: tuple[int, ...]
    method: Ordering
    excess: int
    """At most so many ticks of round trip above the cheapest ring; 0 where the search was exact."""


def predicted_kind(a: NatClass, b: NatClass) -> PathKind:
    """The paper's rule for a pair of classes (Table III, "rule predicts")."""
    if NatClass.PERMISSIVE in {a, b} or NatClass.RESTRICTIVE not in {a, b}:
        return PathKind.DIRECT
    return PathKind.RELAYED


def survey(members: Sequence[Member], known: KnownEdges) -> list[list[Pair]]:
    """Every pair's path, from what is known of it or else from the classes."""
    size = len(members)
    itself = Pair(PathKind.DIRECT, 0, verified=False)
    pairs = [[itself] * size for _ in range(size)]
    for a in range(size):
        for b in range(a + 1, size):
            pairs[a][b] = pairs[b][a] = _pair(members[a], members[b], known.get((a, b)) or known.get((b, a)))
    return pairs


def unpriced(pairs: Pairs) -> list[list[Pair]]:
    """The same pairs without their costs: an order of them counts relayed edges."""
    return [[pair._replace(rtt=None) for pair in row] for row in pairs]


def _pair(a: Member, b: Member, known: KnownEdge | None) -> Pair:
    kind = predicted_kind(a.nat, b.nat) if known is None else known.kind
    if known is not None and known.rtt_s is not None and measured(known.rtt_s):
        return Pair(kind, to_ticks(known.rtt_s), verified=True)
    if a.rtt_s is None or b.rtt_s is None or not (measured(a.rtt_s) and measured(b.rtt_s)):
        return Pair(kind, None, verified=False)
    near, far = sorted((to_ticks(a.rtt_s), to_ticks(b.rtt_s)))
    return Pair(kind, near + far if kind is PathKind.RELAYED else far - near, verified=False)


def arrange(members: Sequence[Member], pairs: Pairs, anchor: int) -> Arrangement:
    """The ring order for ``members``, whatever order they are listed in (:func:`canonical`)."""
    ranked = canonical(members, anchor)
    apart = [(a, b) for a in ranked for b in ranked if a != b]
    if any(pairs[a][b].rtt is None for a, b in apart):
        return _count(members, pairs, ranked)
    separation = [[_separation(members[a], members[b]) for b in ranked] for a in ranked]
    # One integer holds cost and tie-break: no sum of separations reaches the unit of cost.
    unit = 1 + len(ranked) * max(map(max, separation))
    weights = [
        [(pairs[a][b].rtt or 0) * unit + apart for b, apart in zip(ranked, row, strict=True)]
        for a, row in zip(ranked, separation, strict=True)
    ]
    tour = cheapest_cycle(weights)
    return Arrangement(tuple(ranked[place] for place in tour.order), Ordering.CHEAPEST, -(-tour.excess // unit))


def canonical(members: Sequence[Member], anchor: int) -> list[int]:
    """Indices with the anchor first and the rest by name and measurements, so that a plan does not depend on the order
    in which members joined."""

    def key(index: int) -> tuple[str, int, float, float, int]:
        member = members[index]
        return (
            member.name,
            member.memory_bytes,
            _orderable(member.bandwidth_bytes_per_s),
            _orderable(member.rtt_s),
            index,
        )

    return [anchor, *sorted((index for index in range(len(members)) if index != anchor), key=key)]


def _orderable(value: float | None) -> float:
    return value if value is not None and measured(value) else -1.0


def _separation(a: Member, b: Member) -> int:
    if a is b or a.rtt_s is None or b.rtt_s is None or not (measured(a.rtt_s) and measured(b.rtt_s)):
        return 0
    return abs(to_ticks(a.rtt_s) - to_ticks(b.rtt_s))


def _count(members: Sequence[Member], pairs: Pairs, ranked: Sequence[int]) -> Arrangement:
    """Fewest relayed edges: by the counting rule, or by the same search as costs where some pair is known not to follow
    its classes."""
    by_class = all(
        pairs[a][b].kind is predicted_kind(members[a].nat, members[b].nat) for a in ranked for b in ranked if a != b
    )
    if by_class:
        return Arrangement(tuple(_alternate(members, ranked)), Ordering.COUNTED, 0)
    weights = [[int(a != b and pairs[a][b].kind is PathKind.RELAYED) for b in ranked] for a in ranked]
    tour = cheapest_cycle(weights)
    return Arrangement(tuple(ranked[place] for place in tour.order), Ordering.COUNTED, 0)


def _alternate(members: Sequence[Member], ranked: Sequence[int]) -> list[int]:
    """Permissive and restrictive by turns, the restrictive left over, the ordinary, the permissive left over; rotated
    so that the anchor, first of ``ranked``, is first."""
    of = {nat: [index for index in ranked if members[index].nat is nat] for nat in NatClass}
    permissive, restrictive = of[NatClass.PERMISSIVE], of[NatClass.RESTRICTIVE]
    ring: list[int] = []
    for open_one, closed_one in zip(permissive, restrictive, strict=False):
        ring += (open_one, closed_one)
    turns = len(ring) // 2
    # A permissive member after the turns shields the last restrictive one from the ordinary ones.
    ring += restrictive[turns:] + permissive[turns : turns + 1]
    ring += of[NatClass.ORDINARY] + permissive[turns + 1 :]
    start = ring.index(ranked[0])
    return ring[start:] + ring[:start]


def relayed_edges(order: Sequence[int], pairs: Pairs) -> int:
    """How many of the ring's edges relay."""
    return sum(pairs[a][b].kind is PathKind.RELAYED for a, b in hops(order))
