"""Where prompts come from: a person at a terminal, or a pipe with one prompt a line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.patch_stdout import patch_stdout

MAX_LINE_CHARS = 1_000_000
"""A prompt longer than any context; what a pipe holds beyond it is not read into memory at once."""


class Leave(Exception):
    """Ctrl-C at the prompt."""


class Lines(Protocol):
    """A source of prompts."""

    async def next_line(self) -> str | None:
        """The next prompt; None at the end. Raises Leave."""
        ...


class PipeLines:
    """One prompt a line of a file or pipe; blank lines are passed over."""

    def __init__(self, source: IO[str]) -> None:
        self._source = source

    async def next_line(self) -> str | None:
        """The next line that is not blank, without its line break."""
        while True:
            # Abandoned on cancellation: a thread cannot be taken out of a read, and the process is about to end.
            line = await trio.to_thread.run_sync(self._source.readline, MAX_LINE_CHARS, abandon_on_cancel=True)
            if not line:
                return None
            if line.strip():
                return line.strip()


class PromptLines:
    """A person at a terminal: line editing, multi-line paste, history kept between sessions in ``history_file``."""

    def __init__(self, prompt: str, history_file: Path | None) -> None:
        self._prompt = prompt
        keys = KeyBindings()
        # Enter asks, so a line break needs another key; what is pasted keeps its own.
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        self._session: PromptSession[str] = PromptSession(history=_history(history_file), key_bindings=keys)

    async def next_line(self) -> str | None:
        """What the person typed; blank lines are passed over."""
        while True:
            line = await self._ask()
            if line is None or line.strip():
                return line

    async def _ask(self) -> str | None:
        """One prompt in a thread. Cancelling ends it there too, so that the terminal is given back as it was."""
        try:
            return await trio.to_thread.run_sync(self._ask_in_thread, abandon_on_cancel=True)
        finally:
            self._stop()

    def _ask_in_thread(self) -> str | None:
        # The patched stdout lets status lines appear above the prompt while it waits.
        with patch_stdout(raw=True):
            try:
                return self._session.prompt(self._prompt, handle_sigint=False)
            except EOFError:
                return None
            except KeyboardInterrupt:
                raise Leave from None

    def _stop(self) -> None:
        app = self._session.app
        if app.is_running and app.loop is not None:
            with contextlib.suppress(RuntimeError):  # it ended, and its loop closed, between the look and the call
                app.loop.call_soon_threadsafe(lambda: app.exit(exception=EOFError) if app.is_running else None)


def _history(file: Path | None) -> History:
    if file is None:
        return InMemoryHistory()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.chmod(0o600)  # it may have come from elsewhere
    except OSError:
        return InMemoryHistory()  # a read-only home must not keep anybody from chatting
    return FileHistory(str(file))


@contextlib.contextmanager
def terminal_kept() -> Iterator[None]:
    """Give the terminal back as it was found, whatever happens inside; nothing where stdin is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415  - not on every platform, and not needed for pipes

    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
