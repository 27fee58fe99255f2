"""The two divisions the paper compares against: even (GPipe) and in proportion to memory (exo).

Both give every member at least one block; both go through the same admission as any other division.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def uniform(blocks: int, members: int) -> tuple[int, ...]:
    """The same count for everybody; what does not divide goes one each to the first members of the ring."""
    share, rest = divmod(blocks, members)
    return tuple(share + (place < rest) for place in range(members))


def proportional(blocks: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Counts in proportion to ``weights`` by largest remainder, ties to the earlier member; sums to ``blocks``.

    A member whose share rounds to nothing still gets one block, taken from whoever is then furthest above their
    share. Needs ``len(weights) <= blocks``.
    """
    total = sum(weights)
    if total <= 0:
        return uniform(blocks, len(weights))
    quotas = [Fraction(blocks * weight, total) for weight in weights]
    counts = [max(1, int(quota)) for quota in quotas]
    while sum(counts) < blocks:
        counts[max(range(len(counts)), key=lambda place: (quotas[place] - counts[place], -place))] += 1
    while sum(counts) > blocks:
        able = [place for place, count in enumerate(counts) if count > 1]
        counts[max(able, key=lambda place: (counts[place] - quotas[place], -place))] -= 1
    return tuple(counts)
