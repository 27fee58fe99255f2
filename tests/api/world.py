"""An interface over a scripted engine, on real loopback sockets, and a client that speaks raw HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from kafila.api import server
from kafila.api.app import Desk, make_app
from kafila.api.engine import EdgeFacts, MemberFacts, ModelFacts, RingFacts
from kafila.api.guard import Guard
from kafila.api.metrics import Metrics
from kafila.api.openai_requests import Defaults
from kafila.ring.frames import Text
from kafila.types import FinishReason, NodeId, Question, Sampling

MODEL = ModelFacts("Camel-7B", "llama", "float32", 1000, 4, 7_000_000)
RING = RingFacts(
    0,
    (MemberFacts("ada", 0, 4, 0.002, 0.0021, 100, 200), MemberFacts("<b>bob</b>", 4, 9, 0.003, None, 150, 200)),
    (EdgeFacts("direct", 0.0012, measured=True), EdgeFacts("relayed", 0.04, measured=False)),
    0.006,
    1,
    2,
    345,
)


def part(delta: str, finish: FinishReason | None = None, **rest: Any) -> Text:
    return Text("r", NodeId(b""), delta, finish, **rest)


def said(*deltas: str, finish: FinishReason = FinishReason.STOP) -> list[Text]:
    """An answer in these pieces, with counts that stand."""
    ending = part("", finish, prompt_tokens=5, reused_tokens=2, answer_tokens=len(deltas), queue_s=0.1, decode_s=0.5)
    return [*map(part, deltas), ending]


@dataclass
class ScriptedEngine:
    """Says what it is given, whatever it is asked; waits forever where the script says so (None)."""

    script: Sequence[Text | None] = field(default_factory=lambda: said("Hel", "lo"))
    facts: ModelFacts | None = MODEL
    questions: list[Question] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    left: trio.Event = field(default_factory=trio.Event)
    """Set when an answer has been left, done or not."""

    def model(self) -> ModelFacts | None:
        return self.facts

    def ring(self) -> RingFacts | None:
        return None if self.facts is None else RING

    @asynccontextmanager
    async def answer(self, question: Question) -> AsyncIterator[AsyncIterator[Text]]:
        self.questions.append(question)
        self.running += 1
        done = False

        async def texts() -> AsyncGenerator[Text, None]:
            nonlocal done
            for text in self.script:
                if text is None:
                    await trio.sleep_forever()
                else:
                    await trio.lowlevel.checkpoint()
                    done = text.finish is not None
                    yield text

        try:
            async with aclosing(texts()) as answer:
                yield answer
        finally:
            self.running -= 1
            self.cancelled += not done
            self.left.set()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events, the closing [DONE] left out and asserted."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


class Client:
    """Speaks to one server, one connection a request."""

    def __init__(self, port: int, faults: list[str]) -> None:
        self.port = port
        self.faults = faults

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def raw(self, data: bytes) -> bytes:
        """Everything the server says to these bytes, until it closes."""
        async with await self.connect() as stream:
            await stream.send_all(data)
            return await everything(stream)

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
    ) -> Reply:
        return parse(await self.raw(message(self.port, method, path, body, headers)))

    async def get(self, path: str, *headers: tuple[str, str]) -> Reply:
        return await self.request("GET", path, headers=headers)

    async def post(self, path: str, value: Any, *headers: tuple[str, str]) -> Reply:
        return await self.request("POST", path, json.dumps(value).encode(), headers)


def message(port: int, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A request that asks for the connection to be closed after it."""
    named = {"Host": f"127.0.0.1:{port}", "Connection": "close", "Content-Length": str(len(body)), **dict(headers)}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def everything(stream: trio.SocketStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


def parse(response: bytes) -> Reply:
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    return Reply(int(first.split()[1]), headers, body)


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        whole += rest[:length]
        body = rest[length + 2 :]
    return whole


@asynccontextmanager
async def interface(
    engine: ScriptedEngine,
    *,
    key: str | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008  - frozen
) -> AsyncIterator[Client]:
    """The interface of ``engine``; whatever it thinks its own fault fails the test."""
    faults: list[str] = []
    listener = server.bind("127.0.0.1", 0, fixed=True)
    seeds = iter(range(1000, 2000))
    defaults = Defaults(sampling, 0, lambda: next(seeds))
    desk = Desk(engine, Metrics(engine), defaults, lambda: 1_700_000_000.0, lambda begin: f"{begin}0", 1_600_000_000.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, make_app(desk), listener, Guard("127.0.0.1", key), faults.append)
        yield Client(listener.getsockname()[1], faults)
        nursery.cancel_scope.cancel()
    assert not faults, faults
