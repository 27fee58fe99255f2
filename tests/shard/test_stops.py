from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kafila.errors import UsageError
from kafila.shard.stops import StopMatcher

LETTERS = "ab。"  # few letters, so that stop strings overlap themselves and each other
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)
PARTS = st.lists(st.text(LETTERS, max_size=5), max_size=12)


def plain(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: letter by letter, until the text ends in a stop string; then without the longest such."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(PARTS, STOPS)
@example(["ab", "ab", "a"], ["aba", "b。"])
@example(["aab"], ["aab", "ab", "b"])
@example(["ab。"], ["ab。", "b"])
def test_the_outcome_does_not_depend_on_the_cuts(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = "".join([*map(matcher.feed, parts), matcher.finish()])
    assert (text, matcher.matched) == plain("".join(parts), stops)


@given(PARTS, STOPS)
def test_no_more_is_withheld_than_may_begin_a_stop_string(parts: list[str], stops: list[str]) -> None:
    matcher, fed, shown = StopMatcher(stops), "", ""
    for part in parts:
        fed += part
        shown += matcher.feed(part)
        if matcher.matched is not None:
            break
        withheld = fed[len(shown) :]
        assert fed.startswith(shown)
        assert not withheld or any(stop.startswith(withheld) for stop in stops)


def test_a_stop_string_across_tokens() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    shown = [matcher.feed(part) for part in ["Hi", "\n", "\nUs", "ual", ".\n", "\nUser", ": more"]]
    assert shown == ["Hi", "", "", "\n\nUsual", ".", "", ""]
    assert matcher.matched == "\n\nUser:"
    assert (matcher.feed("more"), matcher.finish()) == ("", "")


def test_what_is_withheld_is_given_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("the EN") == "the "
    assert matcher.finish() == "EN"
    assert matcher.matched is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopMatcher(["x", ""])
