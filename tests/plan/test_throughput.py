"""The fastest ring, against every subset, head and division."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from kafila.plan import throughput
from kafila.plan.circuits import NEVER, FixedRing, FreeRing
from kafila.plan.cost import Device
from kafila.plan.placement import Placement, token_ticks
from kafila.plan.throughput import fastest_rings
from tests.plan.oracles import device_lists, divisions, least_token_ticks, symmetric_weights


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[Device], list[list[int]]]:
    devices = draw(device_lists())
    return draw(st.integers(1, 7)), devices, draw(symmetric_weights(len(devices)))


def fastest(
    world: tuple[int, list[Device], list[list[int]]], users: int, *, subsets_limit: int, anchor_serves: bool = False
) -> Placement | None:
    with patch.object(throughput, "SUBSETS_LIMIT", subsets_limit):
        return fastest_rings(*world, {users}, anchor_serves=anchor_serves).get(users)


@given(worlds(), st.integers(1, 5), st.booleans(), st.sampled_from([0, 8]))
def test_the_time_per_token_is_the_least_there_is(
    world: tuple[int, list[Device], list[list[int]]], users: int, anchor_serves: bool, subsets_limit: int
) -> None:
    placement = fastest(world, users, subsets_limit=subsets_limit, anchor_serves=anchor_serves)
    blocks, devices, latencies = world
    least = least_token_ticks(blocks, devices, latencies, users, anchor_serves=anchor_serves)
    assert (None if placement is None else token_ticks(placement, devices, latencies, users)) == least


@given(worlds(), st.integers(1, 5), st.booleans(), st.sampled_from([0, 8]))
def test_every_block_is_placed_once_and_no_limit_is_exceeded(
    world: tuple[int, list[Device], list[list[int]]], users: int, anchor_serves: bool, subsets_limit: int
) -> None:
    placement = fastest(world, users, subsets_limit=subsets_limit, anchor_serves=anchor_serves)
    if placement is None:
        return
    assert sum(placement.counts) == world[0]
    assert placement.counts[placement.head] >= 1
    assert not anchor_serves or placement.counts[0] >= 1
    for place, (count, device) in enumerate(zip(placement.counts, world[1], strict=True)):
        assert count <= (device.head_limit if place == placement.head else device.limit)


@given(worlds(), st.integers(0, 80) | st.none())
def test_a_fixed_ring_is_the_shortest_of_its_members_under_any_bound(
    world: tuple[int, list[Device], list[list[int]]], bound: int | None
) -> None:
    blocks, devices, latencies = world
    ring = FixedRing(blocks, range(len(devices)), devices, latencies)
    stages = [device.stage(is_head=not place) for place, device in enumerate(devices)]
    network = sum(latencies[place][(place + 1) % len(devices)] for place in range(len(devices)))
    found = [
        network + sum(costs)
        for counts in divisions(blocks, len(devices))
        if all(count <= stage.limit for count, stage in zip(counts, stages, strict=True))
        for costs in [[stage.fixed + count * stage.per_block for count, stage in zip(counts, stages, strict=True)]]
        if bound is None or max(costs) <= bound
    ]
    assert ring.shortest(bound) == min(found, default=NEVER)


@given(worlds(), st.integers(0, 80) | st.none(), st.data())
def test_a_free_ring_gives_the_placement_it_promises(
    world: tuple[int, list[Device], list[list[int]]], bound: int | None, data: st.DataObject
) -> None:
    blocks, devices, latencies = world
    head = data.draw(st.integers(0, len(devices) - 1))
    ring = FreeRing(blocks, head, devices, latencies, anchor_serves=data.draw(st.booleans()))
    ticks = ring.shortest(bound)
    if ticks < NEVER:
        placement = ring.placement(bound)
        # For one user the circuit alone counts.
        assert token_ticks(placement, devices, latencies, 1) == ticks


def test_a_known_ring_wins_a_tie() -> None:
    device = Device(overhead=0, per_block=1, head_read=0, limit=2, head_limit=2)
    known = Placement(0, (1, 1))
    assert fastest_rings(2, [device] * 2, [[0, 0], [0, 0]], {1}, known=[known]) == {1: known}


def test_several_numbers_of_users_are_answered_at_once() -> None:
    fast = Device(overhead=1, per_block=1, head_read=1, limit=8, head_limit=8)
    latencies = [[0, 3], [3, 0]]
    found = fastest_rings(8, [fast, fast], latencies, {1, 8})
    assert sorted(found) == [1, 8]
    assert sorted(found[1].counts) == [0, 8]
    assert sorted(found[8].counts) == [4, 4]
