"""How chunks beside answers become as long as is good, by what they cost."""

from __future__ import annotations

import pytest

from kafila.ring.chunks import ChunkCosts
from kafila.ring.pace import Pace
from kafila.types import Segment


def test_half_of_a_cost_may_not_depend_on_the_tokens() -> None:
    costs = ChunkCosts(lambda _answers: (1.0,))
    costs.record(1, 4, 0, (2.0,))
    assert costs.added_s(8, 0) == pytest.approx((1.5,), rel=0.1)
    assert costs.added_s(2, 0) == pytest.approx((0.75,), rel=0.1)


def test_what_was_seen_of_the_nearest_size_counts() -> None:
    costs = ChunkCosts(lambda _answers: (1.0,))
    for tokens, stage_s in [(4, 2.0), (4, 2.0), (4, 2.0), (8, 5.0)]:
        costs.record(1, tokens, 0, (stage_s,))
    assert costs.added_s(8, 0) == pytest.approx((4.0,))
    assert costs.longest(0) == 16


def test_chunks_grow_where_they_cost_the_same_whatever_their_length() -> None:
    """As where a device reads its weights once more for a prompt's rows: longer ones are free."""
    pace = Pace(1)
    answer, place, longest = Segment(0, 100, 1, sample=True), 0, 0
    for _ in range(40):
        tokens = pace.reading(1, 4000, place).tokens
        chunk = [Segment(1, place, tokens, sample=False)] if tokens else []
        stage_s = 2.0 if chunk else 1.0
        pace.record([answer, *chunk], (stage_s,), stage_s)
        place, longest = place + tokens, max(longest, tokens)
        if place > 3000:
            break
    assert longest >= 256
