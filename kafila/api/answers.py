"""Answers to one request: asked side by side, told apart by their numbers, and how each ended (Trio)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

import trio

from kafila.api.engine import Engine
from kafila.api.refusals import Refused
from kafila.errors import KafilaError
from kafila.ring.frames import Text
from kafila.types import FinishReason, NodeId, Question


class Piece(NamedTuple):
    """A part of the answer with this number."""

    number: int
    text: Text


@asynccontextmanager
async def asked_of(engine: Engine, questions: Sequence[Question]) -> AsyncIterator[AsyncIterator[Piece]]:
    """Ask all of them at once. The pieces end when every answer has; leaving early cancels those that have not."""
    if len(questions) == 1:
        async with aclosing(_pieces(engine, 0, questions[0])) as pieces:
            yield pieces
        return
    # No buffer: what a slow reader has not taken stays with the answers themselves, which keep it as one piece each.
    send, receive = trio.open_memory_channel[Piece](0)
    async with trio.open_nursery() as nursery, receive:
        async with send:
            for index, question in enumerate(questions):
                nursery.start_soon(_forward, engine, index, question, send.clone())
        yield receive
        nursery.cancel_scope.cancel()


async def _forward(engine: Engine, index: int, question: Question, to: trio.MemorySendChannel[Piece]) -> None:
    async with to, aclosing(_pieces(engine, index, question)) as pieces:
        async for piece in pieces:
            await to.send(piece)


async def _pieces(engine: Engine, index: int, question: Question) -> AsyncGenerator[Piece, None]:
    try:
        async with engine.answer(question) as texts:
            async for text in texts:
                yield Piece(index, text)
    except KafilaError as error:  # nobody can answer now: an answer that is over at once
        yield Piece(index, Text("", NodeId(b""), "", FinishReason.MEMBER_LEFT, str(error)))


def refusal(text: Text) -> Refused | None:
    """What an answer's last part says of an answer that there is none, or no whole one, of."""
    note = text.note or "the answer ended early"
    match text.finish:
        case FinishReason.BUSY:
            return Refused(429, note, code="queue_full")
        case FinishReason.ERROR:
            return Refused(400, note, code="invalid_value")
        case FinishReason.CONTEXT if not text.prompt_tokens:
            return Refused(400, note, code="context_length_exceeded", param="messages")
        case FinishReason.MEMBER_LEFT:
            return Refused(503, note, code="session_over")
        case _:
            return None


FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CONTEXT: "length"}
"""How both interfaces call an answer's end. Theirs know no full context; for them it is a length like any other."""
