"""The paper's two baselines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafila.plan.baselines import proportional, uniform


@given(st.integers(1, 100), st.integers(1, 12))
def test_uniform_counts_differ_by_at_most_one(blocks: int, members: int) -> None:
    counts = uniform(blocks, members)
    assert sum(counts) == blocks
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 60))
def test_proportional_counts_cover_the_model_and_follow_the_weights(weights: list[int], more: int) -> None:
    blocks = len(weights) + more
    counts = proportional(blocks, weights)
    assert sum(counts) == blocks
    assert min(counts) >= 1
    for a, heavy in enumerate(weights):
        for b, light in enumerate(weights):
            if heavy > light:
                assert counts[a] >= counts[b]


def test_proportional_is_exact_where_the_shares_are_whole() -> None:
    assert proportional(36, [24, 24, 12, 12]) == (12, 12, 6, 6)


def test_the_largest_remainder_gets_what_is_left() -> None:
    assert proportional(10, [26, 35, 39]) == (3, 3, 4)
    assert proportional(3, [1, 1]) == (2, 1)


def test_a_tiny_member_still_gets_a_block() -> None:
    assert proportional(10, [1000, 1000, 1]) == (5, 4, 1)
