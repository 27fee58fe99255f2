"""What people read while shares are fetched."""

from __future__ import annotations

import pytest

from kafila.fetching import Fetches, duration, percent, size


def test_a_members_line() -> None:
    fetches = Fetches(everybody=False)
    fetches.update("ada", 100_000_000, 2_100_000_000, 10.0)
    assert fetches.line(10.0) == "fetching [....................] 4% of 2.1 GB"
    fetches.update("ada", 1_100_000_000, 2_100_000_000, 20.0)
    assert fetches.line(20.0) == "fetching [##########..........] 52% of 2.1 GB, 100 MB/s, 10 s left"
    assert fetches.finished("ada", 20.0) is None
    fetches.update("ada", 2_100_000_000, 2_100_000_000, 30.0)
    assert fetches.finished("ada", 30.0) == "fetched 2 GB of 2.1 GB in 20 s"
    assert fetches.finished("ada", 31.0) is None


def test_the_hosts_line_is_of_all() -> None:
    fetches = Fetches(everybody=True)
    fetches.update("ada", 0, 1000, 0.0)
    fetches.update("bob", 0, 3000, 0.0)
    fetches.update("ada", 1000, 1000, 1.0)
    assert fetches.line(1.0) == "fetching [#####...............] 25% of 4 kB, 1 kB/s, 3 s left, ada 100% bob 0%"
    assert fetches.finished("ada", 1.0) == "ada has its share: fetched 1 kB of 1 kB in 1 s"
    assert fetches.finished("bob", 1.0) is None


def test_a_share_that_was_there() -> None:
    fetches = Fetches(everybody=False)
    fetches.update("ada", 700, 700, 5.0)
    assert fetches.finished("ada", 5.0) == "700 bytes were there already, nothing is fetched"


def test_others_are_told_once_a_second_and_of_the_end() -> None:
    fetches = Fetches(everybody=False)
    told = [
        now
        for now, done in ((0.0, 0), (0.2, 1), (0.9, 2), (1.1, 3), (1.2, 4), (1.3, 10))
        if fetches.is_due("ada", done, 10, now)
    ]
    assert told == [0.0, 1.1, 1.3]


def test_a_share_that_begins_anew() -> None:
    fetches = Fetches(everybody=False)
    fetches.update("ada", 500, 1000, 0.0)
    fetches.update("ada", 100, 1000, 10.0)  # a file was replaced at the source
    fetches.update("ada", 200, 1000, 11.0)
    assert fetches.line(11.0) == "fetching [####................] 20% of 1 kB, 100 bytes/s, 8 s left"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (12_345_678, "12.3 MB"), (4.2e12, "4200 GB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


def test_percent_says_all_only_of_all() -> None:
    assert [percent(999, 1000), percent(1000, 1000), percent(0, 0)] == ["99%", "100%", "100%"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (89, "89 s"), (120, "2 min"), (5400, "1 h 30 min"), (36_000, "10 h 0 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
