"""What a member tells of its edge, and what it takes from others."""

from __future__ import annotations

from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.ring.frames import Edge
from kafila.ring.ringedges import AGAIN_S, NEWS_RATIO, NEWS_S, RingEdges
from kafila.types import NodeId, PathKind

ME, OTHER, STRANGER = (NodeId(bytes([n] * 8)) for n in range(3))
sightings = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from(PathKind), st.none() | st.floats(0, 1)), min_size=1, max_size=30
)


@given(sightings)
def test_the_others_picture_is_never_far_from_what_is_seen(seen: list[tuple[float, PathKind, float | None]]) -> None:
    mine, others, now = RingEdges(ME, (ME, OTHER)), RingEdges(OTHER, (ME, OTHER)), 0.0
    told_at = []
    for wait_s, path, rtt_s in seen:
        now += wait_s
        if (news := mine.seen(path, rtt_s, now)) is not None:
            told_at.append(now)
            assert others.heard(news)
        known = others.of(ME)
        assert known is not None
        assert known.path is path
        assert (known.rtt_s is None) == (rtt_s is None)
        if known.rtt_s is not None and rtt_s is not None:
            assert abs(known.rtt_s - rtt_s) <= max(NEWS_S, NEWS_RATIO * known.rtt_s)
        assert now - told_at[-1] < AGAIN_S
        assert mine.of(ME) == Edge(ME, path, rtt_s)


@given(st.lists(st.floats(0, 5), min_size=2, max_size=30))
def test_what_stays_as_it_was_is_told_seldom(waits: list[float]) -> None:
    edges, now, told_at = RingEdges(ME, (ME, OTHER)), 0.0, []
    for wait_s in waits:
        now += wait_s
        if edges.seen(PathKind.DIRECT, 0.02, now) is not None:
            told_at.append(now)
    assert all(later - earlier >= AGAIN_S for earlier, later in pairwise(told_at))


def test_a_members_own_report_has_been_round() -> None:
    edges = RingEdges(ME, (ME, OTHER))
    edges.seen(PathKind.DIRECT, 0.02, 0.0)
    assert not edges.heard(Edge(ME, PathKind.RELAYED, 9.0))
    assert edges.of(ME) == Edge(ME, PathKind.DIRECT, 0.02)


@pytest.mark.parametrize(
    "edge",
    [
        Edge(STRANGER, PathKind.DIRECT, 0.01),
        Edge(OTHER, PathKind.DIRECT, nan),
        Edge(OTHER, PathKind.DIRECT, inf),
        Edge(OTHER, PathKind.DIRECT, -0.01),
    ],
)
def test_what_cannot_be_is_refused(edge: Edge) -> None:
    edges = RingEdges(ME, (ME, OTHER))
    with pytest.raises(ProtocolError):
        edges.heard(edge)
    assert not list(edges)
