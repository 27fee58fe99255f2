"""A source's files from the source while it does well, and otherwise from members that hold them.

A member that shares (``--share-weights``) asks the source first. Where it does not answer twice in a row, or brings
less than `SLOW_BYTES_PER_S`, neighbours are asked from then on; what none of them gives is waited for from the source
as without them. What a source *says* (no such file, not for this machine, another version) is never asked of others.

What comes from neighbours is of the file that is meant: the source's validator or commit and the length, where they are
known, and the header, which says where each tensor lies. See :mod:`kafila.ring.exchange` for what a piece's own digest
notices, and what it does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import httpx

from kafila.errors import FetchFailed, SourceSilent
from kafila.shard.held import layout_of
from kafila.shard.http_files import SPARE, TEXT_BYTES, HttpFiles, Sink
from kafila.shard.journal import Version
from kafila.shard.neighbours import Neighbours, Nobody
from kafila.shard.patience import Patience
from kafila.shard.source import Elsewhere, Hub, Members
from kafila.types import FilePart, FilePiece

SLOW_BYTES_PER_S = 1_000_000.0
"""A source that brings less is not waited for where neighbours may have it: 8 Mbit/s, an hour for each 3.6 GB."""
SLOW_AFTER_S = 5.0
"""Over so long a time, that a source's slow start is not taken for its speed."""
BRIEF_ATTEMPTS = 2
"""At a source, before neighbours are asked; without them it is given `patience.ATTEMPTS`."""
BRIEF_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
_ANY_LENGTH = 2**62

T = TypeVar("T")


class Pace:
    """How fast a source is, over all threads that read, while any does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._readers = 0
        self._began = 0.0
        self._bytes = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A thread reads within the block."""
        with self._lock:
            if not self._readers:
                self._began, self._bytes = self._clock(), 0
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def is_slow(self, count: int) -> bool:
        """So many more bytes have come; whether fewer have in `SLOW_AFTER_S` than a source should bring."""
        with self._lock:
            self._bytes += count
            spent = self._clock() - self._began
            if spent < SLOW_AFTER_S:
                return False
            slow = self._bytes < SLOW_BYTES_PER_S * spent
            self._began, self._bytes = self._began + spent, 0
            return slow


class _Slow(Exception):
    """The source brings too little."""


class Nowhere:
    """The files of a source that has no address, as `HttpFiles` of one that is silent."""

    spare = 0.0

    def __init__(self, source: Members) -> None:
        self._source = source

    def text(self, file: str, known: Version | None = None) -> NoReturn:  # noqa: ARG002  - as of all sources
        """It does not come."""
        raise SourceSilent(f"{file} of {self._source} is not on this machine")

    def beginning(self, file: str, count: int) -> NoReturn:  # noqa: ARG002  - as above
        """It does not come."""
        self.text(file)

    def read(self, file: str, version: Version, start: int, end: int, sink: Sink) -> NoReturn:  # noqa: ARG002  - as above
        """It does not come."""
        self.text(file)

    def close(self) -> None:
        """There is nothing to hang up."""


def _at_source(source: Elsewhere, patience: Patience) -> tuple[HttpFiles | Nowhere, HttpFiles | Nowhere]:
    """With little patience, and with all."""
    if isinstance(source, Members):
        return Nowhere(source), Nowhere(source)
    return HttpFiles(source, replace(patience, attempts=BRIEF_ATTEMPTS), BRIEF_TIMEOUT), HttpFiles(source, patience)


class SharedFiles:
    """`HttpFiles`, with neighbours behind it. ``folder`` is where the mirror keeps what has come."""

    def __init__(
        self,
        source: Elsewhere,
        folder: Path,
        patience: Patience,
        neighbours: Neighbours,
        told: Callable[[str], None],
        pace: Pace | None = None,
    ) -> None:
        self._source = source
        self._folder = folder
        self._patience = patience
        self._neighbours = neighbours
        self._told = told
        self._pace = pace or Pace()
        self._lock = threading.Lock()
        self._brief, self._patient = _at_source(source, patience)
        self._neighbours_first = False
        self._why: SourceSilent | _Slow | None = None
        """What the source last did instead of bringing what was asked."""

    @property
    def spare(self) -> float:
        """Neighbours hold what they need, and may lack what lies between."""
        return 0.0 if self._neighbours_first else SPARE

    def close(self) -> None:
        """Hang up."""
        self._brief.close()
        self._patient.close()

    def text(self, file: str, known: Version | None = None) -> tuple[Version, bytes] | None:
        """As `HttpFiles.text`. What is ``known`` here is not asked of neighbours."""
        if known is not None:
            return self._brief.text(file, known)
        try:
            if not self._neighbours_first:
                return self._brief.text(file)
        except SourceSilent as silent:
            self._why = silent
        first = self._ask(FilePart(file, 0, _ANY_LENGTH, revision=self._revision))
        if isinstance(first, Nobody):
            return None if first.absent else self._from_source(first, lambda: self._patient.text(file))
        version, data = Version(first.size, first.etag), bytearray(first.data)
        if first.size > TEXT_BYTES:
            raise FetchFailed(f"{file} of {self._source} is longer than {TEXT_BYTES:,} bytes: is it the right address?")
        if (nobody := self._some(file, version, len(data), first.size, lambda _, more: data.extend(more))) is not None:
            return self._from_source(nobody, lambda: self._patient.text(file))
        return version, bytes(data)

    def beginning(self, file: str, count: int) -> tuple[Version, bytes]:
        """As `HttpFiles.beginning`."""
        try:
            if not self._neighbours_first:
                return self._brief.beginning(file, count)
        except SourceSilent as silent:
            self._why = silent
        first = self._ask(FilePart(file, 0, count, revision=self._revision))
        if isinstance(first, Nobody) or len(first.data) < min(count, first.size):
            nobody = first if isinstance(first, Nobody) else Nobody("a neighbour holds too little of it")
            return self._from_source(nobody, lambda: self._patient.beginning(file, count))
        return Version(first.size, first.etag), first.data

    def read(self, file: str, version: Version, start: int, end: int, sink: Sink) -> None:
        """As `HttpFiles.read`."""
        at = start

        def counted(offset: int, data: bytes) -> None:
            nonlocal at
            sink(offset, data)
            at = offset + len(data)

        def watched(offset: int, data: bytes) -> None:
            counted(offset, data)
            if self._pace.is_slow(len(data)) and at < end:
                raise _Slow(f"{self._source} brings less than {SLOW_BYTES_PER_S / 1e6:.0f} MB/s")

        try:
            if not self._neighbours_first:
                with self._pace.reading():
                    self._brief.read(file, version, start, end, watched)
                return
        except (SourceSilent, _Slow) as why:
            self._why = why
        if (nobody := self._some(file, version, at, end, counted)) is not None:
            self._from_source(nobody, lambda: self._patient.read(file, version, at, end, counted))

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _revision(self) -> str:
        return (self._source.commit or "") if isinstance(self._source, Hub) else ""

    def _ask(self, part: FilePart) -> FilePiece | Nobody:
        """Raises the source's own error where there are no neighbours yet."""
        answer = self._neighbours.ask(part, self._patience)
        if isinstance(answer, Nobody) and answer.unasked and isinstance(self._why, SourceSilent):
            raise self._why
        with self._lock:
            turned, self._neighbours_first = self._neighbours_first, True
        if not turned:
            self._told(f"neighbours are asked for what they hold: {self._why}")
        return answer

    def _from_source(self, nobody: Nobody, step: Callable[[], T]) -> T:
        """After all, with all patience."""
        try:
            return step()
        except SourceSilent as silent:
            raise SourceSilent(f"{silent}; of its neighbours, {nobody.reasons}") from silent

    def _some(self, file: str, version: Version, at: int, end: int, sink: Sink) -> Nobody | None:
        """What neighbours give from ``at`` on, into ``sink``; who does not and why where it is not all."""
        layout = layout_of(self._folder / file)
        while at < end:
            piece = self._ask(FilePart(file, at, end, version.size, version.etag, self._revision, layout))
            if isinstance(piece, Nobody):
                return piece
            sink(at, piece.data)
            at += len(piece.data)
        return None
