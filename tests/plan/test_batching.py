"""Rates with shared batches: against hand-made rings, and bounded by what the paper's formula and one user give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.plan import KnownEdge, Member, ModelManifest, Plan, Workload, plan_session
from kafila.plan.batching import batched_tokens_per_s
from kafila.types import NatClass, PathKind

MANIFEST = ModelManifest("model", 10, 1_000_000, 500_000, 400_000, 10, 100, 4096)


def member(name: str, bandwidth: float, flops: float | None) -> Member:
    return Member(name, 10**9, bandwidth, 0.0, flops, 0.01, NatClass.PERMISSIVE)


def ring(members: list[Member], edge_s: float = 0.0) -> Plan:
    edges = {(0, 1): KnownEdge(PathKind.DIRECT, 2 * edge_s)}
    plan = plan_session(members, MANIFEST, Workload(10, 1), anchor=0, edges=edges if len(members) > 1 else {})
    assert isinstance(plan, Plan)
    return plan


def test_where_reading_takes_the_time_a_batch_of_four_is_four_times_as_much() -> None:
    alone = [member("a", 1e9, 1e15)]
    plan = ring(alone)
    assert batched_tokens_per_s(plan, alone, MANIFEST, 1, 2) == pytest.approx(1 / 0.0104)
    assert batched_tokens_per_s(plan, alone, MANIFEST, 4, 2) == pytest.approx(4 / 0.0104)


def test_where_arithmetic_takes_the_time_it_is_not() -> None:
    # Two operations a weight of two bytes: as many operations a row as bytes, so two rows take as long as reading.
    alone = [member("a", 1e9, 2e9)]
    assert batched_tokens_per_s(ring(alone), alone, MANIFEST, 4, 2) == pytest.approx(4 / 0.0208)
    unmeasured = [member("a", 1e9, None)]
    assert batched_tokens_per_s(ring(unmeasured), unmeasured, MANIFEST, 4, 2) == pytest.approx(1 / 0.0104)


def test_without_a_price_there_is_no_rate() -> None:
    alone = [member("a", 1e9, 1e12)]
    unknown = replace(alone[0], bandwidth_bytes_per_s=None)
    plan = plan_session([unknown], MANIFEST, Workload(10, 1), anchor=0)
    assert isinstance(plan, Plan)
    assert batched_tokens_per_s(plan, [unknown], MANIFEST, 4, 2) is None


@given(st.floats(1e8, 1e10), st.floats(1e8, 1e10), st.floats(1e9, 1e13), st.floats(0, 0.05), st.integers(1, 9))
def test_batches_never_lose_to_one_by_one_nor_beat_users_times_one(
    one: float, other: float, flops: float, edge_s: float, users: int
) -> None:
    members = [member("a", one, flops), member("b", other, flops)]
    plan = ring(members, edge_s)
    rate = batched_tokens_per_s(plan, members, MANIFEST, users, 2)
    single, circuit_s = plan.tokens_per_s(users), plan.circuit_s
    assert rate is not None
    assert single is not None
    assert circuit_s is not None
    if flops > 2 * max(one, other):  # one row is read, not computed
        assert rate >= single * (1 - 1e-9)
    assert rate <= users / circuit_s * (1 + 1e-9)
