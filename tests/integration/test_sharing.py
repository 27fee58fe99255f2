"""Real processes whose source is gone: who has weights gives them to its neighbours, if both allow it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kafila.shard.cache_folder import cached
from kafila.shard.patience import Patience
from kafila.shard.remote import RemoteCheckpoint
from kafila.shard.source import Hub
from tests.integration.models import talking_checkpoint
from tests.integration.oracle import PROMPTS, answers
from tests.integration.processes import CODE, machine
from tests.integration.test_errors import failure
from tests.integration.test_ring import FLOAT32, TOKENS, told
from tests.shard.web import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = f"org/tiny@{COMMIT}"
GONE = "http://127.0.0.1:9"
"""Where no hub is: nothing listens on the port of the discard protocol."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint(tmp_path_factory.mktemp("models") / "tiny", blocks=6)


def machine_of(tmp_path: Path, number: int) -> Sequence[str]:
    """A prefix for a process with a cache of its own, and a hub that does not answer."""
    return ("env", "NO_PROXY=127.0.0.1", f"HF_ENDPOINT={GONE}", f"XDG_CACHE_HOME={tmp_path / f'cache{number}'}")


def fetch_all(model: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process finds in its cache after an earlier session."""
    site = tmp_path / "hub"
    shutil.copytree(model, site / "org/tiny/resolve" / COMMIT)
    with serving(site) as web, monkeypatch.context() as here:
        here.setattr("kafila.shard.remote.hub_endpoint", lambda: GONE)  # the cache is of the hub that is gone
        here.setattr(Hub, "url", lambda self, file: f"{web.base}org/tiny/resolve/{self.revision}/{file}")
        root = tmp_path / f"cache{number}" / "kafila" / "checkpoints"
        remote = RemoteCheckpoint(Hub("org/tiny", COMMIT), Patience(), root=root)
        remote.open()
        remote.fetch(lambda checkpoint: checkpoint.tensors.values(), lambda done, of: None)
        remote.language()
        remote.close()


async def test_a_member_whose_source_is_gone_gets_its_share_from_its_neighbour(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_all(model, tmp_path, 0, monkeypatch)
    wanted = "".join(f"{answer}\n" for answer in answers(model, PROMPTS[:1], TOKENS))
    async with machine() as here:
        host = await here.node(
            *("--host", "--model", NAME, "--members", "2", "--name", "m0", "--shares", "2,4", "--share-weights"),
            *FLOAT32,
            prefix=machine_of(tmp_path, 0),
        )
        join = ("--join", await host.until(CODE), "--name", "m1", "--max-tokens", str(TOKENS))
        alone = await failure(await here.node(*join, prefix=machine_of(tmp_path, 1)))
        assert "does not come" in alone
        assert "a neighbour in the ring that has it gives it if both start with --share-weights" in alone
        friend = await here.node(*join, "--share-weights", prefix=machine_of(tmp_path, 1))
        await friend.until("serving: every member may ask")
        assert await told(friend, PROMPTS[:1]) == wanted
        assert "neighbours are asked for what they hold" in friend.err
    (whole,), (share,) = (cached(tmp_path / f"cache{n}" / "kafila" / "checkpoints") for n in range(2))
    assert 0 < share.bytes_held < whole.bytes_held
