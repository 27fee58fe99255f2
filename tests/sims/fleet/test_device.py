"""The roofline: a token takes its bytes' time, a chunk its arithmetic's."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kafila.types import ExpertBytes, Segment
from sims.fleet.device import Device, draw_device
from sims.fleets import load_fleet
from sims.models import load_model

MODEL = load_model("Qwen3-8B")
DEVICE = Device(24 * 10**9, 400e9, 500e9, 50e-6, 100e12)


def decode(count: int, start: int = 0) -> list[Segment]:
    return [Segment(slot, start, 1, True) for slot in range(count)]


def test_a_token_takes_equation_2() -> None:
    taken = DEVICE.forward_s(MODEL, 10, decode(1), 2)
    cache = 10 * MODEL.kv_bytes_per_token_per_block
    assert taken == pytest.approx(50e-6 + (10 * MODEL.block_bytes + cache) / 500e9)
    assert DEVICE.sample_s(MODEL, 1, 2) == pytest.approx(MODEL.head_read_bytes / 500e9)
    assert DEVICE.sample_s(MODEL, 0, 2) == 0
    assert DEVICE.sample_s(MODEL, 1, 2, percent=40) == pytest.approx(0.4 * MODEL.head_read_bytes / 500e9)
    assert DEVICE.sample_s(MODEL, 400, 2, percent=40) == pytest.approx(0.4 * DEVICE.sample_s(MODEL, 400, 2))


def test_a_batch_costs_little_more_until_arithmetic_takes_over() -> None:
    one, four, many = (DEVICE.forward_s(MODEL, 10, decode(count), 2) for count in (1, 4, 400))
    assert one < four < 1.01 * one
    assert many == pytest.approx(50e-6 + 400 * 10 * MODEL.block_bytes / 100e12)
    assert many > 1.9 * one


def test_of_experts_those_are_read_that_the_rows_go_through() -> None:
    experts = ExpertBytes(count=4, active=1, shared_bytes=MODEL.block_bytes // 2, expert_bytes=MODEL.block_bytes // 2)
    sparse = replace(MODEL, experts=experts)
    cache = 10 * MODEL.kv_bytes_per_token_per_block
    for rows, share in ((1, 5 / 8), (2, 23 / 32)):
        taken = DEVICE.forward_s(sparse, 10, decode(rows), 2)
        assert taken == pytest.approx(50e-6 + (10 * MODEL.block_bytes * share + rows * cache) / 500e9)


def test_a_prompt_is_computed_and_its_cache_is_read_ever_after() -> None:
    chunk = DEVICE.forward_s(MODEL, 10, [Segment(0, 0, 1000, True)], 2)
    assert chunk == pytest.approx(50e-6 + 1000 * 10 * MODEL.block_bytes / 100e12)
    early, late = (DEVICE.forward_s(MODEL, 10, decode(1, start), 2) for start in (0, 4000))
    assert late - early == pytest.approx(4000 * 10 * MODEL.kv_bytes_per_token_per_block / 500e9)


def test_wider_numbers_mean_fewer_operations_a_byte() -> None:
    rows = [Segment(0, 0, 2000, False)]
    half = DEVICE.forward_s(MODEL, 10, rows, 4) - DEVICE.overhead_s
    assert half == pytest.approx((DEVICE.forward_s(MODEL, 10, rows, 2) - DEVICE.overhead_s) / 2)


def test_probed_and_served_are_two_draws_of_the_measured_range() -> None:
    fleet = load_fleet("lan")
    draws = [draw_device(fleet.members[3], fleet.bandwidths[3], 1.2, Random(seed)) for seed in range(200)]
    assert all(89e9 <= (draw.probed_bytes_per_s or 0) <= 124e9 for draw in draws)
    assert all(1.2 * 89e9 <= draw.served_bytes_per_s <= 1.2 * 124e9 for draw in draws)
    assert len({draw.served_bytes_per_s / (draw.probed_bytes_per_s or 1) for draw in draws}) == 200


def test_a_device_that_could_not_be_measured_still_takes_its_time() -> None:
    member = load_fleet("lan").members[0]
    unmeasured = draw_device(member, None, 1.0, Random(0))
    assert unmeasured.probed_bytes_per_s is None
    assert unmeasured.served_bytes_per_s == pytest.approx((member.flops or 0) / 50)
