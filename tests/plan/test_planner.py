"""Whole plans: optimal, admitted, independent of who is listed when, and never an exception for what may happen."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import UsageError
from kafila.plan import Allocation, Declined, KnownEdge, Member, Objective, Ordering, Plan, Tier, Workload, plan_session
from kafila.plan.admit import limits_of, need_of, room_of
from kafila.plan.cost import price, to_seconds
from kafila.types import BlockRange, Capability, NatClass, PathKind
from tests.plan.oracles import MODEL, least_bottleneck, member, member_lists

WORKLOAD = Workload(context=1024, concurrency=2)


def planned(members: list[Member], **options: object) -> Plan:
    outcome = plan_session(members, MODEL, WORKLOAD, anchor=0, **options)  # type: ignore[arg-type]  # options are plan_session's own
    assert isinstance(outcome, Plan)
    return outcome


def least_of_everything(members: list[Member]) -> float | None:
    """The least bottleneck over all orders, heads and divisions, in seconds."""
    devices = []
    for one in members:
        device = price(one, MODEL, limits_of(room_of(one), need_of(MODEL, WORKLOAD, one)), Tier.COST)
        assert device is not None
        devices.append(device)
    found = [
        least_bottleneck(MODEL.blocks, [device.stage(is_head=not place) for place, device in enumerate(order)])
        for order in permutations(devices)
    ]
    least = min((value for value in found if value is not None), default=None)
    return None if least is None else to_seconds(least)


@given(member_lists(most=6), st.data())
def test_the_bottleneck_is_the_least_over_orders_heads_and_divisions(
    members: list[Member], data: st.DataObject
) -> None:
    anchor = data.draw(st.integers(0, len(members) - 1))
    outcome = plan_session(members, MODEL, WORKLOAD, anchor=anchor, margin=0)
    least = least_of_everything(members)
    assert (outcome.bottleneck_s if isinstance(outcome, Plan) else None) == least


@given(
    member_lists(),
    st.sampled_from(Allocation).filter(lambda allocation: allocation is not Allocation.GIVEN),
    st.sampled_from(Objective),
)
def test_a_plan_covers_the_model_once_and_fits(
    members: list[Member], allocation: Allocation, objective: Objective
) -> None:
    outcome = plan_session(members, MODEL, WORKLOAD, anchor=0, allocation=allocation, objective=objective)
    if isinstance(outcome, Declined):
        assert outcome.shortfall_bytes > 0
        assert outcome.message
        return
    held = [block for stage in outcome.stages for block in range(stage.blocks.first, stage.blocks.stop)]
    assert held == list(range(MODEL.blocks))
    for place, stage in enumerate(outcome.stages):
        need = need_of(MODEL, WORKLOAD, members[stage.member])
        assert stage.count >= 1
        assert stage.memory_used_bytes == need.of(stage.count, is_head=place == 0)
        assert stage.memory_used_bytes <= stage.memory_room_bytes == room_of(members[stage.member])
        assert stage.name == members[stage.member].name
    assert {*outcome.order, *(guest.member for guest in outcome.guests)} == set(range(len(members)))
    assert len(outcome.edges) == (len(outcome.stages) if len(outcome.stages) > 1 else 0)


@given(member_lists(least=2), st.sampled_from(Objective), st.data())
def test_listing_the_members_otherwise_changes_nothing(
    members: list[Member], objective: Objective, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(members))
    before = plan_session(members, MODEL, WORKLOAD, anchor=0, objective=objective)
    after = plan_session(shuffled, MODEL, WORKLOAD, anchor=shuffled.index(members[0]), objective=objective)
    if isinstance(before, Declined) or isinstance(after, Declined):
        assert before == after
        return
    assert before.names == after.names
    assert before.counts == after.counts
    assert before.circuit_s == after.circuit_s
    assert [members[index] for index in before.order] == [shuffled[index] for index in after.order]


@given(member_lists(), st.floats(1.5, 8))
def test_faster_by_a_factor_is_faster_by_that_factor(members: list[Member], factor: float) -> None:
    bare = [replace(one, overhead_s=0.0) for one in members]
    faster = [
        replace(
            one,
            bandwidth_bytes_per_s=(one.bandwidth_bytes_per_s or 0) * factor,
            head_bytes_per_s=one.head_bytes_per_s and one.head_bytes_per_s * factor,
        )
        for one in bare
    ]
    before = plan_session(bare, MODEL, WORKLOAD, anchor=0, margin=0)
    after = plan_session(faster, MODEL, WORKLOAD, anchor=0, margin=0)
    assert isinstance(before, Plan) == isinstance(after, Plan)
    if isinstance(before, Plan) and isinstance(after, Plan):
        assert after.bottleneck_s == pytest.approx((before.bottleneck_s or 0) / factor, rel=1e-9)


@given(member_lists(), st.integers(0, 10_000_000), st.floats(1, 10), st.data())
def test_more_memory_or_bandwidth_never_hurts(
    members: list[Member], memory_bytes: int, factor: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(members) - 1))
    one = members[place]
    better = replace(
        one,
        memory_bytes=one.memory_bytes + memory_bytes,
        bandwidth_bytes_per_s=(one.bandwidth_bytes_per_s or 0) * factor,
    )
    improved = [*members[:place], better, *members[place + 1 :]]
    for objective in Objective:
        before = plan_session(members, MODEL, WORKLOAD, anchor=0, margin=0, objective=objective)
        after = plan_session(improved, MODEL, WORKLOAD, anchor=0, margin=0, objective=objective)
        if isinstance(before, Declined):
            continue
        assert isinstance(after, Plan)
        if objective is Objective.BOTTLENECK:
            assert (after.bottleneck_s or 0) <= (before.bottleneck_s or 0)
        elif after.ordering is before.ordering:
            assert (after.tokens_per_s(2) or 0) >= (before.tokens_per_s(2) or 0) * (1 - 1e-12)


@given(member_lists(), st.integers(1, 8))
def test_the_throughput_objective_is_never_slower_and_both_plans_know_it(members: list[Member], users: int) -> None:
    slow = plan_session(members, MODEL, WORKLOAD, anchor=0, users=users)
    fast = plan_session(members, MODEL, WORKLOAD, anchor=0, users=users, objective="throughput")
    if isinstance(slow, Declined):
        return
    assert isinstance(fast, Plan)
    assert (fast.tokens_per_s(users) or 0) >= (slow.tokens_per_s(users) or 0)
    for own, other in ((slow, fast), (fast, slow)):
        known = [one for one in other.alternatives if one.objective is own.objective and one.users == users]
        assert own.prediction is not None
        assert [(one.names, one.counts) for one in known] == [(own.names, own.counts)]
        assert known[0].circuit_s == pytest.approx(own.circuit_s)
        assert known[0].bottleneck_s == own.bottleneck_s


def test_a_ring_of_one_has_no_edges_and_its_stage_is_its_circuit() -> None:
    plan = planned([member("only", rtt_s=None)])
    assert plan.edges == ()
    assert plan.counts == (MODEL.blocks,)
    assert plan.circuit_s == plan.bottleneck_s
    assert plan.tokens_per_s(1) == plan.tokens_per_s(9) == pytest.approx(1 / (plan.bottleneck_s or 1))
    assert (plan.utilisation, plan.imbalance) == (1, 1)


def test_a_ring_of_two_crosses_the_same_pair_twice() -> None:
    plan = planned([member("a"), member("b")], edges={(1, 0): KnownEdge(PathKind.DIRECT, 0.03)})
    assert [(edge.source, edge.target) for edge in plan.edges] == [(0, 1), (1, 0)]
    assert [edge.latency_s for edge in plan.edges] == [0.015, 0.015]
    assert all(edge.verified and edge.rtt_s == 0.03 for edge in plan.edges)
    assert plan.network_s == pytest.approx(0.03)


def test_utilisation_counts_every_stage_and_imbalance_the_extremes() -> None:
    members = [member(name, bandwidth=bandwidth) for name, bandwidth in (("a", 1e9), ("b", 5e8), ("c", 2e9))]
    plan = planned(members, shares=[2, 2, 4])
    times = plan.stage_s
    assert times is not None
    assert plan.utilisation == pytest.approx(sum(times) / 3 / max(times))
    assert plan.imbalance == pytest.approx(max(times) / min(times))
    assert plan.compute_s == pytest.approx(sum(times))
    assert plan.circuit_s == pytest.approx(sum(times) + (plan.network_s or 0))
    assert plan.tokens_per_s(2) == pytest.approx(min(1 / max(times), 2 / (plan.circuit_s or 1)))


def test_equal_members_share_equally() -> None:
    plan = planned([member(f"m{number}") for number in range(4)])
    assert plan.counts == (2, 2, 2, 2)
    assert plan.head == 0


def test_namesakes_can_be_planned_for() -> None:
    plan = planned([member("laptop"), member("laptop"), member("laptop")])
    assert sorted(plan.order) == [0, 1, 2]


def test_as_many_members_as_blocks() -> None:
    plan = planned([member(f"m{number}") for number in range(MODEL.blocks)])
    assert plan.counts == (1,) * MODEL.blocks


def test_a_large_ring_is_planned_and_its_excess_stated() -> None:
    model = replace(MODEL, blocks=40)
    members = [member(f"m{number:02}", rtt_s=0.01 + number * number % 17 / 100) for number in range(20)]
    plan = plan_session(members, model, WORKLOAD, anchor=3)
    assert isinstance(plan, Plan)
    assert sum(plan.counts) == 40
    assert plan.order_excess_s >= 0


# --- tiers ---


def test_without_a_bandwidth_the_ratio_of_arithmetic_throughput_divides_and_the_head_stays() -> None:
    members = [member("a", flops=1e12), member("b", flops=3e12, bandwidth=None)]
    plan = planned(members)
    assert plan.tier is Tier.FLOPS
    assert plan.head == 0
    assert dict(zip(plan.names, plan.counts, strict=True)) == {"a": 2, "b": 6}
    assert plan.stage_s is None
    assert plan.tokens_per_s(1) is None
    assert plan.alternatives == ()


def test_the_flops_tier_keeps_the_head_at_the_opener_even_where_another_would_do() -> None:
    members = [member("slow", flops=1e11, bandwidth=None), member("fast", flops=1e13)]
    assert planned(members).head == 0


def test_with_nothing_measured_memory_divides() -> None:
    members = [
        member("a", memory_bytes=30_000_000, bandwidth=None),
        member("b", memory_bytes=10_000_000, bandwidth=None),
    ]
    plan = planned(members)
    assert plan.tier is Tier.MEMORY
    assert dict(zip(plan.names, plan.counts, strict=True)) == {"a": 6, "b": 2}


def test_the_memory_tier_is_admitted_after_the_fact() -> None:
    members = [member("a", memory_bytes=2_000_000, bandwidth=None), member("b", memory_bytes=2_000_000)]
    assert isinstance(plan_session(members, MODEL, WORKLOAD, anchor=0), Declined)


def test_the_throughput_objective_gives_way_where_rates_cannot_be_told() -> None:
    for unknown in (member("b", bandwidth=None), member("b", rtt_s=None)):
        assert planned([member("a"), unknown], objective="throughput").objective is Objective.BOTTLENECK


def test_without_round_trips_the_circuit_is_not_predicted_but_the_stages_are() -> None:
    plan = planned([member("a", rtt_s=None), member("b", rtt_s=None)])
    assert plan.ordering is Ordering.COUNTED
    assert plan.bottleneck_s is not None
    assert (plan.circuit_s, plan.network_s, plan.prediction, plan.tokens_per_s(1)) == (None,) * 4


# --- shares, host, users ---


def test_shares_override_the_division_in_the_order_of_the_members() -> None:
    plan = planned([member("z"), member("a"), member("m")], shares=[1, 5, 2])
    assert plan.names == ("z", "a", "m")
    assert plan.counts == (1, 5, 2)
    assert [stage.blocks for stage in plan.stages] == [BlockRange(0, 1), BlockRange(1, 6), BlockRange(6, 8)]
    assert (plan.ordering, plan.allocation) == (Ordering.GIVEN, Allocation.GIVEN)


def test_with_shares_the_ring_begins_at_the_anchor() -> None:
    plan = plan_session([member("z"), member("a"), member("m")], MODEL, WORKLOAD, anchor=1, shares=[1, 5, 2])
    assert isinstance(plan, Plan)
    assert plan.names == ("a", "m", "z")
    assert plan.counts == (5, 2, 1)


def test_shares_are_admitted_like_any_division() -> None:
    outcome = plan_session([member("a"), member("b", memory_bytes=1_500_000)], MODEL, WORKLOAD, anchor=0, shares=[4, 4])
    assert isinstance(outcome, Declined)
    assert outcome.who == "b"


@pytest.mark.parametrize("shares", [[8], [4, 5], [8, 0], [9, -1], []])
def test_shares_that_cannot_be_meant_are_refused(shares: list[int]) -> None:
    with pytest.raises(UsageError):
        planned([member("a"), member("b")], shares=shares)


@pytest.mark.parametrize(
    "options",
    [
        {"anchor": 2},
        {"anchor": -1},
        {"users": 0},
        {"users": 10**400},
        {"margin": 1},
        {"margin": -0.1},
        {"headroom": 1},
        {"headroom": 2},
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        plan_session([member("a"), member("b")], MODEL, WORKLOAD, **{"anchor": 0, **options})  # type: ignore[arg-type]  # wrong on purpose


def test_nobody_is_refused() -> None:
    with pytest.raises(UsageError):
        plan_session([], MODEL, WORKLOAD, anchor=0)


@pytest.mark.parametrize(("context", "concurrency"), [(0, 1), (1, 0), (-4, 2), (1, 10**400)])
def test_a_workload_of_nothing_is_refused(context: int, concurrency: int) -> None:
    with pytest.raises(UsageError):
        Workload(context, concurrency)


def test_the_host_stays_in_the_ring_only_if_it_asks() -> None:
    members = [member("host", bandwidth=1e8), member("card", bandwidth=1e12)]
    free = planned(members, objective="throughput", users=1)
    assert free.names == ("card",)
    assert [guest.name for guest in free.guests] == ["host"]
    asked = planned(members, objective="throughput", users=1, host_must_serve=True)
    assert set(asked.names) == {"host", "card"}


def test_members_too_small_for_a_block_stay_out_under_the_throughput_objective() -> None:
    members = [member("a"), member("tiny", memory_bytes=10)]
    assert isinstance(plan_session(members, MODEL, WORKLOAD, anchor=0), Declined)
    assert planned(members, objective="throughput").names == ("a",)


def test_users_default_to_the_concurrency() -> None:
    assert planned([member()]).users == WORKLOAD.concurrency


@given(
    memory_bytes=st.integers(-(10**15), 10**15),
    bandwidth=st.none() | st.floats(),
    overhead_s=st.none() | st.floats(),
    flops=st.none() | st.floats(),
    rtt_s=st.none() | st.floats(),
    nat=st.sampled_from(NatClass),
    objective=st.sampled_from(Objective),
)
def test_no_measurement_however_mad_raises(
    memory_bytes: int,
    bandwidth: float | None,
    overhead_s: float | None,
    flops: float | None,
    rtt_s: float | None,
    nat: NatClass,
    objective: Objective,
) -> None:
    mad = Member("mad", memory_bytes, bandwidth, overhead_s, flops, rtt_s, nat)
    tiny = member("tiny", memory_bytes=1, flops=1e12)
    for members in ([mad], [member("a", flops=1e12), mad, tiny], [mad, *(member(f"m{n}") for n in range(9))]):
        for users in (1, 10**6):
            outcome = plan_session(members, MODEL, WORKLOAD, anchor=0, objective=objective, users=users)
            assert isinstance(outcome, (Plan, Declined))


@pytest.mark.parametrize("bandwidth", [5e-324, 1e-300, 0.5, 1.0, 1e300])
@pytest.mark.parametrize("overhead_s", [0.0, 5e-324, 86_400.0, 86_401.0, 1e308])
def test_extreme_measurements_are_planned_with_or_taken_for_failures(bandwidth: float, overhead_s: float) -> None:
    extreme = member("a", bandwidth=bandwidth, overhead_s=overhead_s)
    assert extreme.priced == (bandwidth >= 1 and overhead_s <= 86_400)
    for others in ([], [member("tiny", memory_bytes=1)], [member(f"m{number}") for number in range(9)]):
        for objective in Objective:
            outcome = plan_session([extreme, *others], MODEL, WORKLOAD, anchor=0, objective=objective, users=10**6)
            assert isinstance(outcome, (Plan, Declined))


def test_a_member_is_made_from_what_its_probe_reported() -> None:
    capability = Capability("cpu", 5, 2.0, 3.0, 4.0, 0.1, 6.0, 7, 8, 9)
    assert Member.from_capability("a", capability, rtt_s=1.0, nat=NatClass.ORDINARY) == Member(
        "a", 5, 2.0, 3.0, 4.0, 1.0, NatClass.ORDINARY, False, 6.0, 7, 8, 9
    )
