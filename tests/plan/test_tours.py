"""The cheapest cycle, against every cycle."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.plan import tours
from tests.plan.oracles import cheapest_cycles, symmetric_weights


@given(st.integers(4, 7).flatmap(symmetric_weights))
def test_both_exact_searches_find_the_smallest_of_the_cheapest_orders(weights: list[list[int]]) -> None:
    _, orders = cheapest_cycles(weights)
    assert tours.exhaustive(weights) == orders[0]
    assert tours.held_karp(weights) == orders[0]


@given(st.integers(4, 7).flatmap(symmetric_weights))
def test_the_heuristic_is_within_the_excess_it_admits(weights: list[list[int]]) -> None:
    least, _ = cheapest_cycles(weights)
    order = tours.improved(weights)
    assert sorted(order) == list(range(len(weights)))
    assert order[0] == 0
    weight = tours.cycle_weight(order, weights)
    assert tours.lower_bound(weights, weight) <= least <= weight


def weights_of_a_map(size: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    places = [(random.random(), random.random()) for _ in range(size)]
    return [[round(1e6 * (abs(a[0] - b[0]) + abs(a[1] - b[1]))) for b in places] for a in places]


@pytest.mark.parametrize("seed", range(4))
def test_held_karp_equals_exhaustive_at_nine_members(seed: int) -> None:
    weights = weights_of_a_map(9, seed)
    assert tours.held_karp(weights) == tours.exhaustive(weights)


@pytest.mark.parametrize("seed", range(3))
def test_the_heuristic_stays_near_the_optimum_and_its_bound_says_so(seed: int) -> None:
    weights = weights_of_a_map(11, seed)
    least = tours.cycle_weight(tours.held_karp(weights), weights)
    weight = tours.cycle_weight(tours.improved(weights), weights)
    assert weight <= least * 1.05
    assert least * 0.95 <= tours.lower_bound(weights, weight) <= least


def test_beyond_the_exact_limit_the_excess_is_stated() -> None:
    weights = weights_of_a_map(20, 1)
    order, excess = tours.cheapest_cycle(weights)
    assert sorted(order) == list(range(20))
    assert 0 <= excess <= tours.cycle_weight(order, weights) // 10


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 10])
def test_no_excess_where_the_search_is_exact(size: int) -> None:
    tour = tours.cheapest_cycle(weights_of_a_map(size, 1))
    assert tour.order[0] == 0
    assert sorted(tour.order) == list(range(size))
    assert tour.excess == 0
