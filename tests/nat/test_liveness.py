"""Is data being sent, and does anything come back for it?"""

from __future__ import annotations

from kafila.nat.liveness import SENDING_S, DataFlow


def test_sending_begins_and_ends() -> None:
    flow = DataFlow()
    assert not flow.sending(0.0)
    assert flow.sent(0.0)
    assert not flow.sent(0.5)
    assert flow.sending(0.5 + SENDING_S)
    assert not flow.sending(0.6 + SENDING_S)
    assert flow.sent(0.6 + SENDING_S)


def test_a_lone_datagram_may_be_an_acknowledgement() -> None:
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
        flow.sent(tick / 10)
        if tick % 5 == 4:
            flow.received()
        assert flow.unanswered_s(tick / 10, 0.75) is None
