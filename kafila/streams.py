"""The standard streams, fit to be used whatever the shell made of them."""

from __future__ import annotations

import io
import os
import sys

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def steady_streams() -> None:
    """A stream that was closed (``>&-``) leads nowhere: without one, the next socket would have its number. Bytes that
    are no text are read as U+FFFD, and characters that the terminal's encoding lacks are written as ``?``."""
    for number, (name, mode) in enumerate(_MODES.items()):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
