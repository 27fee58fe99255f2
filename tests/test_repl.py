from __future__ import annotations

import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import click
import pytest
import trio
from trio.testing import MockClock

from kafila.console import printable, styled
from kafila.lines import PromptLines
from kafila.repl import Chat
from kafila.ring.frames import Text
from kafila.types import FinishReason, NodeId, Question, Sampling
from tests.party import Screen

ME = NodeId(b"somebody")


class Ring:
    """Answers every question with the same parts, a second between two."""

    def __init__(self, *deltas: str, end: Text | None = None) -> None:
        self.questions: list[Question] = []
        self._deltas = deltas
        self._end = end or Text("r", ME, "", FinishReason.STOP, "", 30, 20, 11, 0.25, 1.5, 5.0)

    @asynccontextmanager
    async def answer(self, question: Question) -> AsyncIterator[AsyncIterator[Text]]:
        self.questions.append(question)
        yield self._texts()

    async def _texts(self) -> AsyncIterator[Text]:
        for delta in self._deltas:
            await trio.sleep(1)
            yield Text("r", ME, delta)
        yield self._end

    def describe_ring(self) -> str:
        return "the ring"

    def describe_people(self) -> str:
        return "the people"


class Typed:
    """Lines that a person types."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    async def next_line(self) -> str | None:
        await trio.lowlevel.checkpoint()
        return self._lines.pop(0) if self._lines else None


async def talk(ring: Ring, *lines: str, styles: bool = False, remember: bool = True) -> tuple[str, Screen, Chat]:
    """What stood on stdout; thoughts in brackets where they are told apart."""
    out: list[str] = []
    screen = Screen()
    think = (lambda text: out.append(f"[{text}]")) if styles else None
    chat = Chat(ring, out.append, screen, Sampling(), remember=remember, think=think)
    await chat.run(Typed(lines))
    return "".join(out), screen, chat


def turns(question: Question) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in question.messages]


async def test_a_conversation_is_remembered_and_forgotten(autojump_clock: MockClock) -> None:
    ring = Ring("good ", "day")
    out, _, _ = await talk(ring, "hello", "and?", "/reset", "again")
    assert out == "good day\n" * 3
    asked = [("user", "hello"), ("assistant", "good day"), ("user", "and?")]
    assert [turns(question) for question in ring.questions] == [asked[:1], asked, [("user", "again")]]


async def test_in_a_pipe_every_line_is_its_own_and_everything_is_written(autojump_clock: MockClock) -> None:
    ring = Ring("<think>hm</think>", "day")
    out, _, _ = await talk(ring, "hello", "and?", remember=False)
    assert out == "<think>hm</think>day\n" * 2
    assert [len(question.messages) for question in ring.questions] == [1, 1]


@pytest.mark.parametrize(
    "deltas",
    [
        ("<think>\nwell, hm\n</think>\n\nhello there",),
        ("<th", "ink>well", ", hm\n</", "think>", "\n\nhel", "lo there"),
        tuple("<think>well, hm</think>hello there"),
    ],
)
async def test_thinking_is_shown_apart(deltas: tuple[str, ...], autojump_clock: MockClock) -> None:
    out, _, chat = await talk(Ring(*deltas), "hello", styles=True)
    assert out.replace("][", "") == "[well, hm]\n\nhello there\n"
    assert chat.messages[1].content == "".join(deltas)


async def test_what_ends_before_the_thinking_does_is_shown(autojump_clock: MockClock) -> None:
    out, _, _ = await talk(Ring("<think>we", "ll"), "hello", styles=True)
    assert out.replace("][", "") == "[well]\n"


async def test_system_and_temperature_count_from_the_next_question(autojump_clock: MockClock) -> None:
    ring = Ring("x")
    _, screen, _ = await talk(
        ring, "a", "/system be brief", "/temperature 0.5", "b", "/system", "/temperature", "/temperature no",
        "/temperature -1", "/temperature nan", "c",
    )  # fmt: skip
    first, second, third = ring.questions
    assert turns(second)[0] == ("system", "be brief")
    assert (first.sampling.temperature, second.sampling.temperature, third.sampling.temperature) == (0, 0.5, 0.5)
    assert "system" not in [role for role, _ in turns(first) + turns(third)]
    assert len(screen.errors) == 3
    assert "the temperature is 0.5" in screen.lines


async def test_a_conversation_is_saved_once_to_a_file(tmp_path: Path, autojump_clock: MockClock) -> None:
    file = tmp_path / "talk.md"
    _, screen, _ = await talk(Ring("a day"), "/system be brief", "hi", f"/save {file}", f"/save {file}", "/save")
    assert file.read_text() == "## system\n\nbe brief\n\n## user\n\nhi\n\n## assistant\n\na day\n\n"
    assert "is there already" in screen.errors[0]
    assert "/save FILE" in screen.errors[1]
    _, screen, _ = await talk(Ring("a day"), f"/save {tmp_path}/no/such/folder")
    assert "cannot be written" in screen.errors[0]


async def test_stats_say_where_the_time_went(autojump_clock: MockClock) -> None:
    out, _, _ = await talk(Ring("", "a", "b"), "/stats", "hi", "/stats")
    before, after = out.split("ab\n")
    assert before == "nothing was answered yet\n"
    assert "first word after 2.0 s: 0.25 s in the queue, 1.5 s for" in after
    assert "30 tokens, 20 of them known already" in after
    assert "0.25 s between here and the head" in after
    assert "11 tokens in 5.0 s: 2.0 a second, 0.50 s once round" in after


async def test_who_ring_help_and_nonsense(autojump_clock: MockClock) -> None:
    out, screen, _ = await talk(Ring(), "/who", "/ring", "/help", "/nonsense x", "/quit", "never asked")
    assert out.startswith("the people\nthe ring\n")
    assert "/stats" in out
    assert screen.errors == ["/nonsense is no command: /help lists them"]


async def test_a_refused_question_is_not_remembered(autojump_clock: MockClock) -> None:
    end = Text("r", ME, "", FinishReason.BUSY, "too many wait")
    _, screen, chat = await talk(Ring("x", end=end), "hi")
    assert chat.messages == ()
    assert chat.unanswered == 1
    assert screen.errors == ["too many wait"]


def test_emoji_and_joined_letters_stay_whole_and_escapes_do_not() -> None:
    assert printable("👩‍💻 नमस्ते é 中文\n\tx") == "👩‍💻 नमस्ते é 中文\n\tx"
    assert printable("\x1b[2Jx\r\x07\u202e") == "[2Jx"


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert click.unstyle(styled("x", dim=True)) == "x" != styled("x", dim=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", dim=True) == "x"


def test_history_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "state/history"
    file.parent.mkdir()
    file.touch(mode=0o644)
    PromptLines("> ", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_window_rolls_when_it_is_wished_for(autojump_clock: MockClock) -> None:
    ring = Ring("fine", end=Text("r", ME, "", FinishReason.STOP, left_out=2))
    _, screen, chat = await talk(
        ring, "one", "/window", "/window on", "two", "three", "/window off", "four", "/window x"
    )
    assert [question.rolling for question in ring.questions] == [False, True, True, False]
    assert "a conversation that outgrows the context ends there" in screen.lines
    assert "a conversation that outgrows the context loses its oldest turns" in screen.lines
    assert sum("its oldest 2 messages are left out" in line for line in screen.lines) >= 2
    assert [len(question.messages) for question in ring.questions][-2:] == [3, 7]
    assert len(chat.messages) == 8
    assert screen.errors == ["x is neither on nor off"]
