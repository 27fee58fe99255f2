"""The punch schedule, rate limit, round-trip estimate and keepalive."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.schedule import (
    KEEPALIVE_S,
    MIN_KEEPALIVE_S,
    PUNCH_OFFSETS_S,
    PUNCH_WINDOW_S,
    Keepalive,
    RateLimit,
    RoundTrip,
)
from tests.nat.pair import most_in_a_second


def test_the_punch_schedule_is_the_design_s() -> None:
    assert PUNCH_OFFSETS_S[:6] == (0.0, 0.02, 0.06, 0.14, 0.3, 0.62)
    later = [b - a for a, b in pairwise(PUNCH_OFFSETS_S[5:])]
    assert all(abs(gap - 0.5) < 1e-9 for gap in later)
    assert PUNCH_WINDOW_S - 0.5 < PUNCH_OFFSETS_S[-1] <= PUNCH_WINDOW_S


@given(st.lists(st.floats(0, 0.2), max_size=400), st.integers(1, 100))
def test_the_rate_limit_holds_in_every_second(gaps: list[float], limit: int) -> None:
    now, taken, bucket = 0.0, list[float](), RateLimit(limit)
    for gap in gaps:
        now += gap
        if bucket.take(now):
            taken.append(now)
        else:
            assert bucket.ready_at() > now, "refused although it was ready"
    assert most_in_a_second(taken) <= limit


@given(st.lists(st.floats(1e-4, 2.0), min_size=1, max_size=50))
def test_the_round_trip_stays_within_what_was_measured(samples: list[float]) -> None:
    trip = RoundTrip()
    for sample in samples:
        trip.measured(sample)
    assert trip.smoothed_s is not None
    assert min(samples) - 1e-9 <= trip.smoothed_s <= max(samples) + 1e-9
    assert trip.pto_s > trip.smoothed_s


def test_a_steady_round_trip_tightens_the_timeout() -> None:
    trip = RoundTrip()
    trip.measured(0.1)
    first = trip.pto_s
    for _ in range(30):
        trip.measured(0.1)
    assert trip.pto_s < first
    assert trip.pto_s < 0.11


@given(st.integers(0, 2**32))
def test_keepalives_are_fifteen_plus_minus_three_seconds(seed: int) -> None:
    assert 12.0 <= Keepalive().jittered_s(random.Random(seed)) <= 18.0


@given(st.lists(st.floats(0, 100), max_size=10))
def test_keepalives_only_shorten_and_have_a_floor(idle: list[float]) -> None:
    keepalive = Keepalive()
    for idle_s in idle:
        before = keepalive.interval_s
        shortened = keepalive.forgotten_after(idle_s)
        assert shortened == (keepalive.interval_s < before)
        assert MIN_KEEPALIVE_S <= keepalive.interval_s <= KEEPALIVE_S
        assert keepalive.interval_s <= max(MIN_KEEPALIVE_S, idle_s / 2)
