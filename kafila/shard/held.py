"""What a member holds of the session's checkpoint, read for its neighbours.

A neighbour names a file and a place in it. Only files of the one checkpoint are looked for, by names that this member
knows itself; of a folder of the cache only what its journals call complete is read. What is in the cache of other
plans' shares counts as well.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kafila.errors import ModelError
from kafila.shard.cache_folder import SOURCE_NAME
from kafila.shard.config import parse_config
from kafila.shard.file_names import ABSENT_SUFFIX, CONFIG_NAME, GENERATION_NAME, LANGUAGE_FILES
from kafila.shard.journal import Recorded, Version, recorded
from kafila.shard.manifest import INDEX_NAME, MAX_HEADER_BYTES, weight_files
from kafila.shard.ranges import Range, missing
from kafila.types import FilePart, FilePiece, Withheld

_LENGTH = struct.Struct("<Q")
_TEXTS = frozenset({CONFIG_NAME, GENERATION_NAME, INDEX_NAME, *LANGUAGE_FILES})


@dataclass(slots=True)
class Held:
    """A checkpoint's folder on this machine, at a ``revision`` where it is the hub's. Any one thread may read."""

    folder: Path
    revision: str = ""
    _weights: frozenset[str] = frozenset()

    def read(self, part: FilePart) -> FilePiece | Withheld:
        """What is there from the part's start on, if it is what is meant. Never raises for what a neighbour asks."""
        if part.file not in _TEXTS and part.file not in self._weight_files():
            return Withheld.NOT_HELD
        path = self.folder / part.file
        try:
            with path.open("rb", buffering=0) as file:
                return self._read(path, file.fileno(), part)
        except FileNotFoundError:
            known_absent = not self._is_cache or path.with_name(path.name + ABSENT_SUFFIX).exists()
            return Withheld.ABSENT if known_absent and part.file in _TEXTS else Withheld.NOT_HELD
        except OSError:
            return Withheld.NOT_HELD  # unreadable here; its own loading says why

    @property
    def _is_cache(self) -> bool:
        return (self.folder / SOURCE_NAME).is_file()

    def _weight_files(self) -> frozenset[str]:
        """Names of the files that hold weights; none while that is not known yet."""
        if not self._weights:
            with suppress(ModelError, OSError):
                config = parse_config((self.folder / CONFIG_NAME).read_bytes())
                self._weights = frozenset(weight_files(self.folder, config))
        return self._weights

    def _read(self, path: Path, descriptor: int, part: FilePart) -> FilePiece | Withheld:
        known = recorded(path) if self._is_cache else _whole(descriptor)
        if known is None:
            return Withheld.NOT_HELD
        if not self._is_meant(known, descriptor, part):
            return Withheld.OTHER_VERSION
        end = min(part.end, known.version.size)
        lacks = known.lacks([(part.start, end)])
        stop = lacks[0][0] if lacks else end
        if stop <= part.start and known.version.size:
            return Withheld.NOT_HELD
        data = os.pread(descriptor, stop - part.start, part.start)
        if len(data) < stop - part.start or os.fstat(descriptor).st_ino != path.stat().st_ino:
            return Withheld.NOT_HELD  # cut short, or begun anew, while it was read
        return FilePiece(part.start, known.version.size, known.version.etag, data)

    def _is_meant(self, known: Recorded, descriptor: int, part: FilePart) -> bool:
        """Whether this is the file that the neighbour knows a little of."""
        version = known.version
        same_commit = bool(part.revision) and part.revision == self.revision
        if part.etag and version.etag and part.etag != version.etag and not same_commit:
            return False
        if part.size and part.size != version.size:
            return False
        return not part.layout or part.layout == layout(descriptor, known)


def layout(descriptor: int, known: Recorded) -> bytes:
    """SHA-256 of a safetensors file's header, its length included; empty where it is not all there."""
    if missing([(0, _LENGTH.size)], known.have):
        return b""
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    header: Range = (0, _LENGTH.size + length)
    if length > MAX_HEADER_BYTES or header[1] > known.version.size or missing([header], known.have):
        return b""
    return sha256(os.pread(descriptor, header[1], 0)).digest()


def layout_of(path: Path) -> bytes:
    """The same of a file of the cache."""
    known = recorded(path)
    if known is None:
        return b""
    with path.open("rb", buffering=0) as file:
        return layout(file.fileno(), known)


def _whole(descriptor: int) -> Recorded:
    """A file of a folder that nobody fills in places."""
    size = os.fstat(descriptor).st_size
    return Recorded(Version(size, ""), ((0, size),))
