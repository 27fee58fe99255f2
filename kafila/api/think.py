"""Reasoning models write their thinking before the answer, between tags; here the two are told apart (pure)."""

from __future__ import annotations

from typing import NamedTuple

from kafila.types import THINKING_TAGS


class Part(NamedTuple):
    """What a piece of an answer is."""

    thinking: str
    words: str


class ThinkSplitter:
    """One answer's text as it comes: thinking without its tags and the blank lines around it, and the rest untouched.

    A tag counts at the beginning of the answer alone; later on it is something the answer speaks of. Text is withheld
    only while it may be part of a tag, or the blank space before one.
    """

    def __init__(self) -> None:
        self._withheld = ""
        self._closing: str | None = None
        """The tag that ends the thinking, while it lasts."""
        self._begun = False
        """Whether the opening is behind us: a tag, or something that is none."""
        self._trim = False
        """Whether blank space that comes next belongs to a tag."""

    @property
    def thinking(self) -> bool:
        """Whether what comes now is thinking."""
        return self._closing is not None

    def feed(self, text: str) -> Part:
        """What ``text`` makes certain."""
        text = self._withheld + text
        self._withheld = ""
        if not self._begun:
            return self._opening(text)
        return self._thought(text) if self._closing is not None else Part("", self._trimmed(text))

    def finish(self) -> Part:
        """What was withheld, when no text follows."""
        text, self._withheld = self._withheld, ""
        return Part(text.rstrip(), "") if self._closing is not None else Part("", text)

    def _opening(self, text: str) -> Part:
        start = text.lstrip()
        for opening, closing in THINKING_TAGS.items():
            if start.startswith(opening):
                self._begun = self._trim = True
                self._closing = closing
                return self._thought(start[len(opening) :])
            if opening.startswith(start):  # nothing but blank space, or the beginning of a tag
                self._withheld = text
                return Part("", "")
        self._begun = True
        return Part("", text)

    def _thought(self, text: str) -> Part:
        closing = self._closing or ""
        before, found, after = text.partition(closing)
        if found:
            self._closing = None
            thinking = self._trimmed(before).rstrip()
            self._trim = True
            return Part(thinking, self._trimmed(after))
        keep = overlap(text, closing)
        certain = text[: len(text) - keep].rstrip()
        self._withheld = text[len(certain) :]
        return Part(self._trimmed(certain), "")

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of ``text`` that ``mark`` begins with, short of the whole of it."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
