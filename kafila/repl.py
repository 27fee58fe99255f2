"""The chat prompt: questions to the ring, streamed answers on stdout, a few commands."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import trio

from kafila.api.think import Part, ThinkSplitter
from kafila.console import Console
from kafila.errors import UsageError
from kafila.lines import Lines
from kafila.question import check, conversation
from kafila.ring.frames import Text
from kafila.types import FinishReason, Message, Question, Sampling

HELP = """\
type a question and press Enter, Alt-Enter for a line break; Ctrl-C stops an answer, Ctrl-D leaves
  /ring             who holds what, and the last stage times
  /who              who is here
  /stats            what the last answer took, and where the time went
  /system TEXT      what the model is told before every conversation; without TEXT: nothing
  /temperature T    0 always takes the likeliest word; without T: says what it is
  /window on|off    whether a conversation that outgrows the context loses its oldest turns; without: says
  /save FILE        write the conversation to a new file
  /reset            forget the conversation
  /help             this
  /quit             leave"""


class Asker(Protocol):
    """What the prompt needs of a node."""

    def answer(self, question: Question) -> AbstractAsyncContextManager[AsyncIterator[Text]]:
        """Ask the ring; leaving the context early cancels the answer."""
        ...

    def describe_ring(self) -> str:
        """The ring as a table."""
        ...

    def describe_people(self) -> str:
        """Who is here, a line each."""
        ...


@dataclass(frozen=True, slots=True)
class Took:
    """What an answer took, by this member's clock and by the head's."""

    last: Text
    first_text_s: float
    """From the question to the first text here."""

    def describe(self) -> str:
        """For a person."""
        last = self.last
        way_s = max(self.first_text_s - last.queue_s - last.prefill_s, 0.0)
        known = f", {last.reused_tokens} of them known already" if last.reused_tokens else ""
        lines = [
            f"first word after {_short(self.first_text_s)}: {_short(last.queue_s)} in the queue, "
            f"{_short(last.prefill_s)} for the prompt's way round the ring ({last.prompt_tokens} tokens{known}), "
            f"{_short(way_s)} between here and the head",
            f"{last.answer_tokens} tokens in {_short(last.decode_s)}",
        ]
        if last.decode_s > 0 and last.answer_tokens > 1:
            circuit_s = last.decode_s / (last.answer_tokens - 1)
            lines[1] += f": {1 / circuit_s:.1f} a second, {_short(circuit_s)} once round"
        return "\n".join(lines)


@dataclass(slots=True)
class Chat:
    """One person's conversation. ``remember`` False makes every line its own conversation, as a pipe wants.

    ``think`` shows a reasoning model's thinking, told from its answer; without it both are written as they come.
    """

    node: Asker
    write: Callable[[str], None]
    console: Console
    sampling: Sampling
    max_tokens: int = 0
    remember: bool = True
    think: Callable[[str], None] | None = None
    system: str = ""
    rolling: bool = False
    """Whether a conversation that outgrows the context loses its oldest turns."""
    messages: tuple[Message, ...] = ()
    took: Took | None = None
    unanswered: int = 0
    """Questions that were refused, or that nothing came of; each was told when it happened."""
    _answering: trio.CancelScope | None = None
    _shown: list[str] = field(default_factory=list)
    _thought: bool = False
    """Whether thinking was shown last."""
    _outgrown: int = 0
    """How many of ``messages`` are asked with no more."""

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

    # -- commands -----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> str:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name.strip():
            case "/ring":
                self.write(self.node.describe_ring() + "\n")
            case "/who":
                self.write(self.node.describe_people() + "\n")
            case "/stats":
                self.write((self.took.describe() if self.took else "nothing was answered yet") + "\n")
            case "/system":
                self.system = rest
                self.console.status("the model will be told that first" if rest else "the model is told nothing first")
            case "/temperature":
                self._temperature(rest)
            case "/window":
                self._window(rest)
            case "/save":
                self._save(rest)
            case "/reset":
                self.messages, self._outgrown = (), 0
                self.console.status("the conversation is forgotten")
            case "/help":
                self.write(HELP + "\n")
            case "/quit" | "/exit":
                return "quit"
            case other:
                self.console.error(f"{other} is no command: /help lists them")
        return ""

    def _temperature(self, wish: str) -> None:
        try:
            if wish:
                sampling = replace(self.sampling, temperature=float(wish))
                check(Question(conversation(("user", "?")), sampling=sampling))
                self.sampling = sampling
            self.console.status(f"the temperature is {self.sampling.temperature:g}")
        except UsageError as error:
            self.console.error(str(error))
        except ValueError:
            self.console.error(f"{wish} is no number: /temperature 0.7, say")

    def _window(self, wish: str) -> None:
        if wish not in {"", "on", "off"}:
            self.console.error(f"{wish} is neither on nor off")
            return
        if wish:
            self.rolling, self._outgrown = wish == "on", 0
        does = "loses its oldest turns" if self.rolling else "ends there"
        self.console.status(f"a conversation that outgrows the context {does}")

    def _save(self, name: str) -> None:
        if not name:
            self.console.error("say where to: /save FILE")
            return
        file = Path(name).expanduser()
        try:
            with file.open("x", encoding="utf-8") as saved:
                for message in (*self._system(), *self.messages):
                    saved.write(f"## {message.role}\n\n{message.content.strip()}\n\n")
        except FileExistsError:
            self.console.error(f"{file} is there already: choose another name")
        except OSError as error:
            self.console.error(f"{file} cannot be written: {error.strerror}")
        else:
            self.console.status(f"the conversation is in {file}")

    # -- questions ----------------------------------------------------------------------------------------------------

    def _system(self) -> tuple[Message, ...]:
        return conversation(*([("system", self.system)] if self.system else []))

    def _asked(self, turn: Message) -> Question:
        messages = (*self._system(), *self.messages[self._outgrown :], turn)
        return Question(messages, None, self.sampling, self.max_tokens, rolling=self.rolling)

    async def _question(self, line: str) -> None:
        turn = Message("user", line)
        self._shown, self._thought = [], False
        last: Text | None = None
        with trio.CancelScope() as self._answering:
            last = await self._answer(self._asked(turn))
        stopped = self._answering.cancelled_caught
        self._answering = None
        self.write("\n")
        self._tell_end(last, stopped)
        refused = last is not None and last.finish in {FinishReason.ERROR, FinishReason.BUSY}
        if refused or (not self._shown and last is not None and last.finish is FinishReason.CONTEXT):
            self.unanswered += 1
        if self.remember and self._shown and not refused:
            self.messages = (*self.messages, turn, Message("assistant", "".join(self._shown)))

    async def _answer(self, question: Question) -> Text | None:
        """Show an answer as it comes; its last part."""
        asked_at, first_text_s, last, left_out = trio.current_time(), 0.0, None, 0
        thoughts = ThinkSplitter()
        async with self.node.answer(question) as texts:
            async for text in texts:
                if text.note and text.finish is None:
                    self.console.status(text.note)
                if text.left_out > left_out:
                    left_out = text.left_out
                    self._leave_out(left_out)
                if text.delta and not self._shown:
                    first_text_s = trio.current_time() - asked_at
                if text.delta:
                    self._shown.append(text.delta)
                    self._show(text.delta, thoughts)
                last = text
        self._tell(thoughts.finish())
        if last is not None and self._shown:
            self.took = Took(last, first_text_s)
        return last

    def _leave_out(self, messages: int) -> None:
        self._outgrown += messages
        self.console.status(f"the conversation outgrew the context: its oldest {messages} messages are left out")

    def _show(self, delta: str, thoughts: ThinkSplitter) -> None:
        if self.think is None:
            self.write(delta)
        else:
            self._tell(thoughts.feed(delta))

    def _tell(self, part: Part) -> None:
        if self.think is not None and part.thinking:
            self.think(part.thinking)
            self._thought = True
        if part.words:
            self.write("\n\n" * self._thought + part.words)
            self._thought = False

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
