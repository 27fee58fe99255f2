"""Arithmetic of byte ranges: half-open, sorted, apart (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Range = tuple[int, int]
"""Bytes ``start`` (inclusive) to ``end`` (exclusive)."""


def merge(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes as few ranges: sorted, touching ones joined, empty ones left out."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def missing(wanted: Iterable[Range], have: Iterable[Range]) -> list[Range]:
    """What of ``wanted`` is not in ``have``."""
    there = merge(have)
    left: list[Range] = []
    for start, end in merge(wanted):
        at = start
        for first, stop in there:
            if stop <= at or first >= end:
                continue
            left.append((at, first))
            at = stop
        left.append((at, end))
    return merge(left)


def total(ranges: Iterable[Range]) -> int:
    """How many bytes they are; ``ranges`` must be apart."""
    return sum(end - start for start, end in ranges)


def close_gaps(ranges: Sequence[Range], spare_bytes: int) -> list[Range]:
    """Fewer ranges that hold ``ranges`` and at most ``spare_bytes`` more, the narrowest gaps closed first.

    ``ranges`` are as :func:`merge` returns them. A request costs a round trip; the bytes of a narrow gap cost less.
    """
    gaps = sorted((after[0] - before[1], before[1], after[0]) for before, after in pairwise(ranges))
    closed: list[Range] = []
    for width, start, end in gaps:
        if width > spare_bytes:
            break
        spare_bytes -= width
        closed.append((start, end))
    return merge([*ranges, *closed])


def pieces(ranges: Iterable[Range], most_bytes: int) -> list[Range]:
    """The same bytes in pieces of at most ``most_bytes``."""
    return [(at, min(at + most_bytes, end)) for start, end in ranges for at in range(start, end, most_bytes)]
