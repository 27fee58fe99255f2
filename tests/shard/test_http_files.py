"""A server that does what servers do: moves, refuses, breaks off, changes, and knows no ranges."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafila.errors import FetchFailed, ModelNotFound
from kafila.shard import http_files
from kafila.shard.http_files import HttpFiles, SourceChanged, Unchanged
from kafila.shard.journal import Version
from kafila.shard.patience import Patience
from kafila.shard.source import Hub, Web
from tests.shard.web import Asked, Fault, serving
from tests.shard.web import Web as Server

DATA = random.Random(1).randbytes(100_000)
NAME = "model.safetensors"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server: Server) -> None:
    (server.folder / NAME).write_bytes(DATA)
    server.forget()
    server.ranges = server.etags = True
    server.moved_from = ""
    server.fault = lambda asked: None


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def files(server: Server, waits: list[float]) -> Iterator[HttpFiles]:
    files = HttpFiles(Web(server.base), Patience(wait=waits.append, jitter=lambda: 1.0))
    yield files
    files.close()


def _read(files: HttpFiles, version: Version, start: int, end: int) -> bytes:
    got = bytearray()

    def sink(at: int, data: bytes) -> None:
        assert at == start + len(got)
        got.extend(data)

    files.read(NAME, version, start, end, sink)
    return bytes(got)


def _version(files: HttpFiles) -> Version:
    return files.beginning(NAME, 8)[0]


def faults(server: Server, *what: Fault | None) -> None:
    """The next answers' faults, in order; none after them."""
    left = list(what)
    server.fault = lambda asked: left.pop(0) if left else None


def test_a_beginning_tells_size_and_version(files: HttpFiles, server: Server) -> None:
    version, first = files.beginning(NAME, 8)
    assert (version.size, first) == (len(DATA), DATA[:8])
    assert version.etag.startswith('"')
    assert server.sent == {NAME: 8}


def test_a_range_and_no_byte_more(files: HttpFiles, server: Server) -> None:
    version = _version(files)
    server.forget()
    assert _read(files, version, 1000, 31_000) == DATA[1000:31_000]
    assert server.sent == {NAME: 30_000}
    assert server.asked[0].headers["If-Range"] == version.etag


def test_a_redirect_is_followed(files: HttpFiles, server: Server) -> None:
    server.moved_from = "old/"
    moved = HttpFiles(Web(server.base + "old/"), Patience())
    assert _read(moved, _version(moved), 5, 50_000) == DATA[5:50_000]
    moved.close()


@given(breaks=st.lists(st.integers(0, 40_000), max_size=4), start=st.integers(0, 50_000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
def test_a_connection_that_breaks_is_gone_on_with_where_it_broke(
    files: HttpFiles, server: Server, breaks: list[int], start: int
) -> None:
    version = _version(files)
    server.forget()
    faults(server, *(Fault(break_after=count) for count in breaks))
    assert _read(files, version, start, len(DATA)) == DATA[start:]
    assert server.sent[NAME] == len(DATA) - start  # no byte twice


def test_a_server_that_gives_nothing_is_given_up(files: HttpFiles, server: Server, waits: list[float]) -> None:
    version = _version(files)
    server.fault = lambda asked: Fault(break_after=0)
    with pytest.raises(FetchFailed, match=f"{NAME} of {server.base} does not come .*6 times"):
        _read(files, version, 0, 10)
    assert waits == [0.5, 1, 2, 4, 8]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(
    files: HttpFiles, server: Server, waits: list[float], status: int
) -> None:
    version = _version(files)
    faults(server, Fault(status, {"Retry-After": "9"}), Fault(status))
    assert _read(files, version, 0, 100) == DATA[:100]
    assert waits == [9, 1]
    assert [asked.range for asked in server.asked[1:]] == [(0, 100)] * 3


@pytest.mark.parametrize("status", [400, 401, 403, 500])
def test_a_server_that_refuses(files: HttpFiles, server: Server, status: int) -> None:
    server.fault = lambda asked: Fault(status)
    with pytest.raises(FetchFailed, match=str(status)):
        files.beginning(NAME, 8)


def test_the_hub_says_what_to_do_about_a_gated_model(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafila.shard.source.hub_endpoint", lambda: server.base.rstrip("/"))
    server.fault = lambda asked: Fault(401)
    files = HttpFiles(Hub("org/name"), Patience())
    with pytest.raises(FetchFailed, match="HF_TOKEN"):
        files.beginning(NAME, 8)
    files.close()


def test_a_file_that_is_not_there(files: HttpFiles) -> None:
    with pytest.raises(ModelNotFound, match=r"has no other\.safetensors"):
        files.beginning("other.safetensors", 8)
    assert files.text("other.json") is None


@pytest.mark.parametrize("etags", [True, False])
def test_a_file_that_was_replaced_is_noticed(files: HttpFiles, server: Server, *, etags: bool) -> None:
    server.etags = etags
    version = _version(files)
    (server.folder / NAME).write_bytes(DATA[:50_000])
    with pytest.raises(SourceChanged):
        _read(files, version, 100, 200)
    with pytest.raises(SourceChanged):
        _read(files, version, 60_000, 70_000)


def test_a_file_that_is_replaced_between_two_parts_is_noticed(files: HttpFiles, server: Server) -> None:
    version = _version(files)
    faults(server, Fault(break_after=500))
    got: list[bytes] = []

    def sink(at: int, data: bytes) -> None:
        got.append(data)
        (server.folder / NAME).write_bytes(DATA[::-1])

    with pytest.raises(SourceChanged):
        files.read(NAME, version, 0, len(DATA), sink)
    assert b"".join(got) == DATA[:500]


def test_a_small_file_comes_whole_from_a_server_without_ranges(files: HttpFiles, server: Server) -> None:
    server.ranges = False
    version, data = files.beginning(NAME, 8)
    assert version.size == len(DATA)
    assert data == DATA
    assert _read(files, version, 10, 20) == DATA[10:20]


def test_a_large_file_from_a_server_without_ranges_is_declined_before_it_comes(
    files: HttpFiles, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_files, "SMALL_BYTES", len(DATA) - 1)
    server.ranges = False
    with pytest.raises(FetchFailed, match="does not give parts of files"):
        files.beginning(NAME, 8)


def test_another_part_than_asked_for_is_declined(files: HttpFiles, server: Server) -> None:
    version = _version(files)
    server.shift = 1
    try:
        with pytest.raises(FetchFailed, match="another part"):
            _read(files, version, 10, 20)
    finally:
        server.shift = 0


def test_a_text_comes_once_while_it_stays_the_same(files: HttpFiles, server: Server) -> None:
    found = files.text(NAME)
    assert found is not None
    version, data = found
    assert data == DATA
    with pytest.raises(Unchanged):
        files.text(NAME, version)
    (server.folder / NAME).write_bytes(b"new")
    again = files.text(NAME, version)
    assert again is not None
    assert again[1] == b"new"


def test_a_connection_that_stalls_is_taken_for_broken(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_files, "TIMEOUT", httpx.Timeout(0.5))
    broken = threading.Event()
    files = HttpFiles(Web(server.base), Patience(wait=lambda seconds: broken.set()))
    version = _version(files)
    stalled: list[int] = []

    def stall(at: int) -> None:
        if at > 50_000 and not stalled:
            stalled.append(at)
            server.lock.release()  # for the next request
            broken.wait()
            server.lock.acquire()

    server.on_sent = stall
    try:
        assert _read(files, version, 0, len(DATA)) == DATA
    finally:
        server.on_sent = lambda total: None
        files.close()
    assert len(stalled) == 1
    assert server.asked[-1].range == (stalled[0] - 8, len(DATA))


def test_nobody_there(waits: list[float]) -> None:
    files = HttpFiles(Web("http://127.0.0.1:9/"), Patience(wait=waits.append))
    with pytest.raises(FetchFailed, match=r"http://127\.0\.0\.1:9/ does not come"):
        files.beginning(NAME, 8)
    assert len(waits) == 5
    files.close()


def test_a_circle_of_redirects(files: HttpFiles, server: Server) -> None:
    server.fault = lambda asked: Fault(302, {"Location": f"/{NAME}"})
    with pytest.raises(FetchFailed, match="cannot be asked for"):
        files.beginning(NAME, 8)


def test_a_member_that_leaves_does_not_wait(server: Server) -> None:
    patience = Patience()
    files = HttpFiles(Web(server.base), patience)
    version = _version(files)

    def fault(asked: Asked) -> Fault:
        patience.stopping.set()
        return Fault(503, {"Retry-After": "200"})

    server.fault = fault
    with pytest.raises(FetchFailed, match="leaving"):
        _read(files, version, 0, 10)
    files.close()
