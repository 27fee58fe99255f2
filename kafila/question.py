"""Whether a question can be meant: checked where it is asked, and again where it is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite

from kafila.errors import UsageError
from kafila.types import Message, Question, Sampling

MAX_LOGPROBS = 20
"""As many as OpenAI's interface gives."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
"""What is withheld until a stop string is decided, at most."""
MAX_BIASES = 1024
_LARGEST = 1000.0
"""Beyond this no temperature, penalty or bias does anything that a smaller one does not."""
_SEEDS = range(-(2**63), 2**64)


def conversation(*turns: tuple[str, str]) -> tuple[Message, ...]:
    """(role, content) pairs as messages."""
    return tuple(Message(role, content) for role, content in turns)


def check(question: Question) -> None:
    """Raise UsageError, one line that names the first thing that is wrong, unless the question can be answered."""
    for fault in (*_faults(question), *_sampling_faults(question.sampling)):
        raise UsageError(fault)


def _faults(question: Question) -> Iterator[str]:
    if (question.prompt is None) == (not question.messages):
        yield "a question is either a conversation of at least one message or a text to continue"
    if not all(_is_text(text) for text in _texts(question)):
        yield "the text has half a character in it (a surrogate without its other half): send whole ones"
    if question.max_tokens < 0:
        yield f"max_tokens is {question.max_tokens}; it counts tokens, 0 meaning no limit"
    if len(question.stop) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in question.stop):
        yield f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARS} characters are possible"
    if question.tools and not isinstance(_json(question.tools), list):
        yield "tools is no JSON list"
    if question.template_options and not isinstance(_json(question.template_options), dict):
        yield "template_options is no JSON object"
    if any(message.extra and not isinstance(_json(message.extra), dict) for message in question.messages):
        yield "a message's extra is no JSON object"


def _texts(question: Question) -> Iterator[str]:
    yield question.prompt or ""
    yield from question.stop
    for message in question.messages:
        yield from (message.role, message.content)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sampling_faults(sampling: Sampling) -> Iterator[str]:
    if not 0 <= sampling.temperature <= _LARGEST:
        yield f"temperature is {sampling.temperature:g}; 0 (always the likeliest token) to 2 is usual"
    if sampling.top_k < 0:
        yield f"top_k is {sampling.top_k}; it counts tokens, 0 meaning no limit"
    for name in ("top_p", "min_p"):
        if not 0 <= getattr(sampling, name) <= 1:
            yield f"{name} is {getattr(sampling, name):g}; it lies between 0 and 1"
    if sampling.seed not in _SEEDS:
        yield "seed does not fit into 64 bits"
    if not 0 < sampling.repetition_penalty <= _LARGEST:
        yield f"repetition_penalty is {sampling.repetition_penalty:g}; it is above 0, and 1 means off"
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(getattr(sampling, name)) <= _LARGEST:
            yield f"{name} is {getattr(sampling, name):g}; -2 to 2 is usual"
    if not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        yield f"logprobs is {sampling.logprobs}; 0 to {MAX_LOGPROBS} are possible"
    if len(sampling.logit_bias) > MAX_BIASES or any(not isfinite(bias) for _, bias in sampling.logit_bias):
        yield f"logit_bias has at most {MAX_BIASES} entries, each a token id and a finite number"


def _json(text: str) -> object:
    """The value, or None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
