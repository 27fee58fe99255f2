"""A checkpoint at a remote source: known from a few kilobytes, then this member's own bytes of it, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kafila.errors import FetchFailed, ModelIncomplete, ModelNotFound
from kafila.shard.cache_folder import CacheFolder, cache_folder, folder_name, last_revision
from kafila.shard.config import parse_config
from kafila.shard.file_names import CONFIG_NAME, GENERATION_NAME, LANGUAGE_FILES
from kafila.shard.fingerprint import fingerprint, samples
from kafila.shard.http_files import HttpFiles, SourceChanged
from kafila.shard.manifest import INDEX_NAME, Checkpoint, open_checkpoint, weight_files
from kafila.shard.mirror import AT_ONCE, Mirror, Progress, SourceFiles
from kafila.shard.neighbour_files import Nowhere, SharedFiles
from kafila.shard.neighbours import Neighbours
from kafila.shard.patience import Patience
from kafila.shard.ranges import Range, merge
from kafila.shard.source import MAIN, Elsewhere, Hub, Members, Web, hub_endpoint, signed_in
from kafila.types import TensorSpec

T = TypeVar("T")


def _nobody(_line: str) -> None:
    pass


def _unseen(_done: int, _of: int) -> None:
    pass


class RemoteCheckpoint:
    """A checkpoint's folder of the cache, and the way to fill it. One thread at a time may call."""

    def __init__(
        self,
        source: Elsewhere,
        patience: Patience,
        *,
        revision: str = "",
        root: Path | None = None,
        told: Callable[[str], None] = _nobody,
        neighbours: Neighbours | None = None,
    ) -> None:
        """``revision``: the commit a host has told; without one the hub is asked. ``told`` hears what people should
        know. ``neighbours`` are asked where the source does badly. Raises ModelNotFound, FetchFailed."""
        self._patience = patience
        self._told = told
        root = root or cache_folder()
        place, key = _place(source), ""
        self.source: Elsewhere = source
        if isinstance(source, Hub):
            self.source = self._at_commit(source, revision, last_revision(root, place))
            key = self.revision
        elif isinstance(source, Members):
            key = source.fingerprint
        self._cache = CacheFolder(root / folder_name(place, key), place, key)
        self._mirror = Mirror(self.folder, self.source, self._files(neighbours), patience, told)
        self._checkpoint: Checkpoint | None = None
        self._fingerprint = ""

    @property
    def revision(self) -> str:
        """The hub's commit; empty for other sources."""
        return (self.source.commit or "") if isinstance(self.source, Hub) else ""

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return self._cache.path

    def close(self) -> None:
        """Its folder may be pruned from now on."""
        self._mirror.close()
        self._cache.close()

    def open(self) -> tuple[Checkpoint, str]:
        """Configuration, headers, and the fingerprint; the folder holds no weights yet.

        Raises UnsupportedModel before anything but ``config.json`` is fetched, ModelNotFound, ModelIncomplete naming
        tensor and file, FetchFailed.
        """
        with self._cache.fetching(self._patience, self._waiting):
            self._checkpoint, self._fingerprint = self._again_if_changed(self._look)
        return self._checkpoint, self._fingerprint

    def language(self) -> Path:
        """The folder, with tokenizer and template in it. Raises FetchFailed."""
        with self._cache.fetching(self._patience, self._waiting):
            for file in LANGUAGE_FILES:
                self._mirror.text(file)
        return self._cache.path

    def fetch(self, specs: Callable[[Checkpoint], Iterable[TensorSpec]], progress: Progress) -> Checkpoint:
        """The checkpoint, with the tensors that ``specs`` picks fetched, or the parts of tensors.

        What the source has replaced meanwhile is dropped and fetched again, once. Raises ModelError.
        """
        if self._checkpoint is None:
            self.open()
        with self._cache.fetching(self._patience, self._waiting):
            return self._again_if_changed(lambda: self._fetch(specs, progress))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _files(self, neighbours: Neighbours | None) -> SourceFiles:
        if neighbours is not None:
            return SharedFiles(self.source, self.folder, self._patience, neighbours, self._told)
        return Nowhere(self.source) if isinstance(self.source, Members) else HttpFiles(self.source, self._patience)

    def _at_commit(self, source: Hub, revision: str, last: str | None) -> Hub:
        """The source at the commit it has now; at the ``last`` one that was fetched where the hub does not answer."""
        known = signed_in(source)
        if revision:
            return known.at(revision)
        if known.commit is not None:
            return known
        http = HttpFiles(known, self._patience)
        try:
            return known.at(http.commit(known))
        except ModelNotFound as error:
            raise ModelNotFound(_no_checkpoint(source)) from error
        except FetchFailed as error:
            self._patience.go_on()
            if last is None or source.revision != MAIN:
                raise
            self._told(f"commit {last[:12]}, which was used last, is used again: {error}")
            return known.at(last)
        finally:
            http.close()

    def _waiting(self) -> None:
        self._told(f"another kafila-node here fetches {self.source.name}: waiting for what it leaves")

    def _again_if_changed(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except SourceChanged as changed:
            self._told(f"{changed.file} has changed at {self.source}: what was fetched of it is fetched again")
            self._mirror.drop(changed.file)
        before = self._fingerprint
        try:
            self._checkpoint, self._fingerprint = self._look()
            if before and self._fingerprint != before:
                raise FetchFailed(
                    f"{self.source} holds another checkpoint than when this session looked at it: start the session "
                    "again"
                )
            return step()
        except SourceChanged as changed:
            raise FetchFailed(
                f"{changed.file} keeps changing at {self.source} while it is fetched: wait until it is whole there, "
                "then start again"
            ) from changed

    def _look(self) -> tuple[Checkpoint, str]:
        folder = self._cache.path
        config_path = self._mirror.text(CONFIG_NAME)
        if config_path is None:
            raise ModelNotFound(_no_checkpoint(self.source))
        config = parse_config(config_path.read_bytes())  # here, so that what we do not have is declined at once
        self._mirror.text(GENERATION_NAME)
        self._mirror.text(INDEX_NAME)
        files = weight_files(folder, config)
        if strange := [file for file in files if not file.endswith(".safetensors")]:
            raise ModelIncomplete(f"{self.source}: its index puts weights in {strange[0]!r}, which is no .safetensors")
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kafila-headers") as pool:
            list(pool.map(self._mirror.header, files))
        checkpoint = replace(open_checkpoint(folder), name=self.source.name)
        self._mirror.fill(_by_file(samples(checkpoint)), _unseen)
        return checkpoint, fingerprint(checkpoint)

    def _fetch(self, specs: Callable[[Checkpoint], Iterable[TensorSpec]], progress: Progress) -> Checkpoint:
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise FetchFailed(f"{self.source} was not looked at yet")
        wanted = _by_file(specs(checkpoint))
        self._cache.check_room(self._mirror.lacks_bytes(wanted))
        self._mirror.fill(wanted, progress)
        return checkpoint


def _by_file(specs: Iterable[TensorSpec]) -> dict[str, list[Range]]:
    ranges: dict[str, list[Range]] = {}
    for spec in specs:
        ranges.setdefault(spec.file, []).append((spec.start, spec.end))
    return {file: merge(found) for file, found in sorted(ranges.items())}


def _place(source: Elsewhere) -> str:
    """What a cache's folder is known by, commit or fingerprint apart."""
    if isinstance(source, Hub):
        return f"{hub_endpoint()}/{source.repository}"
    return source.base if isinstance(source, Web) else f"members/{source.name}"


def _no_checkpoint(source: Elsewhere) -> str:
    if isinstance(source, Hub):
        return (
            f"there is no folder {source.repository} here, and the hub has no such model or revision ({source}): "
            "check the name"
        )
    return f"{source} has no {CONFIG_NAME}, so it is no checkpoint: give the address of the folder that holds it"
