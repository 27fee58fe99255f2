"""kill -9 at any moment of a fetch, and whoever fetches next ends with the very bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafila.shard.journal import recorded
from kafila.shard.manifest import open_checkpoint, own_tensors
from kafila.types import BlockRange
from tests.shard.checkpoints import make_checkpoint
from tests.shard.web import Web, serving

KILLS = 50


class Fetcher:
    """Starts fetching processes, and kills each when the server has sent so many bytes."""

    def __init__(self, web: Web, cache: Path) -> None:
        self._web = web
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.shard.fetching_process", web.base, str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NO_PROXY": "127.0.0.1"},
        )

    def start(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.status()

    def fetch(self, kill_after: int | None = None) -> int:
        """Its exit status; ``kill_after``: bytes sent by the server from now on."""
        self._web.forget()
        started, pids = threading.Event(), list[int]()

        def maybe_kill(total: int) -> None:
            if kill_after is not None and total >= kill_after:
                started.wait()
                os.kill(pids[0], signal.SIGKILL)
                self._web.on_sent = lambda total: None

        self._web.on_sent = maybe_kill
        pids.append(self.start())
        started.set()
        return self.status()

    def status(self) -> int:
        """The next number it says: the exit status of the fetch that was started."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    # 1.9 MB: some two hundred chunks of the server, and as many moments to be killed at.
    make_checkpoint(tmp_path / "web", "llama", blocks=2, hidden_size=96, intermediate_size=384, vocab_size=1024)
    with serving(tmp_path / "web") as web:
        yield web


def _held(cache: Path) -> int:
    """Bytes of weights that the journal promises; each is compared with the original's."""
    (folder,) = cache.iterdir()
    original = (cache.parent / "web" / "model.safetensors").read_bytes()
    known = recorded(folder / "model.safetensors")
    if known is None:
        return 0
    data = (folder / "model.safetensors").read_bytes()
    for start, end in known.have:
        assert data[start:end] == original[start:end]
    return sum(end - start for start, end in known.have)


def test_killed_fifty_times(web: Web, tmp_path: Path) -> None:
    chance = random.Random(7)
    cache = tmp_path / "cache"
    fetcher = Fetcher(web, cache)
    killed = progressed = before = 0
    try:
        while killed < KILLS:
            status = fetcher.fetch(kill_after=chance.choice([chance.randrange(3000), chance.randrange(1_000_000)]))
            held = _held(cache) if cache.exists() and any(cache.iterdir()) else 0
            assert held >= before
            progressed += held > before
            before = held
            if status == 0:  # it was whole before its time had come: begin anew
                _begin_anew(cache)
                before = 0
            else:
                assert status == -signal.SIGKILL
                killed += 1
        assert progressed > 5
        assert fetcher.fetch() == 0
    finally:
        fetcher.close()
    _is_whole(cache, tmp_path / "web")


def _begin_anew(cache: Path) -> None:
    for path in next(cache.iterdir()).glob("model.safetensors*"):
        path.unlink()


def _is_whole(cache: Path, original: Path) -> None:
    (folder,) = cache.iterdir()
    checkpoint = open_checkpoint(folder)
    known = recorded(folder / "model.safetensors")
    assert known is not None
    assert not known.lacks(
        [
            (checkpoint.tensors[name].start, checkpoint.tensors[name].end)
            for name in own_tensors(checkpoint, BlockRange(0, 2), holds_head=True)
        ]
    )
    assert (folder / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert (folder / "config.json").read_bytes() == (original / "config.json").read_bytes()


def test_two_processes_fetch_into_one_cache_and_no_byte_twice(web: Web, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fetchers = [Fetcher(web, cache) for _ in range(2)]
    try:
        for fetcher in fetchers:
            fetcher.start()
        assert [fetcher.status() for fetcher in fetchers] == [0, 0]
    finally:
        for fetcher in fetchers:
            fetcher.close()
    _is_whole(cache, tmp_path / "web")
    assert web.sent["model.safetensors"] <= (tmp_path / "web" / "model.safetensors").stat().st_size + 2 * 8 + 8 * 256
