"""Answers as Ollama's interface writes them (pure): JSON objects, one a line where they stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kafila.api.answers import FINISH, Piece
from kafila.api.common import Asked
from kafila.api.openai_answers import as_json
from kafila.api.refusals import Refused
from kafila.api.speech import Speaker, Speech
from kafila.ring.frames import Text


class OllamaAnswer:
    """One answer. ``chat``: in the form of /api/chat, otherwise of /api/generate. ``now`` gives the time as Ollama
    writes it (RFC 3339)."""

    def __init__(self, asked: Asked, model: str, now: Callable[[], str], *, chat: bool) -> None:
        self.content_type = "application/x-ndjson" if asked.stream else "application/json"
        self._stream = asked.stream
        self._model = model
        self._now = now
        self._chat = chat
        self._speaker = Speaker(asked.tools)
        self._thinking: list[str] = []
        self._words: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._last: Text | None = None

    def feed(self, piece: Piece) -> bytes:
        """The line that a piece makes, if answers stream; the last one is :meth:`finish`'s."""
        text = piece.text
        self._last = text
        speech = self._speaker.feed(text.delta)
        if text.finish is not None:
            end = self._speaker.finish()
            speech = Speech(speech.thinking + end.thinking, speech.words + end.words, speech.calls + end.calls)
        calls = [{"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in speech.calls]
        if self._stream:
            said = speech.thinking or speech.words or calls
            return self._line(self._said(speech.thinking, speech.words, calls)) if said else b""
        self._thinking.append(speech.thinking)
        self._words.append(speech.words)
        self._calls += calls
        return b""

    def finish(self) -> bytes:
        """The last line: how it ended, counts, and times in nanoseconds; with the whole answer unless that streamed."""
        said = self._said("".join(self._thinking), "".join(self._words), self._calls)
        return self._line({**said, **_ending(self._last)}, done=True)

    def loaded(self) -> bytes:
        """The answer to no question: the model is there."""
        return self._line({**self._said("", "", []), "done_reason": "load"}, done=True)

    def _said(self, thinking: str, words: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {"response": words, **extra}
        if calls:
            extra["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": words, **extra}}

    def _line(self, said: dict[str, Any], *, done: bool = False) -> bytes:
        line = {"model": self._model, "created_at": self._now(), **said, "done": done}
        return as_json(line) + (b"\n" if self._stream else b"")


def _ending(last: Text | None) -> dict[str, Any]:
    if last is None or last.finish is None:
        return {"done_reason": "stop"}
    return {
        "done_reason": FINISH.get(last.finish, "stop"),
        "total_duration": _nanoseconds(last.queue_s + last.prefill_s + last.decode_s),
        "load_duration": 0,
        "prompt_eval_count": last.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(last.prefill_s),
        "eval_count": last.answer_tokens,
        "eval_duration": _nanoseconds(last.decode_s),
        **({"left_out_messages": last.left_out} if last.left_out else {}),
    }


def _nanoseconds(duration_s: float) -> int:
    return round(duration_s * 1e9)


def failed(refused: Refused) -> bytes:
    """The error, where a stream of lines was to go on."""
    return as_json(refused.ollama_body()) + b"\n"
