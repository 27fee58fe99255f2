"""Real processes that fetch their shares from a web server, or from what the hub's paths lead to."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kafila.shard.manifest import open_checkpoint, own_specs
from kafila.types import BlockRange
from tests.integration.models import talking_checkpoint
from tests.integration.oracle import PROMPTS, answers
from tests.integration.processes import CODE, Machine, Process, machine
from tests.integration.test_errors import failure
from tests.integration.test_ring import FLOAT32, TOKENS, told
from tests.shard.web import Web, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BLOCKS = (2, 4)
"""Of the host and of its friend."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that its headers are less than a hundredth of a share: 9 MB."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return talking_checkpoint(folder, blocks=6, hidden_size=192, intermediate_size=512)


@pytest.fixture
def web(model: Path, tmp_path: Path) -> Iterator[Web]:
    shutil.copytree(model, tmp_path / "web" / "tiny")
    with serving(tmp_path / "web") as web:
        yield web


def own_cache(tmp_path: Path, number: int, *more: str) -> Sequence[str]:
    """A prefix for a process with a cache of its own, as on a machine of its own."""
    return ("env", "NO_PROXY=127.0.0.1", f"XDG_CACHE_HOME={tmp_path / f'cache{number}'}", *more)


def share_bytes(model: Path, blocks: BlockRange, *, head: bool, scored_percent: int) -> int:
    specs = own_specs(open_checkpoint(model), blocks, holds_head=head, scored_percent=scored_percent)
    return sum(spec.end - spec.start for spec in specs)


def scored_percent(host: Process) -> int:
    """How much of the vocabulary the plan gives to the last member, by what was measured."""
    found = re.search(r"scores the last (\d+)% of the vocabulary", " ".join(host.err.split()))
    return int(found[1]) if found else 0


async def test_a_ring_serves_what_each_member_fetched_and_nobody_fetched_more_than_its_share(
    web: Web, model: Path, tmp_path: Path
) -> None:
    wanted = "".join(f"{answer}\n" for answer in answers(model, PROMPTS[:2], TOKENS))
    with serving(web.folder) as second:
        async with machine() as here:
            host = await here.node(
                *("--host", "--model", web.base + "tiny", "--members", "2", "--name", "m0", *FLOAT32),
                *("--shares", ",".join(map(str, BLOCKS))),
                prefix=own_cache(tmp_path, 0),
            )
            code = await host.until(CODE)
            friend = await here.node(
                *("--join", code, "--name", "m1", "--max-tokens", str(TOKENS), "--model", second.base + "tiny"),
                prefix=own_cache(tmp_path, 1),
            )
            await friend.until("serving: every member may ask")
            assert await told(friend, PROMPTS[:2]) == wanted
            assert "m1 has its share: fetched" in host.err
            assert "m0 has its share: fetched" in host.err
            assert "fetched" in friend.err
            for server, blocks, head in ((web, BlockRange(0, 2), True), (second, BlockRange(2, 6), False)):
                share = share_bytes(model, blocks, head=head, scored_percent=scored_percent(host))
                assert share <= server.weight_bytes <= 1.02 * share
            assert "tiny/tokenizer.json" not in second.sent
            listed = await here.command("kafila", "cache", "list", prefix=own_cache(tmp_path, 0))
            assert await listed.wait() == 0
            assert web.base in listed.out
            pruned = await here.command("kafila", "cache", "prune", "--all", prefix=own_cache(tmp_path, 0))
            assert await pruned.wait() == 0
            assert "a kafila-node uses it" in pruned.out


async def _host(here: Machine, options: Sequence[str], prefix: Sequence[str]) -> Process:
    return await here.node("--host", "--members", "1", *FLOAT32, *options, prefix=prefix)


async def test_a_name_on_the_hub(web: Web, model: Path, tmp_path: Path) -> None:
    revision = web.folder / "api/models/org/tiny/revision/main"
    revision.parent.mkdir(parents=True)
    revision.write_text(json.dumps({"sha": COMMIT}))
    shutil.copytree(model, web.folder / "org/tiny/resolve" / COMMIT)
    settings = (f"HF_ENDPOINT={web.base.rstrip('/')}", "HF_TOKEN=hf_secret")
    wanted = "".join(f"{answer}\n" for answer in answers(model, PROMPTS[:1], TOKENS))
    async with machine() as here:
        host = await _host(here, ("--model", "org/tiny"), own_cache(tmp_path, 0, *settings))
        assert await told(host, PROMPTS[:1]) == wanted
    assert {one.headers.get("Authorization") for one in web.asked} == {"Bearer hf_secret"}


async def test_what_cannot_be_fetched_is_one_line(web: Web, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (web.folder / "tiny" / "config.json").write_text(json.dumps(config))
    async with machine() as here:
        nobody = await failure(await _host(here, ("--model", "http://127.0.0.1:9/tiny"), own_cache(tmp_path, 0)))
        assert "http://127.0.0.1:9/tiny/ does not come" in nobody
        strange = await failure(await _host(here, ("--model", web.base + "tiny"), own_cache(tmp_path, 0)))
        assert "MambaForCausalLM" in strange
        assert list(web.sent) == ["tiny/config.json"]
        secret = await failure(await _host(here, ("--model", "http://a:b@127.0.0.1/"), own_cache(tmp_path, 0)))
        assert "told to every member" in secret
