"""Files that are filled in places, and the journals that say which places: a hole is never taken for data.

Beside ``model.safetensors``, which has its full length from the start, stands ``model.safetensors.journal``: what the
source said the file is, then the byte ranges that are complete. A range is written there only after its data has been
synced, and each line carries its own checksum, so whenever the process or the machine stops, what the journal says is
true; at most the ranges in flight are lost.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kafila.shard.ranges import Range, merge, missing

SUFFIX = ".journal"


@dataclass(frozen=True, slots=True)
class Version:
    """Which file a source has under a name."""

    size: int
    """Bytes."""
    etag: str
    """The source's validator: its ETag, else its date, else empty."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a journal says."""

    version: Version
    have: tuple[Range, ...]

    def lacks(self, ranges: Iterable[Range]) -> list[Range]:
        """What of ``ranges`` is not there yet."""
        return missing(ranges, self.have)


def journal_path(path: Path) -> Path:
    """Where the journal of the file at ``path`` stands."""
    return path.with_name(path.name + SUFFIX)


def recorded(path: Path) -> Recorded | None:
    """What is known of the file at ``path``; None where nothing is, or its data is not what the journal is about."""
    try:
        lines = journal_path(path).read_bytes().split(b"\n")[:-1]
        size = path.stat().st_size
    except OSError:
        return None
    texts = []
    for line in lines:
        if (text := _checked(line)) is None:
            break  # the machine stopped while this was written; nothing after it counts
        texts.append(text)
    if not texts:
        return None
    first = json.loads(texts[0])
    version = Version(first["bytes"], first["etag"])
    if version.size != size:
        return None
    have = [(int(start), int(end)) for start, _, end in (text.partition(" ") for text in texts[1:])]
    return Recorded(version, tuple(merge(have)))


class SparseFile:
    """A file being filled. One process at a time may have it (the cache's lock); any of its threads may write."""

    def __init__(self, path: Path, version: Version) -> None:
        """Continue what is there of ``version``, or begin anew. Raises OSError."""
        known = recorded(path)
        have = known.have if known is not None and known.version == version else None
        if have is None:
            _begin(path, version)
        _write_journal(path, version, have or ())
        self._lock = threading.Lock()
        self._have = list(have or ())
        self._data = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._journal = os.open(journal_path(path), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._data)
        os.close(self._journal)

    def lacks(self, ranges: Iterable[Range]) -> list[Range]:
        """What of ``ranges`` is not there yet."""
        with self._lock:
            return missing(ranges, self._have)

    def write(self, at: int, data: bytes) -> None:
        """Put bytes in their place; they count once committed. Raises OSError, as when the disk is full."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._data, view, at)
            at, view = at + written, view[written:]

    def commit(self, start: int, end: int) -> None:
        """Bytes ``start`` to ``end`` are written: make that last. Raises OSError."""
        if start == end:
            return
        os.fsync(self._data)
        with self._lock:
            os.write(self._journal, _line(f"{start} {end}"))
            os.fsync(self._journal)
            self._have = merge([*self._have, (start, end)])


def forget(path: Path) -> None:
    """Drop the file at ``path``. A process that has it mapped keeps what it maps."""
    # The journal first: data without a journal is nothing, a journal without its data would be a lie.
    for gone in (journal_path(path), path):
        with suppress(FileNotFoundError):
            gone.unlink()


def _begin(path: Path, version: Version) -> None:
    forget(path)
    with path.open("xb") as file:
        file.truncate(version.size)
        os.fsync(file.fileno())


def _write_journal(path: Path, version: Version, have: Iterable[Range]) -> None:
    """Whole and in one step: also what puts a journal right whose last line was torn."""
    place = journal_path(path)
    draft = place.with_name(place.name + ".new")
    with draft.open("wb") as file:
        file.write(_line(json.dumps({"bytes": version.size, "etag": version.etag})))
        file.writelines(_line(f"{start} {end}") for start, end in have)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(place)
    folder = os.open(place.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _line(text: str) -> bytes:
    data = text.encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _checked(line: bytes) -> str | None:
    mark, _, data = line.partition(b" ")
    return data.decode() if mark == b"%08x" % zlib.crc32(data) else None
