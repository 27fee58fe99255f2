"""How every edge of the ring travels, as one member knows it: what it tells of its own and hears of the others' (pure).

A member looks at its link to the next one about once a second and tells the others when that is news: another kind of
path, or a round trip that is clearly another. Each report goes once round. Every ``AGAIN_S`` it is told anyway, for
those who were not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite

from kafila.errors import ProtocolError
from kafila.ring.frames import Edge
from kafila.types import NodeId, PathKind

AGAIN_S = 10.0
"""In a ring of 32 members these are ten messages a second at each, of a hundred bytes."""
NEWS_RATIO = 0.25
NEWS_S = 1e-3
"""A round trip is another one where it differs by both: a quarter, and a millisecond. People look at these."""


class RingEdges:
    """The edges of one ring. Holds at most one report a member."""

    def __init__(self, me: NodeId, ring: tuple[NodeId, ...]) -> None:
        self._me = me
        self._ring = frozenset(ring)
        self._told: Edge | None = None
        self._told_at = -inf
        self._edges: dict[NodeId, Edge] = {}

    def __iter__(self) -> Iterator[Edge]:
        """What is known, this member's own included."""
        return iter(self._edges.values())

    def of(self, member: NodeId) -> Edge | None:
        """The edge from a member to the next; None where nothing is known."""
        return self._edges.get(member)

    def seen(self, path: PathKind, rtt_s: float | None, now: float) -> Edge | None:
        """This member's own edge as it is now. What the others should hear of it, if anything."""
        edge = self._edges[self._me] = Edge(self._me, path, rtt_s)
        if now - self._told_at < AGAIN_S and not self._is_news(edge):
            return None
        self._told, self._told_at = edge, now
        return edge

    def _is_news(self, edge: Edge) -> bool:
        told = self._told
        if told is None or told.path is not edge.path or told.rtt_s is None or edge.rtt_s is None:
            return told != edge
        return abs(edge.rtt_s - told.rtt_s) > max(NEWS_S, NEWS_RATIO * told.rtt_s)

    def heard(self, edge: Edge) -> bool:
        """Somebody's report. Whether it goes on round the ring: a member's own has been round.

        Raises ProtocolError where it is of nobody in the ring or of no possible time.
        """
        if edge.origin not in self._ring:
            raise ProtocolError("an edge was told of by somebody who is not in the ring")
        if edge.rtt_s is not None and not (isfinite(edge.rtt_s) and edge.rtt_s >= 0):
            raise ProtocolError("an edge was told of with a round trip that is no time")
        if edge.origin == self._me:
            return False
        self._edges[edge.origin] = edge
        return True
