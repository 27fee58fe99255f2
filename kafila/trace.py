"""What a session measured, one JSON object a line (DESIGN section 9).

    {"at_s": 12.3, "what": "plan", ...}     the plan as everybody was given it
    {"at_s": 14.0, "what": "path", ...}     an edge changed its path
    {"at_s": 15.1, "what": "batch", ...}    one batch went round: stage times, circuit, rows, prefill or decode, and the
                                            bytes of its rows, which crossed every edge
    {"at_s": 19.9, "what": "answer", ...}   an answer ended: tokens, time to the first one, time for the rest

Times are the node's own clock from the first record on. Records are written as they happen, so a killed node leaves
all but its last line; a batch costs one small dictionary, nothing when no trace is kept. `kafila.trace_reading` reads
them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol


class Recorder(Protocol):
    """Whoever wants to know what a session measured."""

    def record(self, what: str, now: float, facts: Mapping[str, Any]) -> None:
        """One fact, at ``now`` seconds of the node's clock."""
        ...


class Silence:
    """Keeps nothing."""

    def record(self, what: str, now: float, facts: Mapping[str, Any]) -> None:
        """Nothing."""


class TraceFile:
    """Writes records to an open text file, which stays the caller's to close. Times count from the first record.

    A file that cannot be written any more ends the trace and nothing else; ``tell`` is told why, once."""

    def __init__(self, file: IO[str], tell: Callable[[str], object] = str) -> None:
        self._file: IO[str] | None = file
        self._tell = tell
        self._began_at: float | None = None

    def record(self, what: str, now: float, facts: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is None:
            return
        if self._began_at is None:
            self._began_at = now
        line = {"at_s": round(now - self._began_at, 6), "what": what, **facts}
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self._file = None
            self._tell(error.strerror or str(error))
