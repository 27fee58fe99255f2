"""Equation (2) and the tiers."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.plan.cost import Limits, Tier, best_tier, price, read_ticks, to_seconds, to_ticks
from tests.plan.oracles import MODEL, member

LIMITS = Limits(plain=5, head=3)


def test_a_stage_costs_its_overhead_its_blocks_and_at_the_head_what_the_head_reads() -> None:
    device = price(member(bandwidth=1e9, overhead_s=5e-5), MODEL, LIMITS, Tier.COST)
    assert device is not None
    plain, head = device.stage(is_head=False), device.stage(is_head=True)
    assert to_seconds(plain.fixed) == pytest.approx(5e-5)
    assert to_seconds(plain.per_block) == pytest.approx(MODEL.block_bytes / 1e9)
    # The embedding is resident but not read: only head_read_bytes cost time.
    assert to_seconds(head.fixed) == pytest.approx(5e-5 + MODEL.head_read_bytes / 1e9)
    assert head.per_block == plain.per_block
    assert (plain.limit, head.limit) == (5, 3)


@pytest.mark.parametrize(("rate", "used"), [(4e9, 4e9), (None, 1e9), (0.0, 1e9), (nan, 1e9), (inf, 1e9)])
def test_the_head_is_read_at_its_own_rate_where_that_was_measured(rate: float | None, used: float) -> None:
    device = price(member(bandwidth=1e9, overhead_s=5e-5, head_rate=rate), MODEL, LIMITS, Tier.COST)
    assert device is not None
    assert to_seconds(device.head_read) == pytest.approx(MODEL.head_read_bytes / used)
    assert to_seconds(device.per_block) == pytest.approx(MODEL.block_bytes / 1e9)


def test_by_arithmetic_throughput_only_ratios_are_told_and_the_head_is_free() -> None:
    slow = price(member(flops=1e12), MODEL, LIMITS, Tier.FLOPS)
    fast = price(member(flops=4e12), MODEL, LIMITS, Tier.FLOPS)
    assert slow is not None
    assert fast is not None
    assert slow.per_block == 4 * fast.per_block
    assert slow.stage(is_head=True).fixed == slow.stage(is_head=False).fixed == 0


def test_nothing_is_priced_by_memory() -> None:
    assert price(member(), MODEL, LIMITS, Tier.MEMORY) is None


@pytest.mark.parametrize("bandwidth", [None, 0.0, -1.0, nan, inf])
def test_a_member_without_a_usable_bandwidth_lowers_the_tier(bandwidth: float | None) -> None:
    failed = member(bandwidth=bandwidth)
    assert not failed.priced
    assert best_tier([member(), failed]) is Tier.MEMORY
    assert best_tier([member(flops=1e12), replace(failed, flops=2e12)]) is Tier.FLOPS
    assert best_tier([member(flops=1e12), failed]) is Tier.MEMORY


@pytest.mark.parametrize("overhead_s", [None, -1e-6, nan])
def test_a_member_without_an_overhead_is_not_priced_either(overhead_s: float | None) -> None:
    assert not member(overhead_s=overhead_s).priced
    assert member(overhead_s=0.0).priced


@given(st.floats(0, 1e6))
def test_ticks_are_the_nearest(seconds: float) -> None:
    assert to_seconds(to_ticks(seconds)) == pytest.approx(seconds, rel=1e-12, abs=0.5e-15)


@given(st.integers(0, 10**13), st.floats(1e-3, 1e15))
def test_no_block_is_ever_free(size_bytes: int, bytes_per_s: float) -> None:
    ticks = read_ticks(size_bytes, bytes_per_s)
    assert ticks >= 1
    assert to_seconds(ticks) == pytest.approx(size_bytes / bytes_per_s, rel=1e-12, abs=1e-15)
