"""What is remembered of divisions, and what is not."""

from __future__ import annotations

import pytest

from kafila.ring.divisions import Divisions, divided


def test_sizes_are_as_even_as_can_be() -> None:
    assert divided(7, 3) == [3, 2, 2]
    assert divided(4, 4) == [1, 1, 1, 1]


def settled(answers: int, batches: int, circuit_s: float) -> Divisions:
    known = Divisions()
    known.use(answers, batches)
    for _ in range(30):
        known.record(divided(answers, batches)[0], circuit_s)
    return known


def test_a_division_is_known_once_it_has_settled() -> None:
    known = Divisions()
    known.use(4, 2)
    for n in range(10):
        assert known.gap_s(4, 2) is None
        known.record(2, 9.0 if n < 4 else 1.0)  # the first four met what had left before
    assert known.gap_s(4, 2) == pytest.approx(1.0)
    assert known.gap_s(4, 1) is None
    assert known.gap_s(2, 2) is None


def test_batches_of_another_division_or_beside_chunks_do_not_count() -> None:
    known = settled(4, 2, 1.0)
    for _ in range(40):
        known.record(1, 50.0)  # of no such size
    for _ in range(40):
        known.disturbed()
        known.record(2, 50.0)
    known.use(5, 2)
    known.use(4, 2)
    for _ in range(4):
        known.record(2, 50.0)  # left before
    assert known.gap_s(4, 2) == pytest.approx(1.0)


def test_what_was_long_ago_is_forgotten() -> None:
    known = settled(4, 2, 1.0)
    known.use(1, 1)
    for _ in range(4096):
        known.record(1, 1.0)
    assert known.gap_s(4, 2) == pytest.approx(1.0)
    known.record(1, 1.0)
    assert known.gap_s(4, 2) is None


def test_only_so_many_are_kept() -> None:
    known = Divisions()
    for answers in range(1, 80):
        known.use(answers, 1)
        for _ in range(9):
            known.record(answers, 1.0)
    assert known.gap_s(1, 1) is None
    assert known.gap_s(79, 1) == pytest.approx(1.0)
