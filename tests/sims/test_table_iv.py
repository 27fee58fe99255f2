"""The paper's Section VII-B from the planner alone: Table II's midpoints, 50 us of overhead, 4 requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafila.plan import Allocation, Declined, Plan, Workload, plan_session
from sims.fleets import Fleet, load_fleet
from sims.models import load_model
from sims.table_iv import Figures, compare, figures, layout, paper_cells, paper_models

WORKLOAD = Workload(context=4096, concurrency=4)
NATIVE = Workload(context=32768, concurrency=4)
"""Qwen3's native context. The paper does not say how much cache it reserved; its two refusals imply this, see below."""

KAFILA_ROWS = [(fleet, model) for fleet, model, allocation in paper_cells() if allocation is Allocation.KAFILA]


def plan(fleet: Fleet, model: str, workload: Workload = WORKLOAD, **options: object) -> Plan | Declined:
    return plan_session(fleet.members, load_model(model), workload, anchor=fleet.host, edges=fleet.edges, **options)  # type: ignore[arg-type]  # options are plan_session's own


def planned(fleet: str, model: str, **options: object) -> Plan:
    outcome = plan(load_fleet(fleet), model, WORKLOAD, **options)
    assert isinstance(outcome, Plan)
    return outcome


def test_there_are_seven_rows() -> None:
    assert len(KAFILA_ROWS) == 7
    assert paper_models("us-central") == ["Qwen3-8B", "Qwen3-14B", "Qwen3-32B"]
    assert paper_models("elsewhere") == []


@pytest.mark.parametrize(("fleet", "model"), KAFILA_ROWS)
def test_kafilas_bottleneck_is_the_papers_within_12_percent_or_below(fleet: str, model: str) -> None:
    papers = paper_cells()[fleet, model, Allocation.KAFILA]
    assert papers is not None
    assert (planned(fleet, model).bottleneck_s or 0) * 1e3 <= papers.bottleneck_ms * 1.12


@pytest.mark.parametrize(("fleet", "model"), KAFILA_ROWS)
def test_nine_tenths_of_the_hardware_works(fleet: str, model: str) -> None:
    assert (planned(fleet, model).utilisation or 0) >= 0.90


@pytest.mark.parametrize(
    ("fleet", "model", "gain", "ring"),
    [
        ("lan", "Qwen3-8B", 1.5, {"L40S"}),
        ("us-central", "Qwen3-32B", 1.5, {"A100"}),
        ("intercontinental", "Qwen3-32B", 3.0, {"RTX 5090", "A100", "RTX 3090"}),
    ],
)
def test_for_one_user_the_fullest_ring_is_not_the_fastest(fleet: str, model: str, gain: float, ring: set[str]) -> None:
    whole = planned(fleet, model, users=1)
    fast = planned(fleet, model, users=1, objective="throughput")
    assert (fast.tokens_per_s(1) or 0) >= gain * (whole.tokens_per_s(1) or 0)
    assert set(fast.names) == ring


@pytest.mark.parametrize(("fleet", "model"), KAFILA_ROWS)
def test_on_the_papers_network_the_rate_is_near_the_papers(fleet: str, model: str) -> None:
    found = load_fleet(fleet, "paper") if fleet == "intercontinental" else load_fleet(fleet)
    papers = paper_cells()[fleet, model, Allocation.KAFILA]
    outcome = plan(found, model)
    assert isinstance(outcome, Plan)
    assert papers is not None
    assert outcome.tokens_per_s(1) == pytest.approx(papers.tokens_per_s, rel=0.15)


# What cache was reserved in the paper? It refuses two divisions for memory: the uniform one of Qwen3-32B on the
# intercontinental fleet, for its 18 GB laptop (12 blocks; 13 in the order of the paper's network), and that of
# Qwen3-14B on the LAN fleet, for its 12 GB card (10 blocks). With four requests the first is declined from 27,454
# tokens of context (20,764 with 13 blocks), the second from 29,259. So 4,096 is not it, and Qwen3's native 32,768 gives
# both refusals and every other cell of the table.


@pytest.mark.parametrize(
    ("fleet", "model", "who", "least"),
    [("intercontinental", "Qwen3-32B", "M3 Pro", 27_454), ("lan", "Qwen3-14B", "A40", 29_259)],
)
def test_the_papers_refusals_begin_at_a_context_that_can_be_told(fleet: str, model: str, who: str, least: int) -> None:
    found = load_fleet(fleet)
    for workload in (Workload(least, 4), NATIVE):
        outcome = plan(found, model, workload, allocation="uniform")
        assert isinstance(outcome, Declined)
        assert outcome.who == who
        assert isinstance(plan(found, model, workload), Plan)
    assert isinstance(plan(found, model, Workload(least - 1, 4), allocation="uniform"), Plan)


@pytest.mark.parametrize("network", ["paper", None])
def test_at_the_native_context_the_table_has_the_papers_cells(network: str | None) -> None:
    for (fleet, model, allocation), papers in paper_cells().items():
        found = load_fleet(fleet, network if fleet == "intercontinental" else None)
        outcome = plan(found, model, NATIVE, allocation=allocation)
        assert isinstance(outcome, Plan) == (papers is not None)


def test_the_laptops_memory_shares_are_those_of_three_quarters_of_its_memory() -> None:
    for (fleet, model, allocation), papers in paper_cells().items():
        if allocation is not Allocation.MEMORY or fleet != "intercontinental" or papers is None:
            continue
        found = load_fleet(fleet)
        members = tuple(
            replace(one, memory_bytes=13_500_000_000) if one.name == "M3 Pro" else one for one in found.members
        )
        outcome = plan(replace(found, members=members), model, allocation="memory")
        assert isinstance(outcome, Plan)
        assert (outcome.bottleneck_s or 0) * 1e3 == pytest.approx(papers.bottleneck_ms, rel=0.10)


def test_the_comparison_prints_ours_and_the_papers() -> None:
    fleet = load_fleet("intercontinental", "paper")
    rows = compare(fleet, [load_model("Qwen3-32B")], NATIVE)
    text = layout(rows)
    assert "Kafila" in text
    assert "(18.1)" in text
    assert "declined: M3 Pro is 2.56 GB too small (infeasible)" in text
    numbers = figures(rows)
    assert numbers["Qwen3-32B_memory_paper_bottleneck_ms"] == 54.6
    assert numbers["Qwen3-32B_kafila_ours_imbalance"] == pytest.approx(1.46, rel=0.05)
    assert "Qwen3-32B_uniform_ours_bottleneck_ms" not in numbers


def test_a_fleet_that_the_paper_does_not_know_is_compared_without_it() -> None:
    fleet = replace(load_fleet("lan"), name="mine")
    rows = compare(fleet, [load_model("Qwen3-8B")], WORKLOAD)
    assert all(row.papers is None and isinstance(row.ours, Figures) for row in rows)
    assert "(" not in layout(rows).replace("(exo)", "").replace("(GPipe)", "")


def test_a_fleet_that_cannot_be_priced_is_compared_in_words() -> None:
    fleet = load_fleet("lan")
    members = tuple(replace(one, bandwidth_bytes_per_s=None) for one in fleet.members)
    rows = compare(replace(fleet, members=members), [load_model("Qwen3-8B")], WORKLOAD)
    assert "not priced" in layout(rows)
