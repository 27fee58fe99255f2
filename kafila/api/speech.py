"""An answer's text divided into what clients show apart: thinking, words, tool calls (pure)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kafila.api.think import Part, ThinkSplitter
from kafila.api.toolcalls import ToolCall, ToolCallSplitter


class Speech(NamedTuple):
    """A piece of an answer."""

    thinking: str = ""
    words: str = ""
    calls: tuple[ToolCall, ...] = ()


class Speaker:
    """One answer's text as it comes. ``tools``: the names of those that were offered."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        self._thinking = ThinkSplitter()
        self._calls = ToolCallSplitter(tools)

    def feed(self, text: str) -> Speech:
        """What ``text`` makes certain."""
        return self._words(self._thinking.feed(text))

    def finish(self) -> Speech:
        """What was withheld, when no text follows."""
        first = self._words(self._thinking.finish())
        last = self._calls.finish()
        return Speech(first.thinking, first.words + last.words, first.calls + last.calls)

    def _words(self, part: Part) -> Speech:
        said = self._calls.feed(part.words)
        return Speech(part.thinking, said.words, said.calls)
