"""Is data on the move, and does anything come back for what is sent?"""

from __future__ import annotations

from kafila.nat.liveness import BUSY_S, DataFlow


def test_busy_begins_and_ends() -> None:
    flow = DataFlow()
    assert not flow.busy(0.0)
    assert flow.sent(0.0)
    assert not flow.sent(0.5)
    assert flow.busy(0.5 + BUSY_S)
    assert not flow.busy(0.6 + BUSY_S)
    assert flow.sent(0.6 + BUSY_S)


def test_receiving_is_busy_too() -> None:
    flow = DataFlow()
    assert flow.received(0.0)
    assert not flow.received(0.5)
    assert flow.busy(0.5 + BUSY_S)


def test_a_lone_datagram_proves_nothing() -> None:
    flow = DataFlow()
    flow.sent(0.0)
    assert flow.unanswered_s(100.0, 0.75) is None


def test_data_repeated_without_answer_is_silence() -> None:
    flow = DataFlow()
    for moment in (0.0, 0.1, 0.3, 0.7):
        flow.sent(moment)
        assert flow.unanswered_s(moment, 0.75) is None
    assert flow.unanswered_s(0.8, 0.75) == 0.8


def test_any_answer_ends_it() -> None:
    flow = DataFlow()
    for tick in range(100):
        now = tick / 10
        flow.sent(now)
        if tick % 5 == 4:
            flow.received(now)
        assert flow.unanswered_s(now, 0.75) is None
