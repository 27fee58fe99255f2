"""The chat prompt: questions to the ring, streamed answers on stdout, a few commands."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import trio

from kafila.console import Console
from kafila.lines import Lines
from kafila.ring.frames import Text
from kafila.types import FinishReason, Message, Question, Sampling

HELP = """\
type a question and press Enter; Ctrl-C stops an answer, Ctrl-D leaves
  /ring    who holds what, and the last stage times
  /reset   forget the conversation
  /help    this
  /quit    leave"""


class Asker(Protocol):
    """What the prompt needs of a node."""

    def answer(self, question: Question) -> AbstractAsyncContextManager[AsyncIterator[Text]]:
        """Ask the ring; leaving the context early cancels the answer."""
        ...

    def describe_ring(self) -> str:
        """The ring as a table."""
        ...


@dataclass(slots=True)
class Chat:
    """One person's conversation. ``remember`` False makes every line its own conversation, as a pipe wants."""

    node: Asker
    write: Callable[[str], None]
    console: Console
    sampling: Sampling
    max_tokens: int = 0
    remember: bool = True
    messages: tuple[Message, ...] = ()
    _answering: trio.CancelScope | None = None

    async def run(self, lines: Lines) -> None:
        """Until the lines end or somebody says /quit."""
        while (line := await lines.next_line()) is not None:
            if line.startswith("/"):
                if self._command(line) == "quit":
                    return
            else:
                await self._question(line)

    def stop_answer(self) -> bool:
        """Stop the answer that is streaming; False when none is."""
        if self._answering is None:
            return False
        self._answering.cancel()
        return True

    def _command(self, line: str) -> str:
        match line.split(maxsplit=1)[0]:
            case "/ring":
                self.write(self.node.describe_ring() + "\n")
            case "/reset":
                self.messages = ()
                self.console.status("the conversation is forgotten")
            case "/help":
                self.write(HELP + "\n")
            case "/quit" | "/exit":
                return "quit"
            case other:
                self.console.error(f"{other} is no command: /help lists them")
        return ""

    async def _question(self, question: str) -> None:
        asked = (*self.messages, Message("user", question))
        shown: list[str] = []
        last: Text | None = None
        with trio.CancelScope() as self._answering:
            async with self.node.answer(Question(asked, None, self.sampling, self.max_tokens)) as texts:
                async for text in texts:
                    if text.note and text.finish is None:
                        self.console.status(text.note)
                    self.write(text.delta)
                    shown.append(text.delta)
                    last = text
        stopped = self._answering.cancelled_caught
        self._answering = None
        self.write("\n")
        self._tell_end(last, stopped)
        if (
            self.remember
            and shown
            and not (last is not None and last.finish in {FinishReason.ERROR, FinishReason.BUSY})
        ):
            self.messages = (*asked, Message("assistant", "".join(shown)))

    def _tell_end(self, last: Text | None, stopped: bool) -> None:
        if stopped:
            self.console.status("stopped")
        elif last is None or last.finish is None:
            return
        elif last.finish is FinishReason.MEMBER_LEFT:
            return  # the node is about to say who left, for everybody
        elif last.finish in {FinishReason.ERROR, FinishReason.BUSY, FinishReason.CONTEXT}:
            self.console.error(last.note or last.finish.value)
        elif last.decode_s > 0 and last.answer_tokens > 1:
            rate = (last.answer_tokens - 1) / last.decode_s
            first = _short(last.queue_s + last.prefill_s)
            self.console.status(f"{last.answer_tokens} tokens, {rate:.1f} a second, the first after {first}")


def _short(duration_s: float) -> str:
    """A duration for a person: 12 ms, 0.34 s, 5.6 s."""
    if duration_s < 0.1:
        return f"{math.ceil(duration_s * 1000)} ms"
    return f"{duration_s:.2f} s" if duration_s < 1 else f"{duration_s:.1f} s"
