"""Ring order: counting, costs, ties, and what verification changes."""

from __future__ import annotations

from itertools import pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.plan import KnownEdge, Member, Ordering
from kafila.plan.cost import to_ticks
from kafila.plan.order import arrange, predicted_kind, relayed_edges, survey
from kafila.types import NatClass, PathKind
from tests.plan.oracles import member, member_lists

P, O, R = NatClass.PERMISSIVE, NatClass.ORDINARY, NatClass.RESTRICTIVE  # noqa: E741  - the classes' initials


def ring_of(classes: tuple[NatClass, ...]) -> list[Member]:
    return [member(f"m{number}", nat=nat, rtt_s=None) for number, nat in enumerate(classes)]


def test_the_rule_is_that_of_table_iii() -> None:
    relayed = {(a, b) for a, b in product(NatClass, repeat=2) if predicted_kind(a, b) is PathKind.RELAYED}
    assert relayed == {(O, R), (R, O), (R, R)}


@pytest.mark.parametrize("size", range(1, 7))
def test_counting_gives_the_fewest_relayed_edges_there_can_be(size: int) -> None:
    for classes in product(NatClass, repeat=size):
        members = ring_of(classes)
        pairs = survey(members, {})
        arrangement = arrange(members, pairs, 0)
        fewest = min(relayed_edges((0, *rest), pairs) for rest in permutations(range(1, size)))
        assert arrangement.order[0] == 0
        assert sorted(arrangement.order) == list(range(size))
        assert arrangement.method is Ordering.COUNTED or size == 1
        assert relayed_edges(arrangement.order, pairs) == fewest


@pytest.mark.parametrize("size", range(2, 7))
def test_an_all_direct_ring_is_found_exactly_when_the_permissive_match_the_restrictive(size: int) -> None:
    for classes in product((P, R), repeat=size):
        members = ring_of(classes)
        pairs = survey(members, {})
        direct = relayed_edges(arrange(members, pairs, 0).order, pairs) == 0
        assert direct == (classes.count(P) >= classes.count(R))


def test_counting_follows_what_is_known_of_a_pair_rather_than_its_classes() -> None:
    members = ring_of((O, O, O, O))
    relayed = {pair: KnownEdge(PathKind.RELAYED) for pair in ((0, 1), (2, 3))}
    pairs = survey(members, relayed)
    order = arrange(members, pairs, 0).order
    assert relayed_edges(order, pairs) == 0


@given(member_lists(least=2, most=6), st.data())
def test_with_every_round_trip_the_ring_is_the_cheapest_and_then_the_least_separated(
    members: list[Member], data: st.DataObject
) -> None:
    anchor = data.draw(st.integers(0, len(members) - 1))
    pairs = survey(members, {})

    def cost(order: tuple[int, ...]) -> tuple[int, int]:
        hops = [*pairwise(order), (order[-1], order[0])]
        rtts = [to_ticks(one.rtt_s or 0) for one in members]
        return sum(pairs[a][b].rtt or 0 for a, b in hops), sum(abs(rtts[a] - rtts[b]) for a, b in hops)

    others = [index for index in range(len(members)) if index != anchor]
    arrangement = arrange(members, pairs, anchor)
    assert arrangement.method is Ordering.CHEAPEST
    assert arrangement.order[0] == anchor
    assert cost(arrangement.order) == min(cost((anchor, *rest)) for rest in permutations(others))


def test_edges_are_priced_as_the_paper_prices_them() -> None:
    near, far = member("near", rtt_s=0.079, nat=R), member("far", rtt_s=0.115, nat=R)
    relayed = survey([near, far], {})[0][1]
    assert (relayed.kind, relayed.rtt) == (PathKind.RELAYED, to_ticks(0.079) + to_ticks(0.115))
    direct = survey([near, far], {(1, 0): KnownEdge(PathKind.DIRECT)})[0][1]
    assert (direct.kind, direct.rtt, direct.verified) == (PathKind.DIRECT, to_ticks(0.115) - to_ticks(0.079), False)
    verified = survey([near, far], {(0, 1): KnownEdge(PathKind.DIRECT, 0.002)})[1][0]
    assert verified == (PathKind.DIRECT, to_ticks(0.002), True)


def test_in_a_ring_that_relays_everywhere_members_of_one_site_are_neighbours() -> None:
    rtts = {"a": 0.08, "x": 0.11, "b": 0.081, "y": 0.112, "c": 0.083}
    members = [member(name, rtt_s=rtt_s, nat=R) for name, rtt_s in rtts.items()]
    order = arrange(members, survey(members, {}), 0).order
    names = [members[index].name for index in order]
    assert abs(names.index("x") - names.index("y")) == 1


def test_no_separation_outweighs_a_cost() -> None:
    members = [member(name, rtt_s=rtt_s) for name, rtt_s in (("a", 0.0), ("b", 0.1), ("c", 0.0), ("d", 0.1))]
    round_trips = {(0, 1): 0.1, (1, 2): 0.1, (2, 3): 0.1, (0, 3): 0.1, (0, 2): 0.11, (1, 3): 0.11}
    known = {pair: KnownEdge(PathKind.DIRECT, rtt_s) for pair, rtt_s in round_trips.items()}
    assert arrange(members, survey(members, known), 0).order == (0, 1, 2, 3)


def test_a_verified_edge_changes_the_order() -> None:
    members = [member(name, rtt_s=0.05, nat=R) for name in "abcd"]
    known = {(0, 2): KnownEdge(PathKind.DIRECT, 0.001), (1, 3): KnownEdge(PathKind.DIRECT, 0.001)}
    order = arrange(members, survey(members, known), 0).order
    neighbours = {frozenset(pair) for pair in [*pairwise(order), (order[-1], order[0])]}
    assert {frozenset((0, 2)), frozenset((1, 3))} <= neighbours


@pytest.mark.parametrize("rtt_s", [None, -0.1, float("nan"), float("inf")])
def test_one_missing_round_trip_leaves_counting_unless_its_edges_are_verified(rtt_s: float | None) -> None:
    members = [member("a"), member("b", rtt_s=rtt_s), member("c")]
    assert arrange(members, survey(members, {}), 0).method is Ordering.COUNTED
    known = {pair: KnownEdge(PathKind.DIRECT, 0.01) for pair in ((0, 1), (1, 2))}
    assert arrange(members, survey(members, known), 0).method is Ordering.CHEAPEST
