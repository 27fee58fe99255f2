"""Status lines for a person: one line a fact, on stderr, so that answers alone are on stdout."""

from __future__ import annotations

import sys
from typing import Protocol

import click


class Console(Protocol):
    """Where a node tells what happens."""

    def status(self, line: str) -> None:
        """A fact."""
        ...

    def error(self, line: str) -> None:
        """What went wrong and what to do."""
        ...

    def invite(self, code: str) -> None:
        """The session code to hand to friends."""
        ...


class StderrConsole:
    """Lines on stderr; dim on a terminal, plain in a pipe or with NO_COLOR (click looks)."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def status(self, line: str) -> None:
        """A fact; nothing when quiet."""
        if not self._quiet:
            click.secho(line, dim=True, err=True)

    def error(self, line: str) -> None:
        """What went wrong; shown even when quiet."""
        click.echo(click.style("error: ", fg="red") + line, err=True)

    def invite(self, code: str) -> None:
        """The code, and the command that takes it; shown even when quiet."""
        click.echo(f"session code: {click.style(code, bold=True)}", err=True)
        click.secho(f"friends join with: kafila-node --join {code}", dim=True, err=True)


def printable(text: str) -> str:
    """Text of somebody else's, without what could move the cursor or colour the terminal: line breaks and tabs stay."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def is_terminal() -> bool:
    """Whether a person sits at both ends: then there is a prompt, history and Ctrl-C for one answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()
