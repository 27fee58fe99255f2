"""Tool calls in the text of an answer, as checkpoints were trained to write them (pure).

    Hermes, Qwen    <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    Llama 3         {"name": "weather", "parameters": {"city": "Oslo"}}         the whole answer, perhaps several

What does not parse, or names no tool that was offered, stays the text it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from kafila.api.think import overlap

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may put it before its calls."""


class ToolCall(NamedTuple):
    """One call. ``arguments`` is a JSON object."""

    name: str
    arguments: str


class Said(NamedTuple):
    """Words and calls that have become certain, the words before the calls."""

    words: str
    calls: tuple[ToolCall, ...] = ()


class ToolCallSplitter:
    """One answer's words as they come. ``tools``: the names that were offered; with none, everything is words."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._withheld = ""
        self._inside = False
        self._begun = False
        self._whole = False
        """Whether the answer looks like Llama's calls and is kept back until it is whole."""
        self._called = False

    def feed(self, text: str) -> Said:
        """What ``text`` makes certain."""
        if not self._tools:
            return Said(text)
        text = self._withheld + text
        self._withheld = ""
        if not self._begun:
            start = text.lstrip()
            if not start or _PYTHON_TAG.startswith(start):
                self._withheld = text
                return Said("")
            self._begun = True
            self._whole = start.startswith(("{", _PYTHON_TAG))
        if self._whole:
            self._withheld = text
            return Said("")
        return self._marked(text)

    def finish(self) -> Said:
        """What was withheld, when no text follows."""
        text, self._withheld = self._withheld, ""
        if self._whole:
            calls = self._bare(text)
            return Said("", calls) if calls else Said(text)
        if self._inside:
            call = self._call(text)
            return Said("", (call,)) if call is not None else Said(_OPEN + text)
        return Said(self._between(text))

    def _marked(self, text: str) -> Said:
        words, calls = "", list[ToolCall]()
        while True:
            if self._inside:
                before, found, after = text.partition(_CLOSE)
                if not found:
                    self._withheld = text
                    return Said(words, tuple(calls))
                self._inside = False
                call = self._call(before)
                if call is None:
                    words += _OPEN + before + _CLOSE
                else:
                    calls.append(call)
                    self._called = True
                text = after
            before, found, text_after = text.partition(_OPEN)
            if not found:
                keep = overlap(text, _OPEN)
                # Blank space before a call belongs to it.
                certain = text[: len(text) - keep].rstrip()
                self._withheld = text[len(certain) :]
                return Said(words + self._between(certain), tuple(calls))
            words += self._between(before.rstrip())
            self._inside, text = True, text_after

    def _between(self, text: str) -> str:
        """Words outside calls; what only separates them is nothing."""
        return "" if self._called and not text.strip() else text

    def _call(self, text: str) -> ToolCall | None:
        try:
            return self._checked(json.loads(text))
        except (ValueError, RecursionError):
            return None

    def _bare(self, text: str) -> tuple[ToolCall, ...]:
        """Calls with nothing but separators between them; none unless all of it is calls."""
        text = text.strip().removeprefix(_PYTHON_TAG)
        decoder, calls = json.JSONDecoder(), list[ToolCall]()
        while text := text.lstrip(" \t\r\n;,"):
            try:
                value, end = decoder.raw_decode(text)
                call = self._checked(value)
            except (ValueError, RecursionError):
                return ()
            if call is None:
                return ()
            calls.append(call)
            text = text[end:]
        return tuple(calls)

    def _checked(self, value: Any) -> ToolCall | None:
        """The call in a JSON value. Raises ValueError or RecursionError where JSON within it is none."""
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some checkpoints write the arguments as JSON within JSON
            arguments = json.loads(arguments)
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
