"""Clients that mean no good, or do not know better: the server answers what it can and holds nothing for the rest."""

from __future__ import annotations

import gc
import json
import socket

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kafila.api import bodies, server
from kafila.errors import UsageError
from tests.api.world import Client, ScriptedEngine, everything, interface, message, parse, part, said
from tests.patience import PATIENCE_S

ASK = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
STREAM = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
CHAT = "/v1/chat/completions"


async def test_ten_megabytes_are_too_many() -> None:
    async with interface(ScriptedEngine()) as client:
        for path, body in ((CHAT, b"x" * 10_000_000), ("/api/chat", ASK + b" " * 10_000_000)):
            reply = await client.request("POST", path, body)
            assert reply.status == 413
            assert "4 MiB" in str(reply.json["error"])
        assert (await client.request("POST", CHAT, ASK)).status == 200


async def test_a_body_in_chunks_is_counted_too() -> None:
    async with interface(ScriptedEngine()) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"%x\r\n" % 1_000_000 + b" " * 1_000_000 + b"\r\n"
        reply = parse(await client.raw(head.encode() + chunk * 5 + b"0\r\n\r\n"))
    assert reply.status == 413


async def test_a_flood_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes on sending, whatever it is told, is told once and then cut."""
    monkeypatch.setattr(bodies, "DRAIN_BYTES", 6 << 20)
    monkeypatch.setattr(server, "REFUSAL_TIMEOUT_S", 0.05)
    async with interface(ScriptedEngine()) as client, await client.connect() as stream:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
        await stream.send_all(head.encode())
        with trio.fail_after(PATIENCE_S), pytest.raises(trio.BrokenResourceError):
            await _flood(stream)
        # The interface still answers.
        assert (await client.get("/v1/models")).status == 200


async def _flood(stream: trio.SocketStream) -> None:
    while True:
        await stream.send_all(b" " * 100_000)


async def test_a_body_that_nobody_asked_for_holds_nothing() -> None:
    async with interface(ScriptedEngine()) as client:
        for path in ("/nowhere", "/", "/health", "/v1/models"):
            reply = await client.request("POST", path, b"x" * 3_000_000)
            assert reply.status in {404, 405}
        evil = await client.request("POST", CHAT, b"x" * 3_000_000, [("Host", "evil.example")])
        assert evil.status == 403


async def test_headers_drop_by_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.1)
    async with interface(ScriptedEngine()) as client, await client.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHo")
        with trio.fail_after(PATIENCE_S):
            assert await everything(stream) == b""


async def test_a_body_drop_by_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.1)
    async with interface(ScriptedEngine()) as client, await client.connect() as stream:
        await stream.send_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        with trio.fail_after(PATIENCE_S):
            assert parse(await everything(stream)).status == 408


async def test_headers_without_end() -> None:
    async with interface(ScriptedEngine()) as client:
        response = await client.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 10_000)
    assert response.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)),
    ],
)
async def test_what_is_not_our_protocol(data: bytes) -> None:
    async with interface(ScriptedEngine()) as client:
        async with await client.connect() as stream:
            await stream.send_all(data)
            await stream.send_eof()
            with trio.fail_after(PATIENCE_S):
                answer = await everything(stream)
        assert not answer.startswith(b"HTTP/1.1 200")
        assert (await client.get("/v1/models")).status == 200


async def test_http_2_by_upgrade() -> None:
    """Java's client asks for it with its first request, and goes on in HTTP/1.1 where it has a body."""
    async with interface(ScriptedEngine()) as client:
        settings = [("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAoAAAAAIAAAAA"), ("Connection", "Upgrade")]
        reply = await client.request("POST", CHAT, ASK, [*settings[:2], ("Connection", "close")])
    assert reply.status == 200


async def test_a_connection_is_kept() -> None:
    async with interface(ScriptedEngine()) as client, await client.connect() as stream:
        request = message(client.port, "POST", CHAT, STREAM, [("Connection", "keep-alive")])
        for _ in range(3):
            await stream.send_all(request)
            heard = b""
            while not heard.endswith(b"0\r\n\r\n"):
                heard += await stream.receive_some()
            assert b"data: [DONE]" in heard


async def test_requests_one_behind_the_other() -> None:
    async with interface(ScriptedEngine()) as client:
        keep = message(client.port, "POST", CHAT, ASK, [("Connection", "keep-alive")])
        heard = await client.raw(keep * 3 + message(client.port, "GET", "/health"))
    assert heard.count(b"HTTP/1.1 200") == 4


async def test_a_client_that_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a slot until a write has waited too long, and no longer."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.1)
    engine = ScriptedEngine([*(part("x" * 100_000) for _ in range(200)), None])
    async with interface(engine) as client, await _deaf(client):
        with trio.fail_after(PATIENCE_S):
            await engine.left.wait()
    assert engine.cancelled == 1


async def test_the_end_does_not_wait_for_a_client_that_stops_reading() -> None:
    engine = ScriptedEngine([*(part("x" * 100_000) for _ in range(200)), None])
    with trio.fail_after(PATIENCE_S):
        async with interface(engine) as client:
            stream = await _deaf(client)
            await wait_all_tasks_blocked(0.2)
        await stream.aclose()
    assert engine.running == 0


async def _deaf(client: Client) -> trio.SocketStream:
    stream = await client.connect()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await stream.send_all(message(client.port, "POST", CHAT, STREAM))
    return stream


async def test_the_end_is_quick_for_those_who_listen() -> None:
    engine = ScriptedEngine([part("a"), None])
    began = trio.current_time()
    async with interface(engine) as client:
        streams = [await client.connect() for _ in range(20)]
        for stream in streams:
            await stream.send_all(message(client.port, "POST", CHAT, STREAM))
        while engine.running < 20:
            await trio.lowlevel.checkpoint()
    for stream in streams:
        with trio.fail_after(PATIENCE_S):
            await everything(stream)
        await stream.aclose()
    assert trio.current_time() - began < server.KEEP_ALIVE_S
    assert engine.running == 0


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    async with interface(ScriptedEngine()) as client:
        held = [await client.connect() for _ in range(3)]
        for stream in held:
            await stream.send_all(message(client.port, "GET", "/health", headers=[("Connection", "keep-alive")]))
            await stream.receive_some()
        async with await client.connect() as one_more:
            assert await everything(one_more) == b""
        for stream in held:
            await stream.aclose()


async def test_our_own_mistake_is_one_line_and_status_500() -> None:
    class Broken(ScriptedEngine):
        def ring(self) -> None:
            raise ZeroDivisionError

    async with interface(Broken()) as client:
        assert (await client.get("/ring")).status == 500
        assert (await client.get("/v1/models")).status == 200
        assert client.faults == ["the local interface failed on a request (ZeroDivisionError())"]
        client.faults.clear()


async def test_nothing_is_left_behind() -> None:
    engine = ScriptedEngine(said("a", "b", "c"))
    async with interface(engine) as client:
        await _round(client)
        await wait_all_tasks_blocked(0.05)
        gc.collect()
        before = len(gc.get_objects())
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(5):
            await _round(client)
        await wait_all_tasks_blocked(0.05)
        gc.collect()
        assert trio.lowlevel.current_statistics().tasks_living <= tasks
        assert len(gc.get_objects()) < before + 2000
    assert engine.running == 0


async def _round(client: Client) -> None:
    async with trio.open_nursery() as nursery:
        for body in (ASK, STREAM) * 10:
            nursery.start_soon(client.request, "POST", CHAT, body)


def test_the_next_free_port_is_taken() -> None:
    first = server.bind("127.0.0.1", 0, fixed=True)
    port = first.getsockname()[1]
    second = server.bind("127.0.0.1", port, fixed=False)
    with first, second:
        assert second.getsockname()[1] > port
        with pytest.raises(UsageError, match="choose another port, or --api off"):
            server.bind("127.0.0.1", port, fixed=True)


def test_an_address_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.77"):
        server.bind("192.0.2.77", 11435, fixed=True)
