"""When pings are due, and when silence counts."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring.pulse import PATIENCE_S, PING_S, PING_SPREAD_S, RELAYING_FOR_S, RELAYING_PING_S, Pulse


def pulse(now: float = 100.0, seed: int = 0) -> Pulse:
    made = Pulse(Random(seed))
    made.rest(now)
    return made


@given(st.integers(0, 2**32))
def test_idle_pings_are_spread_about_fifteen_seconds(seed: int) -> None:
    assert PING_S - PING_SPREAD_S <= pulse(seed=seed).due - 100.0 <= PING_S + PING_SPREAD_S


def test_patience_grows_with_the_round_trip_and_ends_when_heard() -> None:
    beating = pulse()
    beating.asked(110.0, 0.01)
    assert (beating.waiting, beating.due) == (True, 110.0 + PATIENCE_S)
    beating.asked(110.0, 1.0)
    assert beating.due == 113.0
    beating.heard(111.0)
    assert not beating.waiting
    assert beating.due > 120.0
    due = beating.due
    beating.heard(112.0)  # not asked: hearing something moves nothing
    assert beating.due == due


def test_a_relayed_link_quickens_it_and_its_end_slows_it() -> None:
    beating = pulse()
    beating.relayed(100.0)
    assert beating.due == pytest.approx(100.0 + RELAYING_PING_S)
    beating.relayed(100.9)  # each datagram does not put the ping off
    assert beating.due == pytest.approx(100.0 + RELAYING_PING_S)
    beating.rest(101.0)
    assert beating.due == pytest.approx(101.0 + RELAYING_PING_S)
    beating.rest(101.0 + RELAYING_FOR_S)
    assert beating.due > 101.0 + RELAYING_FOR_S + RELAYING_PING_S


def test_a_relayed_link_does_not_end_patience_early() -> None:
    beating = pulse()
    beating.asked(110.0, 1.0)
    beating.relayed(110.0)
    assert beating.due == 113.0


def test_a_ping_that_is_due_is_not_put_off() -> None:
    beating = pulse()
    beating.due = 100.5
    beating.relayed(100.0)
    assert beating.due == 100.5
