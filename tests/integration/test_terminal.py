"""The prompt on a real terminal: a pseudo-terminal with a person's keys typed into it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.models import talking_checkpoint
from tests.integration.processes import PATIENCE_S

CTRL_C = b"\x03"
CTRL_D = b"\x04"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


def _take_terminal() -> None:
    """Make standard input the controlling terminal of a new session, so that Ctrl-C is a signal there."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A process whose terminal is ours."""

    def __init__(self, *options: str, home: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        environment = {**os.environ, "HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        command = [sys.executable, "-m", "kafila", "--threads", "1", *options]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509  - between fork and exec nothing else runs; no thread holds a lock
        )
        self.screen = ""

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, text: str, count: int = 1) -> None:
        """Read until ``text`` has been shown ``count`` times."""
        while self.screen.count(text) < count:
            self._read(f"{text!r}")

    def until_prompt_after(self, text: str) -> None:
        """Read until ``text``, then the prompt again: keys typed before that are the terminal's, not the prompt's."""
        self.until(text)
        while ">" not in self.screen.rpartition(text)[2]:
            self._read(f"a prompt after {text!r}")

    def until_longer(self, characters: int) -> None:
        """Read until so much more has been shown."""
        wanted = len(self.screen) + characters
        while len(self.screen) < wanted:
            self._read("anything more")

    def _read(self, what: str) -> None:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE_S)
        assert ready, f"never shown: {what}\n{self.screen}"
        try:
            data = os.read(self._ours, 65536)
        except OSError as error:  # Linux says EIO when the other side is gone
            raise AssertionError(f"ended before this was shown: {what}\n{self.screen}") from error
        self.screen += _ESCAPES.sub("", data.decode(errors="replace"))

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def kept(self) -> bool:
        """Whether the terminal is as it was found."""
        return termios.tcgetattr(self._theirs) == self.before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint(tmp_path_factory.mktemp("models") / "tiny", endless=True, max_position_embeddings=8192)


@pytest.fixture
def terminal(model: Path, tmp_path: Path) -> Iterator[Terminal]:
    options = ["--host", "--model", str(model), "--members", "1", "--context", "8000", "--max-tokens", "5000"]
    shown = Terminal(*options, home=tmp_path)
    try:
        shown.until_prompt_after("lists the commands")
        yield shown
    finally:
        shown.close()


def test_commands_answers_and_history(terminal: Terminal, tmp_path: Path) -> None:
    terminal.press(b"/help\r")
    terminal.until_prompt_after("/quit             leave")
    terminal.press(b"/ring\r")
    terminal.until_prompt_after("0-3 + head")
    terminal.press(b"/nonsense\r")
    terminal.until_prompt_after("is no command: /help lists them")
    terminal.press(b"/reset\r")
    terminal.until_prompt_after("the conversation is forgotten")
    terminal.press(CTRL_D)
    assert terminal.wait() == 0
    assert terminal.kept()
    assert "/ring" in (tmp_path / ".local/state/kafila/history").read_text()


def test_what_is_pasted_is_one_question_whatever_its_lines(terminal: Terminal, tmp_path: Path) -> None:
    terminal.press(b"/temperature 0.5\r")
    terminal.until_prompt_after("the temperature is 0.5")
    terminal.press(b"\x1b[200~first line\nsecond line\x1b[201~")
    terminal.until("second line")
    terminal.press(b"\r")
    terminal.until_longer(60)
    terminal.press(CTRL_C)
    terminal.until_prompt_after("stopped")
    file = tmp_path / "talk.md"
    terminal.press(f"/save {file}\r".encode())
    terminal.until_prompt_after("the conversation is in")
    assert file.read_text().startswith("## user\n\nfirst line\nsecond line\n\n## assistant")
    terminal.press(CTRL_D)
    assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_then_leaves(terminal: Terminal) -> None:
    terminal.press(b"hello\r")
    terminal.until_longer(60)
    terminal.press(CTRL_C)
    terminal.until_prompt_after("stopped")
    terminal.press(CTRL_C)
    assert terminal.wait() == 130
    assert terminal.kept()


def test_a_signal_gives_the_terminal_back(terminal: Terminal) -> None:
    terminal.process.terminate()
    assert terminal.wait() == 130
    assert terminal.kept()
