"""Refusals name who, how much, and only remedies that are enough."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.plan import Declined, Member, ModelManifest, Plan, Workload, plan_session
from tests.plan.oracles import MODEL, member, member_lists

WORKLOAD = Workload(context=1024, concurrency=4)
BLOCK = MODEL.block_bytes + 1024 * 4 * MODEL.kv_bytes_per_token_per_block


def declined(members: list[Member], manifest: ModelManifest = MODEL, **options: object) -> Declined:
    outcome = plan_session(members, manifest, WORKLOAD, anchor=0, headroom=0, **options)  # type: ignore[arg-type]  # options are plan_session's own
    assert isinstance(outcome, Declined)
    return outcome


def test_a_member_too_small_for_its_uniform_share_is_named_with_the_bytes_it_lacks() -> None:
    members = [member("tower"), member("laptop", memory_bytes=4 * BLOCK - 7)]
    outcome = declined(members, allocation="uniform")
    assert outcome.who == "laptop"
    assert outcome.shortfall_bytes == 7
    assert "laptop" in outcome.message
    assert "4 blocks" in outcome.message
    assert "Kafila's own division, which fits" in outcome.remedies


def test_everybody_too_small_is_listed_and_the_worst_named() -> None:
    members = [member("a"), member("b", memory_bytes=1), member("c", memory_bytes=2)]
    outcome = declined(members, allocation="uniform")
    assert outcome.who == "b"
    assert "too small as well: c" in outcome.message


def test_a_member_that_cannot_hold_a_block_is_named() -> None:
    members = [member("a"), member("tiny", memory_bytes=BLOCK - 1)]
    outcome = declined(members)
    assert (outcome.who, outcome.shortfall_bytes) == ("tiny", 1)
    assert "a ring without tiny" in outcome.remedies
    assert any("throughput objective" in remedy for remedy in outcome.remedies)


def test_a_head_that_fits_nowhere_names_the_roomiest() -> None:
    members = [member("a", memory_bytes=4 * BLOCK), member("b", memory_bytes=5 * BLOCK)]
    model = replace(MODEL, head_bytes=10 * BLOCK)
    outcome = declined(members, model)
    assert outcome.who == "b"
    assert outcome.shortfall_bytes == 11 * BLOCK - 5 * BLOCK


def test_where_the_head_cannot_move_the_opener_is_named() -> None:
    members = [member("opener", memory_bytes=BLOCK, bandwidth=None, flops=1e12), member("b", flops=1e12)]
    outcome = declined(members)
    assert outcome.who == "opener"
    assert "which opened the session" in outcome.message


def test_members_too_small_together_are_told_how_much_the_ring_lacks() -> None:
    members = [member("a", memory_bytes=4 * BLOCK + MODEL.head_bytes), member("b", memory_bytes=3 * BLOCK)]
    outcome = declined(members)
    assert outcome.who == "b"
    assert outcome.shortfall_bytes == BLOCK
    assert "7 of its 8 blocks" in outcome.message


def test_only_a_member_with_room_for_the_head_counts_as_one() -> None:
    members = [member("a", memory_bytes=MODEL.head_bytes), member("b", memory_bytes=8 * BLOCK)]
    outcome = declined(members, objective="throughput")
    assert outcome.shortfall_bytes == BLOCK
    assert "7 of its 8 blocks" in outcome.message


def test_more_members_than_blocks() -> None:
    outcome = declined([member(f"m{number}") for number in range(9)])
    assert outcome.shortfall_bytes == 0
    assert "8 blocks" in outcome.message
    assert outcome.remedies == ("at most 8 members in the ring",)


def test_more_members_than_any_ring() -> None:
    outcome = declined([member(f"m{number}") for number in range(65)])
    assert "64" in outcome.remedies[0]


def test_a_context_beyond_the_model() -> None:
    outcome = plan_session([member()], MODEL, Workload(8193, 1), anchor=0)
    assert isinstance(outcome, Declined)
    assert "8,192" in outcome.message


@given(member_lists(), st.sampled_from(["kafila", "uniform", "memory"]), st.sampled_from(["bottleneck", "throughput"]))
def test_every_remedy_is_enough(members: list[Member], allocation: str, objective: str) -> None:
    workload = Workload(4096, 8)

    def plan(
        members: list[Member], workload: Workload = workload, manifest: ModelManifest = MODEL, **options: object
    ) -> Plan | Declined:
        asked = {"allocation": allocation, "objective": objective, **options}
        return plan_session(members, manifest, workload, anchor=0, **asked)  # type: ignore[arg-type]  # options are plan_session's own

    outcome = plan(members)
    if isinstance(outcome, Plan):
        return
    for remedy in outcome.remedies:
        number = int(re.sub(r"\D", "", remedy.split(" instead")[0]) or 0)
        if "own division" in remedy:
            helped = plan(members, allocation="kafila", objective="bottleneck")
        elif "throughput" in remedy:
            helped = plan(members, allocation="kafila", objective="throughput")
        elif "a ring without" in remedy:
            helped = plan([one for one in members if one.name != outcome.who])
        elif "context" in remedy:
            helped = plan(members, replace(workload, context=number))
        elif "concurrent" in remedy:
            helped = plan(members, replace(workload, concurrency=number))
        elif "one more member" in remedy:
            helped = plan([*members, replace(members[0], name="z", memory_bytes=number * 10**9)])
        else:
            parts = {8: 17, 4: 9}[number]
            smaller = replace(
                MODEL, block_bytes=MODEL.block_bytes * parts // 32, head_bytes=MODEL.head_bytes * parts // 32
            )
            helped = plan(members, manifest=smaller)
        assert isinstance(helped, Plan), remedy


def test_the_largest_context_and_the_most_requests_are_proposed() -> None:
    members = [member("a", memory_bytes=MODEL.head_bytes + MODEL.blocks * (MODEL.block_bytes + 2600 * 100))]
    outcome = declined(members)
    assert "a context of 512 tokens instead of 1,024" in outcome.remedies
    assert "2 concurrent requests instead of 4" in outcome.remedies


@pytest.mark.parametrize("allocation", ["kafila", "uniform", "memory"])
def test_no_memory_at_all(allocation: str) -> None:
    outcome = declined([member("a", memory_bytes=0), member("b", memory_bytes=0)], allocation=allocation)
    assert outcome.shortfall_bytes > 0
