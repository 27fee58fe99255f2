"""Status lines for a person: one line a fact, on stderr, so that answers alone are on stdout."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from typing import Any, Protocol

import click

PROGRESS_EVERY_S = 10.0
"""Between two lines of progress where they do not replace each other, as in a log."""


class Console(Protocol):
    """Where a node tells what happens."""

    def status(self, line: str) -> None:
        """A fact."""
        ...

    def progress(self, line: str) -> None:
        """How far something is that takes long; the next line of any kind replaces it."""
        ...

    def error(self, line: str) -> None:
        """What went wrong and what to do."""
        ...

    def invite(self, code: str) -> None:
        """The session code to hand to friends."""
        ...


def styled(text: str, **style: Any) -> str:
    """``text`` as click styles it, plain where somebody has set NO_COLOR (no-color.org). ``click.echo`` leaves styles
    out where nobody sits at a terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def _echo(text: str, *, nl: bool = True) -> None:
    """A line of a log on a full disk, or for a reader that has gone, is lost; the session is not."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True, nl=nl)


class StderrConsole:
    """Lines on stderr; dim on a terminal, plain in a pipe or with NO_COLOR."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._passing = False
        """Whether the line the cursor stands in may be written over."""
        self._told = -PROGRESS_EVERY_S

    def status(self, line: str) -> None:
        """A fact; nothing when quiet."""
        if not self._quiet:
            self._clear()
            _echo(styled(line, dim=True))

    def progress(self, line: str) -> None:
        """In place on a terminal; elsewhere a line now and then. Nothing when quiet."""
        if self._quiet:
            return
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            self._clear()
            _echo(styled(line[:width], dim=True), nl=False)
            self._passing = True
        elif (now := time.monotonic()) >= self._told + PROGRESS_EVERY_S:
            self._told = now
            _echo(line)

    def error(self, line: str) -> None:
        """What went wrong; shown even when quiet."""
        self._clear()
        _echo(styled("error: ", fg="red") + line)

    def invite(self, code: str) -> None:
        """The code, and the command that takes it; shown even when quiet."""
        self._clear()
        _echo(f"session code: {styled(code, bold=True)}")
        _echo(styled(f"friends join with: kafila-node --join {code}", dim=True))

    def _clear(self) -> None:
        if self._passing:
            _echo("\r\x1b[2K", nl=False)
            self._passing = False


_JOINERS = "\u200c\u200d"
"""They print nothing, and hold together the parts of an emoji or the letters of a word."""


def printable(text: str) -> str:
    """Text of somebody else's, without what could move the cursor or colour the terminal: line breaks and tabs stay."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t" or c in _JOINERS)


def is_terminal() -> bool:
    """Whether a person sits at both ends: then there is a prompt, history and Ctrl-C for one answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()
