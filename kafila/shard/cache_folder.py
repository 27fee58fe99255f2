"""The cache of fetched checkpoints: a folder each, which processes of this machine share.

    checkpoints/SmolLM2-135M-Instruct-1f0c9a7be2d4/
        source.json             where it comes from
        config.json             with its journal, as every file (kafila.shard.journal)
        model.safetensors       of full length, filled where some plan needed it
        .fetching  .in-use      lock files

Whoever fetches holds ``.fetching`` alone, so two processes never fetch one byte twice. Whoever uses the folder shares
``.in-use``, so that it is not pruned under it. Locks are the kernel's (flock) and end with their process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kafila.errors import FetchFailed, ModelIncomplete
from kafila.shard.journal import SUFFIX, Version, recorded
from kafila.shard.patience import Patience
from kafila.shard.ranges import total
from kafila.types import TensorSpec

SOURCE_NAME = "source.json"
_FETCHING = ".fetching"
_IN_USE = ".in-use"
_POLL_S = 0.2
"""A wait for a lock must end when the member leaves, which a blocking flock would not."""
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def cache_folder() -> Path:
    """Where fetched checkpoints lie on this machine (it need not exist yet)."""
    if sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        # The XDG base directory specification: an empty value counts as unset, a relative one is ignored.
        named = os.environ.get("XDG_CACHE_HOME", "")
        cache = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return cache / "kafila" / "checkpoints"


def folder_name(source: str, revision: str) -> str:
    """A folder for each source and commit, which people can tell apart and no two sources share."""
    place = source.rstrip("/").rpartition("/")[2]
    shown = re.sub(r"[^A-Za-z0-9._-]", "_", place).lstrip(".")[:60] or "checkpoint"
    return f"{shown}-{hashlib.sha256(f'{source} {revision}'.encode()).hexdigest()[:12]}"


class CacheFolder:
    """One checkpoint's folder, in use until closed."""

    def __init__(self, path: Path, source: str, revision: str) -> None:
        """Make it where it is not there yet. Raises FetchFailed where that is not allowed."""
        self.path = path
        try:
            self._use = _share(path)
            (path / SOURCE_NAME).write_text(json.dumps({"source": source, "revision": revision}))
        except OSError as error:
            raise cannot_write(path, error) from error

    def close(self) -> None:
        """It may be pruned from now on."""
        os.close(self._use)

    @contextmanager
    def fetching(self, patience: Patience, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Alone among all processes; ``waiting`` is called where another one fetches already."""
        descriptor = _open_lock(self.path / _FETCHING)
        try:
            if not _locked(descriptor, fcntl.LOCK_EX):
                waiting()
                while not _locked(descriptor, fcntl.LOCK_EX):
                    patience.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def check_room(self, bytes_needed: int) -> None:
        """Raises FetchFailed where the disk has no room for so much more."""
        there = os.statvfs(self.path)
        free = there.f_bavail * there.f_frsize
        if bytes_needed > free:
            raise FetchFailed(
                f"{bytes_needed / 1e9:.2f} GB are still to be fetched into {self.path}, where {free / 1e9:.2f} GB are "
                "free: make room (kafila-node cache prune), or set XDG_CACHE_HOME to a folder on a larger disk"
            )


def cannot_write(path: Path, error: OSError) -> FetchFailed:
    """Why nothing can be put there, in words."""
    if error.errno in _NO_SPACE:
        return FetchFailed(
            f"the disk of {path} is full: make room (kafila-node cache prune), or set XDG_CACHE_HOME to a folder on a "
            "larger disk; what has been fetched is kept"
        )
    return FetchFailed(
        f"fetched checkpoints cannot be kept in {path} ({error.strerror}): make it writable, or set XDG_CACHE_HOME to "
        "a folder that is"
    )


@contextmanager
def complete(folder: Path, specs: list[TensorSpec]) -> Iterator[None]:
    """Tensors may be read from ``folder`` within the block, wherever it is.

    Raises ModelIncomplete, naming tensor and file, where it is one of the cache and lacks bytes of them; and at the end
    where another process has begun a file anew meanwhile, because its source changed.
    """
    before = _versions(folder, specs)
    yield
    if _versions(folder, specs) != before:
        raise ModelIncomplete(f"the checkpoint in {folder} was replaced while it was read: start the session again")


def _versions(folder: Path, specs: list[TensorSpec]) -> dict[str, tuple[Version, int]]:
    """Of each file that holds one of the tensors; empty for a folder that nobody fills in places."""
    if not (folder / SOURCE_NAME).is_file():
        return {}
    journals = {file: recorded(folder / file) for file in {spec.file for spec in specs}}
    found: dict[str, tuple[Version, int]] = {}
    for spec in specs:
        path, journal = folder / spec.file, journals[spec.file]
        if journal is None or journal.lacks([(spec.start, spec.end)]):
            raise ModelIncomplete(
                f"{path}: {spec.name} was not fetched: this folder of the cache holds another share of the checkpoint; "
                "name its source with --model instead"
            )
        if spec.file not in found:
            found[spec.file] = (journal.version, path.stat().st_ino)
    return found


# -- what lies there ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cached:
    """One checkpoint of the cache."""

    path: Path
    source: str
    bytes_held: int
    """Fetched."""
    bytes_in_all: int
    """Of its files, had they been fetched whole."""
    used: float
    """When it was used last, in seconds since 1970."""


def cached(root: Path) -> list[Cached]:
    """Every checkpoint of the cache, the one used last first."""
    folders = [path for path in root.iterdir() if (path / SOURCE_NAME).is_file()] if root.is_dir() else []
    return sorted((_look(path) for path in folders), key=lambda found: -found.used)


def last_revision(root: Path, source: str) -> str | None:
    """The revision of a source that was used last; None where none was fetched."""
    for found in cached(root):
        try:
            written = json.loads((found.path / SOURCE_NAME).read_bytes())
            if written["source"] == source and written["revision"]:
                return str(written["revision"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being pruned, or not ours
    return None


def prune(root: Path, unused_since: float) -> tuple[list[Cached], list[Cached]]:
    """Remove what was last used before that time (seconds since 1970); what was removed, and what is in use and stays.

    Raises FetchFailed where it may not be removed.
    """
    removed: list[Cached] = []
    kept: list[Cached] = []
    for found in cached(root):
        if found.used >= unused_since:
            continue
        (removed if _remove(found.path) else kept).append(found)
    return removed, kept


def _look(path: Path) -> Cached:
    journals = [recorded(entry.with_name(entry.name.removesuffix(SUFFIX))) for entry in path.glob(f"*{SUFFIX}")]
    known = [journal for journal in journals if journal is not None]
    try:
        source = json.loads((path / SOURCE_NAME).read_bytes())
        shown = "@".join(part for part in (str(source["source"]), str(source["revision"])[:12]) if part)
    except (ValueError, KeyError, TypeError):
        shown = path.name
    lock = path / _IN_USE
    used = (lock if lock.exists() else path).stat().st_mtime
    return Cached(path, shown, sum(total(j.have) for j in known), sum(journal.version.size for journal in known), used)


def _remove(path: Path) -> bool:
    try:
        descriptor = _open_lock(path / _IN_USE)
        try:
            if not _locked(descriptor, fcntl.LOCK_EX):
                return False
            shutil.rmtree(path)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FetchFailed(f"{path} cannot be removed ({error.strerror})") from error
    return True


def _share(path: Path) -> int:
    """A shared lock on a folder that is there, and still is once locked."""
    lock = path / _IN_USE
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = _open_lock(lock)
        except FileNotFoundError:
            continue  # pruned just now
        if _locked(descriptor, fcntl.LOCK_SH):
            try:
                if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                    os.utime(descriptor)
                    return descriptor
            except FileNotFoundError:
                pass
        else:
            time.sleep(_POLL_S)  # somebody prunes it
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _locked(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
