"""A conversation that has outgrown the context, without its oldest turns (pure).

A turn begins with what the user says, and ends before what the user says next. The question itself stays, and so does
whatever the system says. What is left is a conversation like any other: the model's answer to it is the one it would
give anybody who asked just that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kafila.types import Message, Question

STEPS = 4
"""Turns go in steps of a quarter of the context. Asked with the same beginning again, the next question loses the same
turns, so a conversation is read in anew once a quarter and not with every question; and an answer has a quarter for
itself unless it asks for less."""


@dataclass(frozen=True, slots=True)
class Rolled:
    """A question, its prompt, and how many messages were left out to make it fit."""

    question: Question
    prompt: tuple[int, ...]
    left_out: int


def rolled(question: Question, read: Callable[[Question], Sequence[int]], context: int) -> Rolled:
    """``question`` with as many of its newest turns as fit into ``context`` tokens, if it asks for that
    (``Question.rolling``). Where the question alone is too long it is left as long as that.

    ``read`` makes a prompt of a question; what it raises passes through. Beside the whole conversation it reads no more
    than twice what fits, a logarithm of times.
    """
    prompt = tuple(read(question))
    step = max(context // STEPS, 1)
    too_many = len(prompt) + min(question.max_tokens or step, step) - context
    begins = [at for at, message in enumerate(question.messages) if message.role == "user"]
    if not question.rolling or too_many <= 0 or len(begins) < 2:
        return Rolled(question, prompt, 0)
    most = len(prompt) - -(-too_many // step) * step

    def length(turns: int) -> int:
        return len(read(_newest(question, begins[-turns])))

    reach = 2
    while reach < len(begins) and length(reach) <= most:
        reach *= 2
    turns = 1 + bisect_right(range(2, min(reach, len(begins)) + 1), most, key=length)
    kept = _newest(question, begins[-turns])
    return Rolled(kept, tuple(read(kept)), len(question.messages) - len(kept.messages))


def _newest(question: Question, begin: int) -> Question:
    return replace(question, messages=(*filter(_stays, question.messages[:begin]), *question.messages[begin:]))


def _stays(message: Message) -> bool:
    return message.role == "system"
