"""The calendar of punching."""

from __future__ import annotations

from kafila.nat.rounds import JOIN_GAP_S, Rounds
from kafila.nat.schedule import PUNCH_WINDOW_S


def test_rounds_that_find_nothing_come_ever_more_seldom() -> None:
    rounds, now, pauses = Rounds(), 0.0, list[float]()
    for _ in range(5):
        rounds.begin(now)
        assert not rounds.over(now + PUNCH_WINDOW_S - 0.01)
        now += PUNCH_WINDOW_S
        assert rounds.over(now)
        pauses.append(rounds.failed(now))
        assert not rounds.due(now + pauses[-1] - 0.01)
        now += pauses[-1]
        assert rounds.due(now)
    assert pauses == [5.0, 15.0, 60.0, 60.0, 60.0]


def test_success_starts_over() -> None:
    rounds = Rounds()
    rounds.begin(0.0)
    rounds.over(4.0)
    rounds.failed(4.0)
    rounds.found()
    assert rounds.due_at() is None
    assert rounds.failed(10.0) == 5.0


def test_the_peer_s_round_is_joined_but_not_for_ever() -> None:
    rounds = Rounds()
    assert rounds.may_join(0.0)
    rounds.begin(0.0)
    assert not rounds.may_join(1.0)
    rounds.over(PUNCH_WINDOW_S)
    assert not rounds.may_join(PUNCH_WINDOW_S + JOIN_GAP_S - 0.01)
    assert rounds.may_join(PUNCH_WINDOW_S + JOIN_GAP_S)


def test_there_is_always_another_round_to_come() -> None:
    rounds = Rounds()
    rounds.ensure(0.0)
    due_at = rounds.due_at()
    assert due_at is not None
    rounds.ensure(1.0)
    assert rounds.due_at() == due_at
