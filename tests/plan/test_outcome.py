"""A plan as JSON: round trips, old files, and everything that is not a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.plan import Allocation, KnownEdge, Objective, Plan, Workload, plan_session
from kafila.types import PathKind
from tests.plan.oracles import MODEL, member, member_lists

FIRST = Path(__file__).parent / "data" / "plan-v1.json"
"""A plan as version 1 wrote it. This file is never regenerated: plans of that version must stay readable."""


def example() -> Plan:
    members = [
        member("tower", bandwidth=9e8, memory_bytes=9_500_000),
        member("laptop", bandwidth=1e8),
        member("slow", bandwidth=1e7),
    ]
    edges = {(0, 1): KnownEdge(PathKind.RELAYED, 0.04)}
    plan = plan_session(members, MODEL, Workload(1024, 2), anchor=1, users=1, objective="throughput", edges=edges)
    assert isinstance(plan, Plan)
    return replace(plan, scored_percent=40)


@given(member_lists(), st.sampled_from(Objective), st.sampled_from(["kafila", "uniform", "memory"]))
def test_a_plan_survives_json(members: list[Any], objective: Objective, allocation: str) -> None:
    plan = plan_session(members, MODEL, Workload(1024, 2), anchor=0, objective=objective, allocation=allocation)
    if isinstance(plan, Plan):
        assert Plan.from_json(plan.to_json()) == plan


def test_plans_without_predictions_survive_too() -> None:
    members = [member("a", bandwidth=None, rtt_s=None), member("b")]
    plan = plan_session(members, MODEL, Workload(1024, 2), anchor=0)
    assert isinstance(plan, Plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_of_version_1_is_still_understood() -> None:
    plan = Plan.from_json(FIRST.read_text(encoding="utf-8"))
    assert plan.model == "toy"
    assert plan.names == ("laptop", "tower")
    assert plan.counts == (1, 7)
    assert (plan.objective, plan.allocation) == (Objective.THROUGHPUT, Allocation.KAFILA)
    assert [edge.kind for edge in plan.edges] == [PathKind.RELAYED, PathKind.RELAYED]
    assert plan.tokens_per_s(1) == pytest.approx(16.3, abs=0.05)
    assert plan.scored_percent == 0


def test_fields_that_a_later_version_adds_are_ignored() -> None:
    record = json.loads(example().to_json())
    record["weather"] = "fine"
    record["stages"][0]["mood"] = {"a": [1]}
    assert Plan.from_json(json.dumps(record)) == example()


def test_a_later_version_is_refused_in_words() -> None:
    record = json.loads(example().to_json())
    record["version"] += 1
    with pytest.raises(ProtocolError, match="newer"):
        Plan.from_json(json.dumps(record))


@pytest.mark.parametrize("text", ["", "plan", "[]", "null", "3", "{}", '{"version": true}', "[" * 100_000, "\x00"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        Plan.from_json(text)


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths(inner, (*path, key))
    return found


PATHS = paths(json.loads(example().to_json()))


@given(
    st.sampled_from(PATHS),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2)
    | st.just({})
    | st.just(10**400),
)
def test_one_wrong_field_is_refused_or_makes_another_plan_but_never_raises_otherwise(
    path: tuple[Any, ...], value: object
) -> None:
    record = json.loads(example().to_json())
    inside = record
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    try:
        plan = Plan.from_json(json.dumps(record))
    except ProtocolError:
        return
    # What was believed is consistent: the blocks are covered and the derived figures can be had.
    assert sum(plan.counts) == plan.blocks
    assert len(plan.edges) in {0, len(plan.stages)}
    assert (plan.utilisation or 1) > 0
    plan.tokens_per_s(plan.users)


@given(st.sampled_from(PATHS))
def test_every_missing_field_is_refused(path: tuple[Any, ...]) -> None:
    record = json.loads(example().to_json())
    inside = record
    for key in path[:-1]:
        inside = inside[key]
    if isinstance(inside, list) and path[0] in {"guests", "alternatives"}:
        return  # a shorter list of these is a plan
    if path == ("scored_percent",):
        return  # of a writer that did not know it: 0
    del inside[path[-1]]
    with pytest.raises(ProtocolError):
        Plan.from_json(json.dumps(record))


@pytest.mark.parametrize("percent", [0, 100, -1, 101, 10**30, 5.0, True, None, "5"])
def test_a_part_of_the_vocabulary_is_a_percentage(percent: object) -> None:
    record = json.loads(example().to_json())
    record["scored_percent"] = percent
    if percent in {0, 100} and percent is not True:
        assert Plan.from_json(json.dumps(record)).scored_percent == percent
    else:
        with pytest.raises(ProtocolError, match="scored_percent"):
            Plan.from_json(json.dumps(record))


def test_in_a_ring_of_one_nobody_else_scores() -> None:
    plan = plan_session([member("only")], MODEL, Workload(1024, 2), anchor=0)
    assert isinstance(plan, Plan)
    with pytest.raises(ProtocolError, match="scored_percent"):
        Plan.from_json(replace(plan, scored_percent=40).to_json())


@given(st.text(max_size=40))
def test_arbitrary_text_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        Plan.from_json(text)


def test_all_blocks_must_be_held() -> None:
    record = json.loads(example().to_json())
    record["blocks"] += 1
    with pytest.raises(ProtocolError, match="stages"):
        Plan.from_json(json.dumps(record))


def test_blocks_must_follow_one_another() -> None:
    record = json.loads(example().to_json())
    record["stages"][1]["blocks"]["first"] += 1
    with pytest.raises(ProtocolError, match="stages"):
        Plan.from_json(json.dumps(record))
