"""Blocks with experts: what a batch reads of them against counting, and plans of them against trying everything."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.plan import Member, Plan, Workload, plan_session, read_bytes
from kafila.plan.batching import batched_tokens_per_s
from kafila.plan.cost import StageCost, read_ticks, to_seconds, to_ticks
from kafila.types import ExpertBytes
from tests.plan.oracles import MODEL, least_bottleneck, member, member_lists

WORKLOAD = Workload(context=1024, concurrency=2)
SPARSE = replace(MODEL, experts=ExpertBytes(count=4, active=1, shared_bytes=200_000, expert_bytes=800_000))


@pytest.mark.parametrize(
    ("count", "active", "rows"), [(4, 2, 1), (4, 2, 2), (4, 1, 3), (5, 3, 2), (3, 3, 2), (6, 2, 2)]
)
def test_a_batch_reads_as_many_experts_as_all_ways_to_choose_them_have_in_the_mean(
    count: int, active: int, rows: int
) -> None:
    choices = list(combinations(range(count), active))
    batches = list(product(choices, repeat=rows))
    distinct = Fraction(sum(len({expert for row in batch for expert in row}) for batch in batches), len(batches))
    experts = ExpertBytes(count, active, shared_bytes=1000, expert_bytes=count * 10**9)
    found = read_bytes(replace(MODEL, experts=experts), rows)
    assert found == pytest.approx(1000 + distinct * 10**9, rel=1e-9)


def test_without_experts_all_is_read() -> None:
    assert read_bytes(MODEL) == read_bytes(MODEL, 100) == MODEL.block_bytes


@given(
    member_lists(most=5),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(10_000, 400_000),
    st.integers(0, 2_000_000),
    st.integers(0, 4),
)
def test_a_plan_divides_by_what_is_read_and_admits_by_what_is_stored(
    members: list[Member], count: int, active: int, shared: int, expert: int, larger: int
) -> None:
    """``larger``: by how many quarters the largest block, which memory counts, exceeds the mean one, as where some
    blocks have no experts."""
    experts = ExpertBytes(count, min(active, count), shared, expert)
    stored = (shared + expert) * (4 + larger) // 4
    model = replace(MODEL, block_bytes=stored, experts=experts)
    read = shared + round(Fraction(expert * experts.active, count))
    cache = WORKLOAD.context * WORKLOAD.concurrency * model.kv_bytes_per_token_per_block

    def stage(one: Member, *, head: bool) -> StageCost:
        assert one.bandwidth_bytes_per_s is not None
        assert one.overhead_s is not None
        room = one.memory_bytes - one.memory_bytes * 50_000 // 1_000_000 - one.workspace_bytes
        room -= model.head_bytes if head else 0
        held = cache + (stored if one.block_memory_bytes is None else one.block_memory_bytes)
        fixed = to_ticks(one.overhead_s)
        if head:
            fixed += read_ticks(model.head_read_bytes, one.head_bytes_per_s or one.bandwidth_bytes_per_s)
        return StageCost(fixed, read_ticks(read, one.bandwidth_bytes_per_s), max(0, room // held))

    found = [
        least_bottleneck(model.blocks, [stage(one, head=not place) for place, one in enumerate(order)])
        for order in permutations(members)
    ]
    least = min((value for value in found if value is not None), default=None)
    outcome = plan_session(members, model, WORKLOAD, anchor=0, margin=0)
    assert (outcome.bottleneck_s if isinstance(outcome, Plan) else None) == (
        None if least is None else pytest.approx(to_seconds(least), rel=1e-4)  # a mean is rounded to whole bytes
    )


def test_rows_that_share_a_batch_read_more_experts_than_one_does() -> None:
    alone = [member(bandwidth=1e9, overhead_s=0.0, flops=1e15, rtt_s=0.0)]
    plan = plan_session(alone, SPARSE, Workload(1024, 1), anchor=0)
    assert isinstance(plan, Plan)
    one, two = (MODEL.blocks * (200_000 + 800_000 * share) / 1e9 + 350_000 / 1e9 for share in (1 / 4, 7 / 16))
    assert plan.circuit_s == pytest.approx(one)
    assert batched_tokens_per_s(plan, alone, SPARSE, 1, 2) == pytest.approx(1 / one)
    assert batched_tokens_per_s(plan, alone, SPARSE, 2, 2) == pytest.approx(2 / two)
    # Arithmetic is done with the experts a row goes through, however many are read.
    slow = [replace(alone[0], flops=1e9)]
    computed = 2 * (MODEL.blocks * 400_000 + 350_000) / 2 * 2 / 1e9
    assert batched_tokens_per_s(plan, slow, SPARSE, 2, 2) == pytest.approx(2 / min(computed, 2 * one))
