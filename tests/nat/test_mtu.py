"""The path MTU search against a path that lets through what it lets through."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.candidates import Scope
from kafila.nat.mtu import BASE_BYTES, LOOPBACK_SIZES_BYTES, RAISE_AFTER_BLACK_HOLE_S, WIDE_SIZES_BYTES, MtuSearch

PTO_S = 0.1


def drive(
    search: MtuSearch, now: float, until: float, fits: int, loss: float = 0.0, rng: random.Random | None = None
) -> float:
    """Let the search send what it wants until ``until``; sizes up to ``fits`` are acked 30 ms later. The new time."""
    rng = rng or random.Random(0)
    acks: list[tuple[float, int, int]] = []
    while True:
        due = search.due_at()
        first = min((when for when, _, _ in acks), default=None)
        times = [time for time in (due, first) if time is not None and time <= until]
        if not times:
            return until
        now = max(now, min(times))
        for ack in [ack for ack in acks if ack[0] <= now]:
            acks.remove(ack)
            search.acked(ack[1], ack[2], now)
        through = [size for size in search.take(now, PTO_S) if size <= fits and rng.random() >= loss]
        acks.extend((now + 0.03, size, search.generation) for size in through)


@given(st.sampled_from(Scope), st.integers(1000, 20000), st.sampled_from([0.0, 0.1]), st.integers(0, 2**32))
def test_finds_the_largest_size_that_fits(scope: Scope, fits: int, loss: float, seed: int) -> None:
    search = MtuSearch(scope)
    search.restart(0.0)
    drive(search, 0.0, 5.0, fits, loss, random.Random(seed))
    if fits < BASE_BYTES:
        assert search.failed
        assert search.confirmed_bytes == 0
        return
    assert not search.failed
    assert BASE_BYTES <= search.confirmed_bytes <= fits
    if not loss:
        sizes = {
            Scope.LOOPBACK: LOOPBACK_SIZES_BYTES,
            Scope.LAN: LOOPBACK_SIZES_BYTES[:-1],
            Scope.WIDE: WIDE_SIZES_BYTES,
        }
        assert search.confirmed_bytes == max(size for size in (BASE_BYTES, *sizes[scope]) if size <= fits)


def test_a_black_hole_is_found_and_climbed_out_of() -> None:
    search = MtuSearch(Scope.WIDE)
    search.restart(0.0)
    now = drive(search, 0.0, 5.0, 1472)
    assert search.confirmed_bytes == 1472
    search.verify(now)
    now = drive(search, now, now + 2.0, 1300)
    assert search.black_holes == 1
    assert search.confirmed_bytes == BASE_BYTES
    now = drive(search, now, now + RAISE_AFTER_BLACK_HOLE_S, 1300)
    assert search.confirmed_bytes == 1280


def test_verifying_what_still_fits_changes_nothing_but_the_calendar_goes_on() -> None:
    search = MtuSearch(Scope.WIDE)
    search.restart(0.0)
    now = drive(search, 0.0, 5.0, 1300)
    while now < 700.0:
        search.verify(now)
        now = drive(search, now, now + 1.0, 1300 if now < 300 else 1472)
        assert search.black_holes == 0
    assert search.confirmed_bytes == 1472, "looked for more after ten minutes, though it was verified every second"


def test_acks_of_an_earlier_generation_do_not_count() -> None:
    search = MtuSearch(Scope.WIDE)
    search.restart(0.0)
    drive(search, 0.0, 5.0, 1472)
    generation = search.generation
    search.fall_back(5.0)
    search.acked(1472, generation, 5.01)
    assert search.confirmed_bytes == 0


def test_small_pings_prove_nothing() -> None:
    search = MtuSearch(Scope.WIDE)
    search.restart(0.0)
    search.acked(BASE_BYTES - 1, search.generation, 0.1)
    assert search.confirmed_bytes == 0
