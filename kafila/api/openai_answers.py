"""Answers as OpenAI's interface writes them (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafila.api.answers import FINISH, Piece
from kafila.api.common import Asked
from kafila.api.refusals import Refused
from kafila.api.speech import Speaker, Speech
from kafila.ring.frames import Text
from kafila.types import SpelledLogprobs


@dataclass(frozen=True, slots=True)
class Frame:
    """What is the same in all that is said to one request. ``created``: seconds since 1970."""

    request: str
    model: str
    created: int
    new_id: Callable[[str], str]
    """A fresh id that begins with this."""

    def around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The object round some choices."""
        return {
            "id": self.request,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(slots=True)
class _Choice:
    """One answer so far."""

    speaker: Speaker
    last: Text | None = None
    thinking: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[SpelledLogprobs] = field(default_factory=list)

    @property
    def finish(self) -> str | None:
        if self.last is None or self.last.finish is None:
            return None
        return "tool_calls" if self.calls else FINISH.get(self.last.finish, "stop")


class _Choices:
    """The answers of one request; what each new part adds."""

    def __init__(self, asked: Asked, frame: Frame, *, divide: bool) -> None:
        self.asked = asked
        self.frame = frame
        self._divide = divide
        self.all = [_Choice(Speaker(asked.tools)) for _ in asked.questions]

    def take(self, piece: Piece) -> tuple[_Choice, Speech, list[dict[str, Any]]]:
        """The choice that a piece is of, what it adds to it, and its new tool calls as they are written."""
        choice, text = self.all[piece.number], piece.text
        choice.last = text
        choice.logprobs += text.logprobs
        speech = self._speech(choice, text)
        calls = [
            {
                "id": self.frame.new_id("call_"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in speech.calls
        ]
        choice.thinking.append(speech.thinking)
        choice.words.append(speech.words)
        choice.calls += calls
        return choice, speech, calls

    def _speech(self, choice: _Choice, text: Text) -> Speech:
        if not self._divide:
            return Speech(words=text.delta)
        speech = choice.speaker.feed(text.delta)
        if text.finish is None:
            return speech
        end = choice.speaker.finish()
        return Speech(speech.thinking + end.thinking, speech.words + end.words, speech.calls + end.calls)

    def usage(self) -> dict[str, Any]:
        """The counts of all answers together; their prompt counts once for each question it was asked in."""
        texts = [choice.last for choice in self.all if choice.last is not None]
        prompt, answer = sum(text.prompt_tokens for text in texts), sum(text.answer_tokens for text in texts)
        left_out = sum(text.left_out for text in texts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(text.reused_tokens for text in texts)},
            **({"left_out_messages": left_out} if left_out else {}),
        }


class ChatWhole:
    """A chat completion in one piece."""

    content_type = "application/json"

    def __init__(self, asked: Asked, frame: Frame) -> None:
        self._choices = _Choices(asked, frame, divide=True)

    def feed(self, piece: Piece) -> bytes:
        """Nothing is said before the end."""
        self._choices.take(piece)
        return b""

    def finish(self) -> bytes:
        """The whole object."""
        choices = [self._written(index, choice) for index, choice in enumerate(self._choices.all)]
        return as_json({**self._choices.frame.around("chat.completion", choices), "usage": self._choices.usage()})

    def _written(self, index: int, choice: _Choice) -> dict[str, Any]:
        words, thinking = "".join(choice.words), "".join(choice.thinking)
        message: dict[str, Any] = {"role": "assistant", "content": None if choice.calls and not words else words}
        if thinking:
            message["reasoning_content"] = thinking
        if choice.calls:
            message["tool_calls"] = choice.calls
        asked = self._choices.asked
        logprobs = chat_logprobs(choice.logprobs, asked.alternatives) if asked.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


class ChatStream:
    """A chat completion as server-sent events (WHATWG HTML, section 9.2)."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, asked: Asked, frame: Frame) -> None:
        self._choices = _Choices(asked, frame, divide=True)
        self._begun = False

    def feed(self, piece: Piece) -> bytes:
        """The events that a piece makes; a place in the queue is a comment."""
        begin = b"" if self._begun else self._begin()
        text = piece.text
        if text.note and text.finish is None:
            return begin + _comment(text.note)
        choice, speech, calls = self._choices.take(piece)
        delta: dict[str, Any] = {}
        if speech.thinking:
            delta["reasoning_content"] = speech.thinking
        if speech.words:
            delta["content"] = speech.words
        if calls:
            first = len(choice.calls) - len(calls)
            delta["tool_calls"] = [{"index": first + at, **call} for at, call in enumerate(calls)]
        said = self._event(piece.number, delta, text.logprobs) if delta or text.logprobs else b""
        ended = self._event(piece.number, {}, (), choice.finish) if text.finish is not None else b""
        return begin + said + ended

    def finish(self) -> bytes:
        """The counts, where they were asked for, and the end."""
        frame = self._choices.frame
        if not self._choices.asked.include_usage:
            return DONE
        return event({**frame.around("chat.completion.chunk", []), "usage": self._choices.usage()}) + DONE

    def _begin(self) -> bytes:
        self._begun = True
        start = {"role": "assistant", "content": ""}
        return b"".join(self._event(index, start, ()) for index in range(len(self._choices.all)))

    def _event(
        self, index: int, delta: Mapping[str, Any], logprobs: tuple[SpelledLogprobs, ...], finish: str | None = None
    ) -> bytes:
        asked = self._choices.asked
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        if asked.logprobs:
            choice["logprobs"] = chat_logprobs(logprobs, asked.alternatives)
        chunk = self._choices.frame.around("chat.completion.chunk", [choice])
        if asked.include_usage:
            chunk["usage"] = None
        return event(chunk)


class CompletionWhole:
    """A completion in one piece."""

    content_type = "application/json"

    def __init__(self, asked: Asked, frame: Frame) -> None:
        self._choices = _Choices(asked, frame, divide=False)

    def feed(self, piece: Piece) -> bytes:
        """Nothing is said before the end."""
        self._choices.take(piece)
        return b""

    def finish(self) -> bytes:
        """The whole object."""
        choices = [self._written(index, choice) for index, choice in enumerate(self._choices.all)]
        return as_json({**self._choices.frame.around("text_completion", choices), "usage": self._choices.usage()})

    def _written(self, index: int, choice: _Choice) -> dict[str, Any]:
        asked = self._choices.asked
        logprobs = completion_logprobs(choice.logprobs, asked.alternatives, 0) if asked.logprobs else None
        text = asked.echo + "".join(choice.words)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}


class CompletionStream:
    """A completion as server-sent events."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, asked: Asked, frame: Frame) -> None:
        self._choices = _Choices(asked, frame, divide=False)
        self._offsets = [0] * len(asked.questions)
        self._echo = asked.echo

    def feed(self, piece: Piece) -> bytes:
        """The event that a piece makes."""
        text = piece.text
        if text.note and text.finish is None:
            return _comment(text.note)
        choice, speech, _ = self._choices.take(piece)
        asked = self._choices.asked
        written: dict[str, Any] = {
            "index": piece.number,
            "text": self._echo + speech.words,
            "finish_reason": choice.finish,
            "logprobs": None,
        }
        self._echo = ""
        if asked.logprobs:
            offset = self._offsets[piece.number]
            written["logprobs"] = completion_logprobs(list(text.logprobs), asked.alternatives, offset)
            self._offsets[piece.number] += sum(len(_spelled(one.token)) for one in text.logprobs)
        if not written["text"] and not text.logprobs and text.finish is None:
            return b""
        return event(self._choices.frame.around("text_completion", [written]))

    def finish(self) -> bytes:
        """The counts, where they were asked for, and the end."""
        if not self._choices.asked.include_usage:
            return DONE
        return event({**self._choices.frame.around("text_completion", []), "usage": self._choices.usage()}) + DONE


def chat_logprobs(logprobs: list[SpelledLogprobs] | tuple[SpelledLogprobs, ...], alternatives: int) -> dict[str, Any]:
    """As chat completions write them."""
    return {
        "content": [
            {
                **_logprob(one.token, one.logprob),
                "top_logprobs": [_logprob(token, logprob) for token, logprob in one.top[:alternatives]],
            }
            for one in logprobs
        ],
        "refusal": None,
    }


def _logprob(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _spelled(token), "logprob": _finite(logprob), "bytes": list(token)}


def completion_logprobs(logprobs: list[SpelledLogprobs], alternatives: int, offset: int) -> dict[str, Any]:
    """As completions write them; the first token begins at ``offset`` characters of the answer."""
    tokens = [_spelled(one.token) for one in logprobs]
    offsets = [offset + sum(map(len, tokens[:at])) for at in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        "top_logprobs": [
            {_spelled(token): _finite(logprob) for token, logprob in one.top[:alternatives]} for one in logprobs
        ],
        "text_offset": offsets,
    }


def _spelled(token: bytes) -> str:
    """A token as text; one that is part of a character shows as a replacement character, its bytes stand beside it."""
    return token.decode(errors="replace")


def _finite(logprob: float) -> float:
    """JSON knows no infinity; OpenAI writes -9999 for what is all but impossible."""
    return max(logprob, -9999.0)


def as_json(value: object) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: object) -> bytes:
    """One server-sent event. JSON holds no line break, so it is one ``data`` line."""
    return b"data: " + as_json(value) + b"\n\n"


def _comment(text: str) -> bytes:
    """A line that clients skip; it keeps a connection from looking dead."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def failed(refused: Refused) -> bytes:
    """The error, where a stream of events was to go on."""
    return event(refused.openai_body()) + DONE
