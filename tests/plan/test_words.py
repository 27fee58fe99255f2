"""Numbers as a person reads them."""

from __future__ import annotations

import pytest

from kafila.plan.words import counted, listed, size


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "2 KB"),
        (640_000_000, "640 MB"),
        (12_690_000_000, "12.69 GB"),
        (3 * 10**12, "3,000.00 GB"),
    ],
)
def test_sizes_are_decimal(number: int, said: str) -> None:
    assert size(number) == said


def test_one_and_many() -> None:
    assert (counted(1, "block"), counted(0, "block"), counted(1300, "block")) == ("1 block", "0 blocks", "1,300 blocks")
    assert [listed(names) for names in ((), ("a",), ("a", "b"), ("a", "b", "c"))] == ["", "a", "a and b", "a, b and c"]
