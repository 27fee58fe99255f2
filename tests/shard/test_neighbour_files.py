"""A source that is silent or slow, and neighbours that hold what it does not bring."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kafila.errors import FetchFailed, ModelError, ModelNotFound, SourceSilent
from kafila.shard.held import Held
from kafila.shard.library import Library, Wanted
from kafila.shard.manifest import Checkpoint, own_specs, own_tensors
from kafila.shard.neighbour_files import SLOW_AFTER_S, SLOW_BYTES_PER_S, Pace
from kafila.shard.neighbours import Nobody
from kafila.shard.patience import Patience
from kafila.shard.remote import RemoteCheckpoint
from kafila.shard.source import parse_source
from kafila.types import BlockRange, FilePart, FilePiece, TensorSpec
from tests.shard.checkpoints import make_checkpoint
from tests.shard.test_remote import same_bytes, unseen
from tests.shard.web import Fault, Web, serving

PIECE_BYTES = 10_000
"""Of what a neighbour gives at once, so that parts come in several pieces."""
SHARE = BlockRange(1, 3)


class Neighbour:
    """A member that holds a folder, as those who fetch see it."""

    def __init__(self, folder: Path | None) -> None:
        self.held = None if folder is None else Held(folder)
        self.asked: list[FilePart] = []
        self.given_bytes = 0
        self.gives_bytes = 2**62
        """Then it is gone."""

    def ask(self, part: FilePart, patience: Patience) -> FilePiece | Nobody:
        self.asked.append(part)
        if self.held is None:
            return Nobody("the ring is not formed yet", unasked=True)
        if self.given_bytes >= self.gives_bytes:
            return Nobody("ada has left")
        answer = self.held.read(replace(part, end=min(part.end, part.start + PIECE_BYTES)))
        if isinstance(answer, FilePiece):
            self.given_bytes += len(answer.data)
            return answer
        return Nobody(f"ada said {answer.name}", absent=answer.name == "ABSENT")

    @property
    def weights(self) -> int:
        return sum(part.file.endswith(".safetensors") for part in self.asked)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made") / "tiny", "llama")


@pytest.fixture
def web(made: Path, tmp_path: Path) -> Iterator[Web]:
    shutil.copytree(made, tmp_path / "web" / "tiny")
    with serving(tmp_path / "web") as web:
        yield web


Opened = Callable[..., RemoteCheckpoint]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def member(web: Web, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """A member with a cache of its own number, and the neighbours it asks."""
    opened: list[RemoteCheckpoint] = []
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def open_(neighbours: Neighbour | None, cache: int = 0) -> RemoteCheckpoint:
        source = parse_source(web.base + "tiny")
        patience, root = Patience(wait=lambda seconds: None), tmp_path / f"cache{cache}"
        opened.append(
            RemoteCheckpoint(source, patience, root=root, told=told.append, neighbours=neighbours)  # type: ignore[arg-type]  # never a folder here
        )
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


def own(checkpoint: Checkpoint) -> list[str]:
    return own_tensors(checkpoint, SHARE, holds_head=False)


def specs(checkpoint: Checkpoint) -> list[TensorSpec]:
    return own_specs(checkpoint, SHARE, holds_head=False)


def silent(web: Web, *, weights_only: bool = False, after_bytes: int = 0) -> None:
    """The server answers nothing any more, or breaks off."""
    at_break: dict[str, bool] = {}

    def fault(asked: object) -> Fault | None:
        file = getattr(asked, "file", "")
        if weights_only and not (file.endswith(".safetensors") and getattr(asked, "range", None) != (0, 8)):
            return None
        if after_bytes and not at_break.setdefault(file, False):
            at_break[file] = True
            return Fault(break_after=after_bytes)
        return Fault(status=503)

    web.fault = fault


def test_everything_from_neighbours_where_the_source_is_gone(
    member: Opened, web: Web, made: Path, told: list[str]
) -> None:
    silent(web)
    ada = Neighbour(made)
    remote = member(ada)
    checkpoint, fingerprint = remote.open()
    fetched = remote.fetch(specs, unseen)
    same_bytes(fetched, made, own(checkpoint))
    web.fault = lambda asked: None
    assert member(None, cache=1).open()[1] == fingerprint
    assert [line for line in told if "neighbours are asked" in line] == told
    assert len(told) == 1
    assert all(part.layout for part in ada.asked[-3:])


def test_a_source_that_does_well_is_all_that_is_asked(member: Opened, made: Path) -> None:
    ada = Neighbour(made)
    remote = member(ada)
    remote.open()
    remote.fetch(specs, unseen)
    assert not ada.asked


def test_what_the_source_brought_before_it_fell_silent_is_kept(member: Opened, web: Web, made: Path) -> None:
    ada = Neighbour(made)
    remote = member(ada)
    checkpoint, _ = remote.open()
    silent(web, weights_only=True, after_bytes=20_000)
    fetched = remote.fetch(specs, unseen)
    same_bytes(fetched, made, own(checkpoint))
    wanted = sum(checkpoint.tensors[name].end - checkpoint.tensors[name].start for name in own(checkpoint))
    assert 0 < ada.given_bytes < wanted


def test_a_neighbour_with_another_share_gives_what_it_has(member: Opened, web: Web, made: Path) -> None:
    """Also where what lies between two tensors of the share is nowhere."""
    ben = member(None, cache=1)
    ben.open()
    ben.fetch(lambda checkpoint: [spec for spec in specs(checkpoint) if "norm" not in spec.name], unseen)
    ben_held = Neighbour(ben.folder)
    remote = member(ben_held)
    checkpoint, _ = remote.open()
    silent(web, weights_only=True)
    names = [name for name in own(checkpoint) if "norm" not in name]
    same_bytes(remote.fetch(lambda _: [checkpoint.tensors[name] for name in names], unseen), made, names)


def test_who_left_and_a_silent_source_are_both_named_and_what_came_is_kept(
    member: Opened, web: Web, made: Path
) -> None:
    ada = Neighbour(made)
    remote = member(ada)
    checkpoint, _ = remote.open()
    silent(web, weights_only=True)
    ada.gives_bytes = 3 * PIECE_BYTES
    with pytest.raises(
        SourceSilent, match=r"model.safetensors of .* does not come .*; of its neighbours, ada has left"
    ):
        remote.fetch(specs, unseen)
    given = ada.given_bytes
    assert given >= 3 * PIECE_BYTES
    web.fault = lambda asked: None
    web.forget()
    again = member(None)
    again.open()
    same_bytes(again.fetch(specs, unseen), made, own(checkpoint))
    wanted = sum(checkpoint.tensors[name].end - checkpoint.tensors[name].start for name in own(checkpoint))
    assert web.weight_bytes < wanted


def test_before_the_ring_is_formed_the_sources_own_words_are_told(member: Opened, web: Web) -> None:
    silent(web)
    with pytest.raises(SourceSilent, match=r"config.json of .* does not come") as told:
        member(Neighbour(None)).open()
    assert "neighbours" not in str(told.value)


def test_what_a_source_says_is_not_asked_of_others(member: Opened, web: Web, made: Path) -> None:
    ada = Neighbour(made)
    web.fault = lambda asked: Fault(status=403)
    with pytest.raises(FetchFailed, match="not given to this machine"):
        member(ada).open()
    web.fault = lambda asked: Fault(status=404)
    with pytest.raises(ModelNotFound):
        member(ada, cache=1).open()
    assert not ada.asked


def test_another_version_at_a_neighbour_is_not_taken(member: Opened, web: Web, made: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", blocks=5)
    ada = Neighbour(other)
    remote = member(ada)
    remote.open()
    silent(web, weights_only=True)
    with pytest.raises(SourceSilent, match="ada said OTHER_VERSION"):
        remote.fetch(specs, unseen)


def test_a_file_that_the_checkpoint_does_not_have_is_not_waited_for(member: Opened, web: Web, made: Path) -> None:
    silent(web)
    remote = member(Neighbour(made))
    remote.open()
    folder = remote.language()
    assert (folder / "config.json").read_bytes() == (made / "config.json").read_bytes()
    assert not (folder / "tokenizer.json").exists()


def test_a_hosts_own_folder_comes_from_the_members_that_have_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    offered = Library(unheard).look(Wanted(str(made))).wanted
    elsewhere = Wanted(str(tmp_path / "not here"), "", offered.fingerprint, "tiny")
    with pytest.raises(ModelNotFound, match=r"say where this machine has it with --model, or start both with --share"):
        Library(unheard).look(elsewhere)
    before, member = Library(unheard, Neighbour(None)), Library(unheard, Neighbour(made))
    with pytest.raises(SourceSilent, match=r"config.json of tiny is not on this machine"):
        before.look(elsewhere)
    for _ in range(2):
        checkpoint = member.share(elsewhere, SHARE, holds_head=False, progress=unseen, patience=Patience())
        same_bytes(checkpoint, made, own(checkpoint))
    assert member.held is not None
    assert isinstance(member.held.read(FilePart("config.json", 0, 9)), FilePiece)
    assert before.look(elsewhere).checkpoint.config == checkpoint.config  # it is here now
    other = make_checkpoint(tmp_path / "other", "llama", seed=1)
    with pytest.raises(ModelError, match="is not the tiny that the host serves"):
        Library(unheard, Neighbour(other)).share(
            replace(elsewhere, fingerprint="0" * 64), SHARE, holds_head=False, progress=unseen, patience=Patience()
        )
    for library in (before, member):
        library.close()


def unheard(_line: str) -> None:
    pass


def test_a_slow_source_is_left_for_neighbours(member: Opened, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += SLOW_AFTER_S  # every look at the clock finds that so much more has passed
        return now[0]

    monkeypatch.setattr("kafila.shard.neighbour_files.Pace", lambda: Pace(clock))
    ada = Neighbour(made)
    remote = member(ada)
    checkpoint, _ = remote.open()
    same_bytes(remote.fetch(specs, unseen), made, own(checkpoint))
    assert ada.weights


def test_pace() -> None:
    now = [100.0]
    pace = Pace(lambda: now[0])
    with pace.reading():
        now[0] += SLOW_AFTER_S - 0.1
        assert not pace.is_slow(0)  # a slow start
        now[0] += 0.1
        assert not pace.is_slow(int(SLOW_BYTES_PER_S * SLOW_AFTER_S))
        now[0] += SLOW_AFTER_S
        assert pace.is_slow(int(SLOW_BYTES_PER_S * SLOW_AFTER_S) - 1)
    now[0] += 1000
    with pace.reading():  # nothing was asked meanwhile
        assert not pace.is_slow(1)
