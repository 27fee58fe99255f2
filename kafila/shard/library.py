"""The checkpoint a member uses, wherever it comes from, and that it is the one the session is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kafila.errors import DeviceError, ModelError, ModelNotFound
from kafila.shard.file_names import CONFIG_NAME
from kafila.shard.fingerprint import fingerprint
from kafila.shard.held import Held
from kafila.shard.manifest import Checkpoint, open_checkpoint, own_specs
from kafila.shard.neighbours import Neighbours
from kafila.shard.patience import Patience
from kafila.shard.source import Elsewhere, Folder, Hub, Members, Remote, parse_source
from kafila.types import BlockRange, TensorSpec

if TYPE_CHECKING:
    from kafila.shard.mirror import Progress  # imports httpx, which a machine that only has folders may lack
    from kafila.shard.remote import RemoteCheckpoint


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which checkpoint: a ``--model`` of this machine's, or what a host told of its own."""

    source: str
    revision: str = ""
    """The hub's commit, where the host took it from there."""
    fingerprint: str = ""
    """What the host's checkpoint is known by; empty at the host."""
    name: str = field(default="", compare=False)
    """What the host calls it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was looked at, and what others need to find the same."""

    checkpoint: Checkpoint
    wanted: Wanted


class Library:
    """One member's. Blocks while it reads and fetches; ``told`` hears what people should know, from any thread."""

    def __init__(self, told: Callable[[str], None], neighbours: Neighbours | None = None) -> None:
        """``neighbours`` are asked for what a source does not give; None: nobody is."""
        self.held: Held | None = None
        """What there is of the checkpoint on this machine, once it is known to be the session's."""
        self._told = told
        self._neighbours = neighbours
        self._patience = Patience()
        self._remotes: dict[tuple[str, str], RemoteCheckpoint] = {}
        """By place and commit. A member has one checkpoint, so there are one or two."""
        self._found: dict[Wanted, Found] = {}

        self._shares: list[RemoteCheckpoint] = []
        """What shares are read from: in use for as long as this member is there."""

    def close(self) -> None:
        """End what is asked, hang up, and let go of what is cached."""
        self._patience.stopping.set()
        for remote in {id(remote): remote for remote in (*self._remotes.values(), *self._shares)}.values():
            remote.close()
        self._remotes.clear()
        self._shares.clear()

    def look(self, wanted: Wanted) -> Found:
        """Configuration and headers, no weights. Raises ModelError, which names both where this is another checkpoint
        than the one wanted."""
        if (known := self._found.get(wanted)) is not None:
            return known  # the host, which has offered it
        source = self._source(wanted)
        if isinstance(source, Folder):
            checkpoint, revision = _open_folder(source, wanted), ""
            try:
                print_ = fingerprint(checkpoint)
            except OSError as error:
                raise ModelError(f"{checkpoint.folder} cannot be read ({error.strerror})") from error
            place = str(checkpoint.folder.resolve())
            held = Held(checkpoint.folder)
        else:
            remote = self._remote_for(source, wanted)
            checkpoint, print_ = remote.open()
            place, revision = _shown(source), remote.revision
            held = Held(remote.folder, revision)
        _check(place, print_, wanted)
        self.held = held
        found = Found(checkpoint, Wanted(place, revision, print_))
        self._found[found.wanted] = found
        return found

    def language(self, wanted: Wanted) -> Path:
        """A folder with the checkpoint's tokenizer and template. Raises ModelError."""
        source = self._source(wanted)
        return source.path if isinstance(source, Folder) else self._remote_for(source, wanted).language()

    def share(
        self,
        wanted: Wanted,
        blocks: BlockRange,
        *,
        holds_head: bool,
        progress: Progress,
        patience: Patience,
        scored_percent: int = 0,
    ) -> Checkpoint:
        """The checkpoint with the tensors of a share there (`own_specs`), fetched where they have to be.

        ``patience`` is this share's own: a new plan may ask for another while this one is being given up. Raises
        ModelError.
        """
        source = self._source(wanted)
        if isinstance(source, Folder):
            return _open_folder(source, wanted)
        remote = self._open_remote(source, wanted, patience)
        self._shares.append(remote)
        _, print_ = remote.open()
        _check(_shown(source), print_, wanted)
        self.held = Held(remote.folder, remote.revision)

        def specs(checkpoint: Checkpoint) -> list[TensorSpec]:
            return own_specs(checkpoint, blocks, holds_head=holds_head, scored_percent=scored_percent)

        return remote.fetch(specs, progress)

    def _source(self, wanted: Wanted) -> Folder | Elsewhere:
        """Where it is; at other members where it is a folder that is not here, and neighbours may be asked."""
        source = _source(wanted)
        if isinstance(source, Folder) and wanted.fingerprint and self._neighbours is not None and _lacks(source):
            return Members(wanted.name, wanted.fingerprint)
        return source

    def _remote_for(self, source: Elsewhere, wanted: Wanted) -> RemoteCheckpoint:
        place = (_shown(source), wanted.revision)
        known = self._remotes.get(place)
        if known is None:
            known = self._open_remote(source, wanted, self._patience)
            # What a host is asked by a branch's name it is later asked by the commit.
            self._remotes |= {place: known, (_shown(source), known.revision): known}
        return known

    def _open_remote(self, source: Elsewhere, wanted: Wanted, patience: Patience) -> RemoteCheckpoint:
        try:
            from kafila.shard.remote import RemoteCheckpoint  # noqa: PLC0415  - as above
        except ModuleNotFoundError as error:
            raise DeviceError(
                f"{source} has to be fetched, and this installation cannot ({error.name} is missing): "
                "pip install 'kafila[torch]'"
            ) from error
        return RemoteCheckpoint(
            source, patience, revision=wanted.revision, told=self._told, neighbours=self._neighbours
        )


def _check(place: str, print_: str, wanted: Wanted) -> None:
    if wanted.fingerprint and print_ != wanted.fingerprint:
        raise ModelError(
            f"{place} (fingerprint {print_[:12]}) is not the {wanted.name} that the host serves (fingerprint "
            f"{wanted.fingerprint[:12]}): point --model at a copy of the host's, or leave it out"
        )


def _source(wanted: Wanted) -> Folder | Remote:
    """A commit is the hub's: a folder of the same name here is not meant."""
    if wanted.revision:
        return Hub(wanted.source, wanted.revision)
    return parse_source(wanted.source)


def _lacks(folder: Folder) -> bool:
    try:
        (folder.path / CONFIG_NAME).stat()
    except OSError:  # also where this machine has something that may not be looked into
        return True
    return False


def _shown(source: Elsewhere) -> str:
    if isinstance(source, Members):
        return source.name
    return source.repository if isinstance(source, Hub) else source.base


def _open_folder(source: Folder, wanted: Wanted) -> Checkpoint:
    try:
        return open_checkpoint(source.path)
    except (ModelNotFound, PermissionError) as error:
        if not wanted.fingerprint:
            raise
        raise ModelNotFound(
            f"the host serves {source.path} from a folder of its own, and this machine has no checkpoint there: say "
            "where this machine has it with --model, or start both with --share-weights"
        ) from error
