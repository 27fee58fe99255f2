"""Algorithm 1 against every contiguous division."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafila.plan.cost import StageCost
from kafila.plan.partition import fill, partition
from tests.plan.oracles import bottleneck, least_bottleneck

stages = st.lists(
    st.builds(StageCost, fixed=st.integers(0, 12), per_block=st.integers(1, 9), limit=st.integers(0, 8)),
    min_size=1,
    max_size=4,
)


@given(st.integers(1, 9), stages)
def test_the_bottleneck_is_the_least_of_all_divisions_and_a_division_is_found_whenever_there_is_one(
    blocks: int, devices: list[StageCost]
) -> None:
    division = partition(blocks, devices)
    least = least_bottleneck(blocks, devices)
    assert (None if division is None else division.bottleneck) == least


@given(st.integers(1, 9), stages)
def test_every_block_is_placed_once_within_limits_and_nobody_goes_without(
    blocks: int, devices: list[StageCost]
) -> None:
    division = partition(blocks, devices)
    if division is not None:
        assert sum(division.counts) == blocks
        assert all(1 <= count <= stage.limit for count, stage in zip(division.counts, devices, strict=True))
        assert bottleneck(division.counts, devices) == division.bottleneck


@given(st.integers(1, 9), stages, st.integers(0, 100))
def test_feasibility_is_monotone_in_the_bound(blocks: int, devices: list[StageCost], bound: int) -> None:
    if fill(blocks, devices, bound) is not None:
        assert fill(blocks, devices, bound + 1) is not None


@given(st.integers(1, 9), stages, st.integers(2, 5))
def test_slower_by_a_factor_is_slower_by_that_factor(blocks: int, devices: list[StageCost], factor: int) -> None:
    slower = [StageCost(stage.fixed * factor, stage.per_block * factor, stage.limit) for stage in devices]
    before, after = partition(blocks, devices), partition(blocks, slower)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.bottleneck == before.bottleneck * factor
        assert after.counts == before.counts


@given(st.integers(1, 9), stages, st.data())
def test_more_room_or_speed_never_hurts(blocks: int, devices: list[StageCost], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(devices) - 1))
    fixed, per_block, limit = devices[place]
    better = StageCost(
        data.draw(st.integers(0, fixed)), data.draw(st.integers(1, per_block)), data.draw(st.integers(limit, 9))
    )
    before = partition(blocks, devices)
    after = partition(blocks, [*devices[:place], better, *devices[place + 1 :]])
    if before is not None:
        assert after is not None
        assert after.bottleneck <= before.bottleneck


def test_a_bound_that_is_a_stage_cost_is_met_by_that_stage() -> None:
    # In floating point 0.1 + 3 * 0.1 - 0.1 over 0.1 is 2.9999999999999996 blocks.
    stage = StageCost(fixed=100_000_000_000_000, per_block=100_000_000_000_001, limit=9)
    assert fill(3, [stage], stage.fixed + 3 * stage.per_block) == (3,)


def test_more_devices_than_blocks_is_infeasible() -> None:
    assert partition(2, [StageCost(0, 1, 9)] * 3) is None
