"""A member finds the session's checkpoint where the host has it or where its owner says, and no other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kafila.device import DeviceBackend, DeviceSettings
from kafila.errors import FetchFailed, ModelError, ModelNotFound
from kafila.ring.agreement import Welcome, encode_message
from kafila.shard.library import Library, Wanted
from kafila.shard.manifest import Checkpoint
from kafila.shard.patience import Patience
from kafila.types import BlockRange
from tests.shard.checkpoints import make_checkpoint
from tests.shard.test_remote import COMMIT
from tests.shard.web import Web, serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "web" / "tiny", "llama", blocks=2)


@pytest.fixture
def web(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(folder.parent) as web:
        yield web


Members = Callable[[], Library]


@pytest.fixture
def library() -> Iterator[Members]:
    """Another member each time."""
    made: list[Library] = []

    def make() -> Library:
        made.append(Library(lambda line: None))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _offered(library: Library, source: str) -> Wanted:
    """What a host tells of its checkpoint."""
    found = library.look(Wanted(source))
    return Wanted(found.wanted.source, found.wanted.revision, found.wanted.fingerprint, "tiny")


def test_a_copy_elsewhere_and_the_hosts_address_are_the_same(
    library: Members, folder: Path, web: Web, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for host in (str(folder), web.base + "tiny"):
        wanted = _offered(library(), host)
        for source in (str(copy), web.base + "tiny/"):
            found = library().look(Wanted(source, "", wanted.fingerprint, "tiny"))
            assert found.checkpoint.config == library().look(Wanted(str(folder))).checkpoint.config


def test_another_checkpoint_is_declined_and_both_are_named(
    library: Members, folder: Path, web: Web, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", blocks=2, seed=1)
    wanted = _offered(library(), web.base + "tiny")
    with pytest.raises(
        ModelError, match=f"{other} .* is not the tiny that the host serves .*{wanted.fingerprint[:12]}"
    ):
        library().look(Wanted(str(other), "", wanted.fingerprint, "tiny"))


def test_a_hosts_own_folder_that_is_not_here(library: Members, folder: Path) -> None:
    wanted = _offered(library(), str(folder))
    folder.rename(folder.with_name("moved"))
    with pytest.raises(ModelNotFound, match=r"the host serves .*tiny from a folder of its own.*--model"):
        library().look(wanted)


def test_a_share_of_a_folder_is_the_folder_and_of_an_address_the_cache(
    library: Members, folder: Path, web: Web
) -> None:
    def nothing(done: int, of: int) -> None:
        raise AssertionError("nothing is fetched from a folder")

    local = library().share(
        Wanted(str(folder)), BlockRange(0, 1), holds_head=True, progress=nothing, patience=Patience()
    )
    assert local.folder == folder
    steps: list[int] = []
    remote = library().share(
        Wanted(web.base + "tiny"),
        BlockRange(0, 1),
        holds_head=True,
        progress=lambda done, of: steps.append(of - done),
        patience=Patience(),
    )
    assert remote.folder != folder
    assert steps[-1] == 0


async def test_a_token_does_not_leave_this_machine(
    library: Members, folder: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("source", "remote"):
        monkeypatch.setattr(f"kafila.shard.{room}.hub_endpoint", lambda: web.base.rstrip("/"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    revision = web.folder / "api/models/org/tiny/revision/main"
    revision.parent.mkdir(parents=True)
    revision.write_text(json.dumps({"sha": COMMIT}))
    (web.folder / "org/tiny/resolve").mkdir(parents=True)
    os.symlink(folder, web.folder / "org/tiny/resolve" / COMMIT)
    backend = DeviceBackend(DeviceSettings())
    offer = await backend.offer("org/tiny", None, 1)
    backend.close()
    assert (offer.source, offer.revision, offer.manifest.name) == ("org/tiny", COMMIT, "tiny")
    assert b"hf_secret" not in encode_message(Welcome("ada", offer))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    web.forget()
    found = library().look(Wanted(offer.source, offer.revision, offer.fingerprint))
    assert found.wanted.fingerprint == offer.fingerprint
    assert found.wanted.revision == COMMIT


def test_a_share_that_was_given_up_is_in_no_later_ones_way(library: Members, web: Web) -> None:
    wanted, member = _offered(library(), web.base + "tiny"), library()

    def share(patience: Patience) -> Checkpoint:
        return member.share(wanted, BlockRange(0, 2), holds_head=False, progress=lambda *_: None, patience=patience)

    leaving = Patience()
    leaving.stopping.set()
    with pytest.raises(FetchFailed, match="leaving"):
        share(leaving)
    assert share(Patience()).config.blocks == 2


def test_a_source_that_was_replaced_since_the_host_looked_is_not_loaded_from(
    library: Members, web: Web, folder: Path, tmp_path: Path
) -> None:
    wanted = _offered(library(), web.base + "tiny")
    shutil.copytree(make_checkpoint(tmp_path / "other", "llama", blocks=2, seed=1), folder, dirs_exist_ok=True)
    with pytest.raises(ModelError, match="is not the tiny that the host serves"):
        library().share(wanted, BlockRange(0, 1), holds_head=False, progress=lambda *_: None, patience=Patience())
