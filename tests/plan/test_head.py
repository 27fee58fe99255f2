"""Head placement by rotation, with its margin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafila.plan.cost import Device
from kafila.plan.head import place_head
from kafila.plan.placement import hops, stage_ticks
from tests.plan.oracles import device_lists, least_bottleneck


@given(st.integers(1, 8), device_lists())
def test_without_a_margin_the_bottleneck_is_the_least_over_heads_and_divisions(
    blocks: int, devices: list[Device]
) -> None:
    placement = place_head(blocks, devices, 0)
    by_head = [
        least_bottleneck(blocks, [device.stage(is_head=place == head) for place, device in enumerate(devices)])
        for head in range(len(devices))
    ]
    least = min((value for value in by_head if value is not None), default=None)
    assert (None if placement is None else max(stage_ticks(placement, devices))) == least


@given(st.integers(1, 8), device_lists())
def test_every_block_is_placed_once_and_no_limit_is_exceeded(blocks: int, devices: list[Device]) -> None:
    placement = place_head(blocks, devices, 0.05)
    if placement is not None:
        assert sum(placement.counts) == blocks
        for place, (count, device) in enumerate(zip(placement.counts, devices, strict=True)):
            assert 1 <= count <= (device.head_limit if place == placement.head else device.limit)


@given(st.integers(1, 8), device_lists(), st.floats(0, 0.5))
def test_the_anchor_keeps_the_head_unless_beaten_by_more_than_the_margin(
    blocks: int, devices: list[Device], margin: float
) -> None:
    kept = place_head(blocks, devices, 0, fixed=True)
    best = place_head(blocks, devices, 0)
    chosen = place_head(blocks, devices, margin)
    if kept is None or best is None:
        assert chosen == best
        return
    anchor_ticks, best_ticks = max(stage_ticks(kept, devices)), max(stage_ticks(best, devices))
    assert chosen == (best if best_ticks < anchor_ticks * (1 - margin) else kept)


@given(device_lists(least=2))
def test_rotation_leaves_the_edges_alone(devices: list[Device]) -> None:
    roomy = [device._replace(limit=8, head_limit=8) for device in devices]
    ring = set(hops(range(len(devices))))
    for head in range(len(devices)):
        best = place_head(8, [*roomy[head:], *roomy[:head]], 0)
        assert best is not None
        assert set(hops([(place + head) % len(devices) for place in best.circuit])) == ring


def test_the_head_moves_where_the_anchor_has_no_room_for_it() -> None:
    anchor = Device(overhead=0, per_block=1, head_read=1, limit=4, head_limit=0)
    other = Device(overhead=0, per_block=5, head_read=5, limit=4, head_limit=4)
    placement = place_head(4, [anchor, other], 0.05)
    assert placement is not None
    assert placement.head == 1
    assert place_head(4, [anchor, other], 0.05, fixed=True) is None


def test_a_gain_of_exactly_the_margin_moves_nothing() -> None:
    # One block each; the head costs 100 at the anchor and 75 at the other: a quarter less, and not more than a quarter.
    anchor = Device(overhead=0, per_block=50, head_read=50, limit=1, head_limit=1)
    other = Device(overhead=0, per_block=50, head_read=25, limit=1, head_limit=1)
    for margin, head in ((0.0, 1), (0.24, 1), (0.25, 0)):
        placement = place_head(2, [anchor, other], margin)
        assert placement is not None
        assert placement.head == head
