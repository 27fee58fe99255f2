"""Byte ranges against sets of bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kafila.shard.ranges import Range, close_gaps, merge, missing, pieces, total

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def _bytes(ranges: list[Range]) -> set[int]:
    return {byte for start, end in ranges for byte in range(start, end)}


def _apart(ranges: list[Range]) -> bool:
    flat = [edge for pair in ranges for edge in pair]
    return all(one < other for one, other in pairwise(flat))


@given(ranges=RANGES)
def test_merged_ranges_are_the_same_bytes_and_apart(ranges: list[Range]) -> None:
    merged = merge(ranges)
    assert _bytes(merged) == _bytes(ranges)
    assert _apart(merged)
    assert total(merged) == len(_bytes(ranges))


@given(wanted=RANGES, have=RANGES)
def test_what_is_missing(wanted: list[Range], have: list[Range]) -> None:
    left = missing(wanted, have)
    assert _bytes(left) == _bytes(wanted) - _bytes(have)
    assert _apart(left)


@given(ranges=RANGES, spare=st.integers(0, 30))
def test_closing_gaps_costs_at_most_what_is_spare_and_nothing_narrower_stays_open(
    ranges: list[Range], spare: int
) -> None:
    merged = merge(ranges)
    closed = close_gaps(merged, spare)
    extra = _bytes(closed) - _bytes(merged)
    assert _bytes(merged) <= _bytes(closed)
    assert len(extra) <= spare
    assert _apart(closed)
    left = [after[0] - before[1] for before, after in pairwise(closed)]
    assert all(gap > spare - len(extra) for gap in left)


@given(ranges=RANGES, most=st.integers(1, 20))
def test_pieces_are_the_same_bytes_and_small(ranges: list[Range], most: int) -> None:
    cut = pieces(merge(ranges), most)
    assert _bytes(cut) == _bytes(ranges)
    assert total(cut) == len(_bytes(ranges))
    assert all(0 < end - start <= most for start, end in cut)
