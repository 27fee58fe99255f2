"""One direct path: its schedule, its silence, its second chances."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kafila.nat.candidates import CandidateKind
from kafila.nat.messages import MIN_MESSAGE_BYTES
from kafila.nat.mtu import BASE_BYTES
from kafila.nat.path import CHECK_S, HOLD_OFF_S, LOOK_AGAIN_S, TRANSITIONS, Path, PathState
from kafila.nat.schedule import PUNCH_OFFSETS_S, PUNCH_WINDOW_S
from kafila.types import Address

KEEPALIVE_S = 15.0
RTT_S = 0.03


def new_path() -> Path:
    return Path(Address("203.0.113.7", 4242), CandidateKind.REFLEXIVE)


def state_of(path: Path) -> PathState:
    """A call, so that the type checker does not take the state for unchanged."""
    return path.state


def run(path: Path, now: float, until: float, answering: bool = False) -> tuple[float, list[float]]:
    """Let time pass, every ping answered after :data:`RTT_S` or none; the new time and when pings were sent."""
    sent, acks = list[float](), list[tuple[float, int, int]]()
    while True:
        times = [time for time in (path.due_at(), *(ack[0] for ack in acks)) if time is not None and time <= until]
        if not times:
            return until, sent
        now = max(now, min(times))
        for ack in [ack for ack in acks if ack[0] <= now]:
            acks.remove(ack)
            path.acked(ack[1], ack[2], RTT_S, now, KEEPALIVE_S)
        path.advance(now)
        if path.too_narrow(now):
            return now, sent
        if path.gone_silent(now) is not None:
            path.silent(now)
        for size in path.take(now):
            sent.append(now)
            path.sent_at = now
            if answering:
                acks.append((now + RTT_S, size, path.mtu.generation))


def usable(now: float = 0.0) -> Path:
    path = new_path()
    path.punch(now)
    run(path, now, now + 3.0, answering=True)
    assert state_of(path) is PathState.USABLE
    return path


def test_every_state_can_be_entered_and_left() -> None:
    assert set(TRANSITIONS) == set(PathState)
    assert all(TRANSITIONS.values())
    assert set().union(*TRANSITIONS.values()) == set(PathState)


def test_illegal_transitions_are_refused() -> None:
    path = new_path()
    with pytest.raises(AssertionError, match="idle to silent"):
        path.silent(0.0)


def test_punches_on_schedule_and_then_rests() -> None:
    path = new_path()
    path.punch(10.0)
    _, sent = run(path, 10.0, 100.0)
    assert sent == pytest.approx([10.0 + offset for offset in PUNCH_OFFSETS_S])
    assert state_of(path) is PathState.IDLE
    assert path.due_at() is None


def test_a_late_timer_skips_what_was_missed() -> None:
    path = new_path()
    path.punch(0.0)
    assert path.take(0.5) == [MIN_MESSAGE_BYTES]
    assert path.due_at() == pytest.approx(0.62)


def test_an_ack_is_not_enough_full_datagrams_must_get_through() -> None:
    path = new_path()
    path.punch(0.0)
    path.take(0.0)
    path.acked(MIN_MESSAGE_BYTES, 0, RTT_S, RTT_S, KEEPALIVE_S)
    assert state_of(path) is PathState.CONFIRMING
    assert path.take(RTT_S) == [MIN_MESSAGE_BYTES, BASE_BYTES]
    path.acked(MIN_MESSAGE_BYTES, path.mtu.generation, RTT_S, 2 * RTT_S, KEEPALIVE_S)
    assert state_of(path) is PathState.CONFIRMING
    path.acked(BASE_BYTES, path.mtu.generation, RTT_S, 2 * RTT_S, KEEPALIVE_S)
    assert state_of(path) is PathState.USABLE


def test_too_narrow_when_only_small_pings_are_acked() -> None:
    path = new_path()
    path.punch(0.0)
    path.take(0.0)
    path.acked(MIN_MESSAGE_BYTES, 0, RTT_S, RTT_S, KEEPALIVE_S)
    run(path, RTT_S, 0.5)
    path.acked(MIN_MESSAGE_BYTES, path.mtu.generation, RTT_S, 0.5, KEEPALIVE_S)
    assert not path.too_narrow(0.5)
    now, _ = run(path, 0.5, 2.0)
    assert path.too_narrow(now)
    assert path.hold_off(now)
    path.punch(now + HOLD_OFF_S[0] - 0.1)
    assert state_of(path) is PathState.IDLE
    path.punch(now + HOLD_OFF_S[0])
    assert state_of(path) is PathState.PUNCHING


def test_idle_paths_are_kept_alive() -> None:
    path = usable()
    _, sent = run(path, 3.0, 63.0, answering=True)
    assert 4 <= len(sent) <= 5


def test_silence_under_data_is_noticed_within_a_second() -> None:
    path = usable()
    path.busy(3.0)
    now, _ = run(path, 3.0, 5.0, answering=True)
    now, sent = run(path, now, now + 0.99)
    assert state_of(path) is PathState.SILENT
    assert len(sent) >= 3


def test_silence_on_a_slow_path_is_three_timeouts() -> None:
    path = usable()
    for _ in range(60):
        path.round_trip.measured(0.5)
    path.busy(3.0)
    now, _ = run(path, 3.0, 4.45)
    assert state_of(path) is PathState.USABLE
    run(path, now, 5.5)
    assert state_of(path) is PathState.SILENT


def test_silence_while_idle_is_given_longer() -> None:
    path = usable()
    now, _ = run(path, 3.0, KEEPALIVE_S + 1.5)
    assert state_of(path) is PathState.USABLE
    now, _ = run(path, now, now + 1.5)
    assert state_of(path) is PathState.SILENT


def test_a_stalled_process_does_not_take_its_pause_for_silence() -> None:
    path = usable()
    path.busy(3.0)
    path.take(3.0)
    assert path.gone_silent(13.0) is None, "one ping went unanswered, but nobody was there to hear the answer"


def test_lost_after_four_seconds_and_looked_for_every_four() -> None:
    path = usable()
    path.busy(3.0)
    now, _ = run(path, 3.0, 4.0)
    assert state_of(path) is PathState.SILENT
    now, _ = run(path, now, now + PUNCH_WINDOW_S + 1)
    assert state_of(path) is PathState.LOST
    now, sent = run(path, now, now + 40.0)
    assert len(sent) == pytest.approx(40.0 / LOOK_AGAIN_S, abs=1)
    run(path, now, now + LOOK_AGAIN_S + 1.0, answering=True)
    assert state_of(path) is PathState.USABLE


def test_the_peer_s_ping_is_answered_with_one_at_once_but_not_with_a_flood() -> None:
    path = usable()
    path.busy(3.0)
    now, _ = run(path, 3.0, 12.0)
    assert state_of(path) is PathState.LOST
    path.heard(now)
    assert path.due_at() == now
    assert path.take(now) == [MIN_MESSAGE_BYTES]
    path.sent_at = now
    path.heard(now + 0.001)
    assert path.due_at() == pytest.approx(now + LOOK_AGAIN_S)


def test_data_that_does_not_get_through_first_costs_its_size_then_the_path() -> None:
    path = usable()
    path.data_lost(3.0)
    assert state_of(path) is PathState.CONFIRMING
    now, _ = run(path, 3.0, 4.0, answering=True)
    assert state_of(path) is PathState.USABLE
    assert path.mtu.confirmed_bytes == BASE_BYTES
    path.data_lost(now)
    assert state_of(path) is PathState.IDLE
    path.acked(MIN_MESSAGE_BYTES, 0, RTT_S, now + 0.01, KEEPALIVE_S)
    assert state_of(path) is PathState.IDLE, "a late ack does not end the hold-off"
    now, _ = run(path, now, now + HOLD_OFF_S[0] + 1.0, answering=True)
    assert state_of(path) is PathState.USABLE, "given another chance by itself"


def test_checks_come_often_while_sending_and_seldom_afterwards() -> None:
    path = usable()
    path.busy(3.0)
    now, sent = run(path, 3.0, 5.0, answering=True)
    checks = sorted(set(sent))
    assert max(later - earlier for earlier, later in pairwise(checks)) < CHECK_S + RTT_S + 0.01
    path.resting(now, KEEPALIVE_S)
    now, sent = run(path, now, now + KEEPALIVE_S - 1.0, answering=True)
    assert sent == []
