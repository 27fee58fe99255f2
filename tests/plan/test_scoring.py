"""The vocabulary in two parts: brute force over percentages, and what memory allows."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.plan import Member, Plan, Workload, describe, divide_head, plan_session
from kafila.plan.scoring import best_percent
from tests.plan.oracles import MODEL, member


def planned(members: list[Member], **options: object) -> Plan:
    outcome = plan_session(members, MODEL, Workload(1024, 2), anchor=0, **options)  # type: ignore[arg-type]  # options are plan_session's own
    assert isinstance(outcome, Plan)
    return outcome


def two(head: float | None = 1e9, last: float | None = 1e9) -> list[Member]:
    return [member("head", bandwidth=head), member("last", bandwidth=last)]


def with_free(plan: Plan, free_bytes: int) -> Plan:
    """The same with so much left in the last stage's memory."""
    last = plan.stages[-1]
    return replace(
        plan, stages=(*plan.stages[:-1], replace(last, memory_room_bytes=last.memory_used_bytes + free_bytes))
    )


AMPLE = planned(two(), shares=(4, 4))


@pytest.mark.parametrize(
    ("head", "last", "percent"),
    [(1e9, 1e9, 50), (2e9, 1e9, 33), (1e9, 2e9, 66), (1e9, 9e9, 75), (9e9, 1e9, 10), (9.2e9, 1e9, 0), (1e9, 3e9, 75)],
)
def test_rows_are_in_proportion_to_speed(head: float, last: float, percent: int) -> None:
    plan = divide_head(AMPLE, two(head, last), MODEL)
    assert plan.scored_percent == percent
    used = AMPLE.stages[-1].memory_used_bytes + -(-MODEL.head_bytes * percent // 100)
    assert plan.stages[-1].memory_used_bytes == used
    assert replace(plan, stages=AMPLE.stages, scored_percent=0) == AMPLE


def test_the_heads_own_speed_counts_where_it_was_measured() -> None:
    head, last = two()
    assert best_percent(replace(head, head_bytes_per_s=4e9), last) == 20
    assert best_percent(head, replace(last, head_bytes_per_s=2e9)) == 66
    assert best_percent(head, replace(last, head_bytes_per_s=float("nan"))) == 50


@pytest.mark.parametrize("unknown", [None, 0.0, float("inf"), -1.0])
def test_where_a_speed_is_unknown_nothing_is_divided(unknown: float | None) -> None:
    for members in (two(head=unknown), two(last=unknown)):
        assert divide_head(AMPLE, members, MODEL) == AMPLE


def test_a_ring_of_one_has_nobody_to_share_with() -> None:
    alone = planned([member("only")])
    assert divide_head(alone, [member("only")], MODEL) == alone


def test_the_last_of_the_ring_is_not_the_last_of_the_members() -> None:
    members = [member("slow", bandwidth=1e9), member("head", bandwidth=1e9), member("quick", bandwidth=3e9)]
    plan = plan_session(members, MODEL, Workload(1024, 2), anchor=1, shares=(2, 3, 3))
    assert isinstance(plan, Plan)
    assert plan.names == ("head", "quick", "slow")
    assert divide_head(plan, members, MODEL).scored_percent == 50


speeds = st.floats(1e6, 1e12)


@given(speeds, speeds, st.integers(0, 2 * MODEL.head_bytes), st.none() | st.integers(0, 2 * MODEL.head_bytes))
def test_it_is_the_largest_percentage_that_may_be(
    head: float, last: float, free_bytes: int, head_memory_bytes: int | None
) -> None:
    members = two(head, last)
    members[1] = replace(members[1], head_memory_bytes=head_memory_bytes)
    size = MODEL.head_bytes if head_memory_bytes is None else head_memory_bytes
    share = 100 * Fraction(last) / (Fraction(head) + Fraction(last))
    may = [p for p in range(76) if p <= share and -(-size * p // 100) <= free_bytes]
    plan = divide_head(with_free(AMPLE, free_bytes), members, MODEL)
    assert plan.scored_percent == (max(may) if max(may) >= 10 else 0)
    last_stage = plan.stages[-1]
    assert last_stage.memory_used_bytes <= last_stage.memory_room_bytes
    assert last_stage.memory_used_bytes - AMPLE.stages[-1].memory_used_bytes == -(-size * plan.scored_percent // 100)


def test_a_stage_that_is_too_full_already_is_left_as_it_is() -> None:
    full = with_free(AMPLE, -1)
    assert divide_head(full, two(), MODEL) == full


@pytest.mark.parametrize(("vocab", "percent"), [(0, 50), (100, 0), (128, 50), (151_936, 50)])
def test_a_vocabulary_that_cannot_be_cut_is_not(vocab: int, percent: int) -> None:
    # Cuts are at multiples of 64 rows: half of 100 would leave the head none.
    assert divide_head(AMPLE, two(), MODEL, vocab).scored_percent == percent


def test_people_are_told() -> None:
    assert "last scores the last 50% of the vocabulary" in describe(divide_head(AMPLE, two(), MODEL))
    assert "vocabulary" not in describe(AMPLE)
