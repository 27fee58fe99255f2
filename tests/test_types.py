"""What little the shared values do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafila.types import Segment, last_rows

segments = st.builds(Segment, st.integers(0, 9), st.integers(0, 4000), st.integers(1, 600), st.booleans())


@given(st.lists(segments, max_size=6).map(tuple))
def test_last_rows_are_one_a_segment_and_end_where_it_does(batch: tuple[Segment, ...]) -> None:
    cut = last_rows(batch)
    assert [(one.slot, one.start + one.length, one.length, one.sample) for one in cut] == [
        (one.slot, one.start + one.length, 1, one.sample) for one in batch
    ]
    assert last_rows(cut) is cut


def test_where_there_are_no_other_rows_nothing_is_made_anew() -> None:
    single = (Segment(2, 7, 1, True), Segment(0, 0, 1, False))
    assert last_rows(single) is single
