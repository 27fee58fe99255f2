"""The files of one remote source as far as they are wanted, in their folder of the cache.

Whoever calls holds the folder's fetching lock.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from kafila.errors import FetchFailed, ModelIncomplete, ModelNotFound, SourceSilent
from kafila.shard.cache_folder import cannot_write
from kafila.shard.file_names import ABSENT_SUFFIX
from kafila.shard.http_files import Sink, Unchanged
from kafila.shard.journal import Recorded, SparseFile, Version, forget, recorded
from kafila.shard.manifest import MAX_HEADER_BYTES
from kafila.shard.patience import Patience
from kafila.shard.ranges import Range, close_gaps, missing, pieces, total
from kafila.shard.source import Elsewhere, Hub, Members

AT_ONCE = 4
"""Requests in flight: enough to fill a line that one connection does not, few enough for a friend's web server."""
PIECE_BYTES = 32 * 2**20
COMMIT_BYTES = 8 * 2**20
"""What a sudden end may cost each request in flight; a sync every so often costs no throughput that shows."""
_LENGTH = struct.Struct("<Q")

Progress = Callable[[int, int], None]
"""Called with bytes that are there and bytes that are wanted, from any thread. What it raises ends the fetching."""


class SourceFiles(Protocol):
    """What a mirror is filled from: `kafila.shard.http_files.HttpFiles`, or `SharedFiles` around it."""

    @property
    def spare(self) -> float:
        """Of what is wanted, so much more may be fetched to save requests."""
        ...

    def text(self, file: str, known: Version | None = None) -> tuple[Version, bytes] | None:
        """A small file, whole."""
        ...

    def beginning(self, file: str, count: int) -> tuple[Version, bytes]:
        """A file's version and first bytes."""
        ...

    def read(self, file: str, version: Version, start: int, end: int, sink: Sink) -> None:
        """A part of a file, in order."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class Mirror:
    """``told`` hears what the person should know."""

    def __init__(
        self, folder: Path, source: Elsewhere, files: SourceFiles, patience: Patience, told: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._source = source
        self._patience = patience
        self._told = told
        self._files = files
        self._versions: dict[str, Version] = {}
        """Of the files whose header was read: what is fetched of them later must be of the same."""
        self._away = False
        """The source does not answer, and what was fetched before is used."""

    def close(self) -> None:
        """Hang up."""
        self._files.close()

    def text(self, file: str) -> Path | None:
        """A small file, whole and as the source has it now; None where there is none. Raises FetchFailed."""
        path = self._folder / file
        known, absent = recorded(path), path.with_name(path.name + ABSENT_SUFFIX)
        version = None if known is None or known.lacks([(0, known.version.size)]) else known.version
        if self._settled and (version is not None or absent.exists()):
            return None if version is None else path
        try:
            found = self._files.text(file, version)
        except Unchanged:
            return path
        except FetchFailed as error:
            if version is None:
                raise
            self._go_away(error)
            return path
        with self._writing():
            if found is None:
                forget(path)
                absent.touch()
                return None
            absent.unlink(missing_ok=True)
            self._keep(path, *found)
        return path

    def header(self, file: str) -> None:
        """A safetensors file's header and its length, the rest a hole. Raises SourceChanged, ModelError."""
        path = self._folder / file
        known = recorded(path)
        if self._settled and known is not None and _has_header(path, known):
            self._versions[file] = known.version
            return
        try:
            version, first = self._files.beginning(file, _LENGTH.size)
        except ModelNotFound as error:
            raise ModelIncomplete(f"{self._source} has no {file}, which should hold weights") from error
        except FetchFailed as error:
            if known is None or not _has_header(path, known):
                raise
            self._go_away(error)
            self._versions[file] = known.version
            return
        self._versions[file] = version
        if len(first) == version.size:  # a server that gives no parts
            with self._writing():
                self._keep(path, version, first)
            return
        length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, version.size - _LENGTH.size):
            raise ModelIncomplete(f"{self._source}: {file} is truncated or no safetensors file")
        with self._writing(), SparseFile(path, version) as sparse:
            sparse.write(0, first)
            sparse.commit(0, len(first))
            for start, end in sparse.lacks([(0, _LENGTH.size + length)]):
                self._read(sparse, file, version, (start, end), _uncounted)

    def fill(self, wanted: Mapping[str, Sequence[Range]], progress: Progress) -> None:
        """Fetch what is not there yet of the files whose headers were read. Raises SourceChanged, ModelError."""
        spare = self._files.spare
        try:
            self._fill(wanted, spare, progress)
        except SourceSilent:
            if self._files.spare == spare:
                raise
            # It fell silent meanwhile, and who is asked now may not have what lies in the gaps.
            self._fill(wanted, self._files.spare, progress)

    def _fill(self, wanted: Mapping[str, Sequence[Range]], spare: float, progress: Progress) -> None:
        with ExitStack() as stack:
            jobs: list[tuple[SparseFile, str, Range]] = []
            there = 0
            for file, ranges in wanted.items():
                with self._writing():
                    sparse = stack.enter_context(SparseFile(self._folder / file, self._versions[file]))
                lacks = sparse.lacks(ranges)
                there += total(ranges) - total(lacks)
                jobs += [(sparse, file, piece) for piece in pieces(_few(ranges, lacks, spare), PIECE_BYTES)]
            count = _Count(there, there + total(piece for _, _, piece in jobs), progress)
            count.add(0)
            self._all(jobs, count)

    def lacks_bytes(self, wanted: Mapping[str, Sequence[Range]]) -> int:
        """How many bytes `fill` would fetch, at most."""
        found = 0
        for file, ranges in wanted.items():
            known = recorded(self._folder / file)
            same = known is not None and known.version == self._versions.get(file)
            found += total(known.lacks(ranges) if known is not None and same else ranges)
        return found

    def drop(self, file: str) -> None:
        """Forget what was fetched of a file."""
        with self._writing():
            forget(self._folder / file)

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _settled(self) -> bool:
        """Whether what is here need not be compared with the source: neither a commit nor a fingerprint changes."""
        fixed = isinstance(self._source, Members) or (isinstance(self._source, Hub) and self._source.commit is not None)
        return self._away or fixed

    def _go_away(self, error: FetchFailed) -> None:
        self._patience.go_on()
        if not self._away:
            self._told(f"what was fetched before is used: {error}")
        self._away = True

    def _keep(self, path: Path, version: Version, data: bytes) -> None:
        forget(path)
        with SparseFile(path, version) as sparse:
            sparse.write(0, data)
            sparse.commit(0, len(data))

    def _all(self, jobs: Sequence[tuple[SparseFile, str, Range]], count: _Count) -> None:
        """Several at once; the first failure ends them all."""
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kafila-fetch") as pool:
            running = [
                pool.submit(self._read, sparse, file, self._versions[file], piece, count.add)
                for sparse, file, piece in jobs
            ]
            finished, waiting = wait(running, return_when=FIRST_EXCEPTION)
            if waiting:
                count.failed.set()
                for job in waiting:
                    job.cancel()
        for job in finished:
            job.result()

    def _read(
        self, sparse: SparseFile, file: str, version: Version, piece: Range, count: Callable[[int], None]
    ) -> None:
        """One piece, what has come of it committed in any case."""
        committed = at = piece[0]

        def sink(offset: int, data: bytes) -> None:
            nonlocal committed, at
            with self._writing():
                sparse.write(offset, data)
                at = offset + len(data)
                if at - committed >= COMMIT_BYTES:
                    sparse.commit(committed, at)
                    committed = at
            count(len(data))

        try:
            self._files.read(file, version, *piece, sink)
        finally:
            with self._writing():
                sparse.commit(committed, at)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self._folder, error) from error


class _Count:
    """Bytes that are there, over all threads."""

    def __init__(self, done: int, of: int, progress: Progress) -> None:
        self.failed = threading.Event()
        """Set when it is of no use any more to go on."""
        self._done = done
        self._of = of
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self.failed.is_set():
            raise FetchFailed("fetching was given up: another part of it failed")
        with self._lock:
            self._done += count
            self._progress(self._done, self._of)


def _uncounted(_count: int) -> None:
    pass


def _few(wanted: Sequence[Range], lacks: Sequence[Range], spare: float) -> list[Range]:
    """``lacks`` as few requests, with what lies in narrow gaps between them: ``spare`` of all that is wanted."""
    return close_gaps(lacks, int(total(wanted) * spare)) if lacks else []


def _has_header(path: Path, known: Recorded) -> bool:
    if missing([(0, _LENGTH.size)], known.have):
        return False
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(os.pread(file.fileno(), _LENGTH.size, 0))
    return not missing([(0, _LENGTH.size + length)], known.have)
