"""The routes, and the way of a request that asks for an answer (ASGI, under Trio)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kafila.api import facts, ollama_answers, ollama_requests, openai_answers, openai_requests
from kafila.api.answers import Piece, asked_of, refusal
from kafila.api.common import Asked, check_model
from kafila.api.engine import Engine, ModelFacts
from kafila.api.fields import Fields, parse_object
from kafila.api.metrics import CONTENT_TYPE, Metrics
from kafila.api.ollama_answers import OllamaAnswer
from kafila.api.openai_answers import ChatStream, ChatWhole, CompletionStream, CompletionWhole, Frame, as_json
from kafila.api.openai_requests import Defaults
from kafila.api.page import PAGE, PAGE_HEADERS
from kafila.api.refusals import Refused
from kafila.errors import UsageError
from kafila.question import check

CLIENT_GONE = 499
"""How the counters call a request whose client hung up (nginx's number)."""


class Writer(Protocol):
    """An answer in one of the interfaces' forms."""

    content_type: str

    def feed(self, piece: Piece) -> bytes:
        """What is written at once."""
        ...

    def finish(self) -> bytes:
        """What is written at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Desk:
    """What endpoints work with. ``clock``: seconds since 1970; ``new_id``: a fresh id that begins with this."""

    engine: Engine
    metrics: Metrics
    defaults: Defaults
    clock: Callable[[], float]
    new_id: Callable[[str], str]
    since: float

    def model(self) -> ModelFacts:
        """What is served. Refuses where nothing is."""
        model = self.engine.model()
        if model is None:
            raise Refused(503, "the session does not serve yet, or is over: try again when it does", code="not_serving")
        return model

    def time(self, seconds: float) -> str:
        """As Ollama writes it (RFC 3339)."""
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


Begin = Callable[[Desk, Fields], tuple[Asked, Writer] | bytes]
"""Reads a request: what to ask and how to write it, or an answer that needs no asking. Raises Refused."""


class AnswerRoute:
    """An endpoint that asks the ring. A client that hangs up takes its question back."""

    def __init__(self, desk: Desk, route: str, begin: Begin, *, openai: bool) -> None:
        self._desk = desk
        self._route = route
        self._begin = begin
        self._openai = openai

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        message = await receive()
        reply = Reply(send)
        try:
            begun = self._begin(self._desk, parse_object(message.get("body", b"")))
            if not isinstance(begun, bytes):
                _check_all(begun[0])
        except Refused as refused:
            await self._fail(refused, reply)
        else:
            if isinstance(begun, bytes):
                await reply.whole(200, begun, "application/json")
            else:
                closing = await _unless_hung_up(receive, partial(self._answer, *begun, reply))
                if closing is not None:
                    await closing()
        self._desk.metrics.request(self._route, reply.status or CLIENT_GONE)

    async def _fail(self, refused: Refused, reply: Reply) -> None:
        """The error, in the answer's place or where a stream was to go on."""
        if reply.status:
            failed = openai_answers.failed if self._openai else ollama_answers.failed
            await reply.end(failed(refused))
        else:
            body = refused.openai_body() if self._openai else refused.ollama_body()
            await reply.whole(refused.status, as_json(body), "application/json")

    async def _answer(self, asked: Asked, writer: Writer, reply: Reply) -> Closing:
        """Everything but the end of the response, which is what comes back."""
        async with asked_of(self._desk.engine, asked.questions) as pieces:
            async for piece in pieces:
                if (refused := refusal(piece.text)) is not None:
                    return partial(self._fail, refused, reply)
                if piece.text.finish is not None:
                    self._desk.metrics.answered(piece.text)
                data = writer.feed(piece)
                if asked.stream and data:
                    await reply.part(data, writer.content_type)
        if asked.stream:
            return partial(reply.part, writer.finish(), writer.content_type, last=True)
        return partial(reply.whole, 200, writer.finish(), writer.content_type)


def _check_all(asked: Asked) -> None:
    for question in asked.questions:
        try:
            check(question)
        except UsageError as error:
            raise Refused(400, str(error), code="invalid_value") from None


Closing = Callable[[], Awaitable[None]]
"""Sends the end of a response. It must not be cancelled by the client's going: the server tells of a response that was
sent whole as it tells of a client that hung up, and is then still busy with it."""


async def _unless_hung_up(receive: Receive, work: Callable[[], Awaitable[Closing]]) -> Closing | None:
    """What the work comes to; None when the client hung up before."""
    closing = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        closing = await work()
        nursery.cancel_scope.cancel()
    return closing


class Reply:
    """One response on its way. ``status`` 0: nothing of it has left."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def whole(self, status: int, body: bytes, content_type: str) -> None:
        """All of it at once."""
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def part(self, data: bytes, content_type: str, *, last: bool = False) -> None:
        """A part of a stream."""
        if not self.status:
            # Proxies that collect a response before they pass it on would spoil a stream.
            more = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._start(200, [(b"content-type", content_type.encode()), *more])
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def end(self, data: bytes) -> None:
        """The last part of a stream that has begun."""
        await self._send({"type": "http.response.body", "body": data})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


# -- what each route reads and writes --------------------------------------------------------------------------------


def _chat(desk: Desk, fields: Fields) -> tuple[Asked, Writer]:
    model = desk.model().name
    asked = openai_requests.read_chat(fields, model, desk.defaults)
    frame = Frame(desk.new_id("chatcmpl-"), model, int(desk.clock()), desk.new_id)
    return asked, ChatStream(asked, frame) if asked.stream else ChatWhole(asked, frame)


def _completion(desk: Desk, fields: Fields) -> tuple[Asked, Writer]:
    model = desk.model().name
    asked = openai_requests.read_completion(fields, model, desk.defaults)
    frame = Frame(desk.new_id("cmpl-"), model, int(desk.clock()), desk.new_id)
    return asked, CompletionStream(asked, frame) if asked.stream else CompletionWhole(asked, frame)


def _ollama(desk: Desk, fields: Fields, *, chat: bool) -> tuple[Asked, Writer] | bytes:
    model = desk.model().name
    read = ollama_requests.read_chat if chat else ollama_requests.read_generate
    asked = read(fields, model, desk.defaults)
    name = fields.text("model", model)
    writer = OllamaAnswer(asked or Asked((), False), name, lambda: desk.time(desk.clock()), chat=chat)
    return writer.loaded() if asked is None else (asked, writer)


def _show(desk: Desk, fields: Fields) -> bytes:
    model = desk.model()
    check_model(fields.raw("model") or fields.raw("name"), model.name)
    return as_json(facts.ollama_show(model))


def make_app(desk: Desk) -> Starlette:
    """The whole interface. Nothing of it looks at Host, Origin or a key: the server does, before."""

    def get(path: str, answer: Callable[[Request], tuple[int, Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                status, body = answer(request)
            except Refused as refused:
                ollama = path.startswith("/api/")
                status, body = refused.status, refused.ollama_body() if ollama else refused.openai_body()
            desk.metrics.request(path, status)
            return Response(as_json(body), status, media_type="application/json")

        return Route(path, endpoint, methods=["GET"])

    def post(path: str, begin: Begin, *, openai: bool) -> Route:
        return Route(path, AnswerRoute(desk, path, begin, openai=openai), methods=["POST"])

    async def page(_request: Request) -> Response:
        return Response(PAGE, headers=PAGE_HEADERS, media_type="text/html")

    async def metrics(_request: Request) -> Response:
        return Response(desk.metrics.page(), headers={"content-type": CONTENT_TYPE})

    def tags(_request: Request) -> tuple[int, Any]:
        return 200, {"models": [facts.ollama_model(desk.model(), desk.time(desk.since))]}

    routes = [
        Route("/", page, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        get("/health", lambda _: facts.health(desk.engine)),
        get("/ring", lambda _: (200, facts.ring(desk.engine))),
        get("/v1/models", lambda _: (200, _models(desk))),
        get("/v1/models/{model:path}", lambda request: (200, _one_model(desk, request))),
        post("/v1/chat/completions", _chat, openai=True),
        post("/v1/completions", _completion, openai=True),
        get("/api/tags", tags),
        get("/api/ps", tags),
        get("/api/version", lambda _: (200, {"version": facts.OLLAMA_LEVEL})),
        post("/api/chat", partial(_ollama, chat=True), openai=False),
        post("/api/generate", partial(_ollama, chat=False), openai=False),
        post("/api/show", _show, openai=False),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


def _models(desk: Desk) -> dict[str, Any]:
    return {"object": "list", "data": [facts.openai_model(desk.model(), int(desk.since))]}


def _one_model(desk: Desk, request: Request) -> dict[str, Any]:
    model = desk.model()
    check_model(request.path_params["model"], model.name)
    return facts.openai_model(model, int(desk.since))


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405, in the form of the interface that was meant."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"{request.method} {request.url.path} is nothing this server does"
    refused = Refused(status, text, code="not_found" if status == 404 else "method_not_allowed")
    ollama = request.url.path.startswith("/api/")
    return Response(
        as_json(refused.ollama_body() if ollama else refused.openai_body()), status, media_type="application/json"
    )
