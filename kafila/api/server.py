"""The interface on its socket: hypercorn's HTTP over connections that cannot be held up (Trio).

Hypercorn's own ``serve`` binds, accepts and shuts down by itself; its connection handler is used alone, because

- it shields its writes from cancellation, so one client that stops reading would keep a node from ending: here a write
  has a limit, and ends with the node;
- it hands on a body that nobody reads until a queue is full, and then never ends: here a body is read, or drained,
  before anything is answered, and a connection is cut where a client still goes on sending;
- a client that sends its request drop by drop is cut by hypercorn's keep-alive time (headers) and ours (body), and the
  number of connections is bounded.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.types import ASGIApp, Message, Receive, Send

from kafila.api.bodies import Gone, read_body
from kafila.api.guard import Guard
from kafila.api.openai_answers import as_json
from kafila.api.refusals import Refused
from kafila.errors import UsageError

MAX_CONNECTIONS = 512
"""Far more than people; below the file descriptors a process may have. More are closed at once."""
KEEP_ALIVE_S = 30.0
"""How long a connection may be idle, and how long the headers of a request may take."""
WRITE_TIMEOUT_S = 30.0
"""A client that takes nothing for so long has stopped reading. Until then an answer waits for it in one piece."""
REFUSAL_TIMEOUT_S = 2.0
"""For telling a client that sends too much that it does, before its connection is cut."""
MAX_HEADER_BYTES = 32 << 10
NEXT_PORTS = 64
"""How many ports above the usual one are tried: several members of one machine each have an interface."""


def bind(host: str, port: int, *, fixed: bool) -> socket.socket:
    """A listening socket on ``port``, or unless ``fixed`` on the next free one. Raises UsageError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise UsageError(f"--api {host}:{port}: {host} is no address of this machine ({error.strerror})") from None
    last: OSError | None = None
    for candidate in range(port, min(port + (1 if fixed or not port else NEXT_PORTS), 65536)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address[0], candidate, *address[2:]))
            listener.listen(128)
        except OSError as error:
            listener.close()
            last = error
            if error.errno != errno.EADDRINUSE:
                break
        else:
            listener.setblocking(False)
            return listener
    why = "" if last is None else f" ({last.strerror})"
    raise UsageError(f"--api {host}:{port} cannot be listened on{why}: choose another port, or --api off")


async def serve(app: ASGIApp, listener: socket.socket, guard: Guard, on_fault: Callable[[str], None]) -> None:
    """Answer until cancelled; then every connection is closed at once. ``on_fault`` hears of our own mistakes."""
    server = Server(app, guard, on_fault)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.cut_all_at_the_end)
        listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        await trio.serve_listeners(server.connection, [listening], handler_nursery=nursery)


class Server:
    """Answers on streams that somebody has accepted. ``on_fault`` hears of our own mistakes."""

    def __init__(self, app: ASGIApp, guard: Guard, on_fault: Callable[[str], None]) -> None:
        self._app = app
        self._guard = guard
        self._on_fault = on_fault
        self._config = _config(on_fault)
        self._context = WorkerContext(None)
        self._open: set[_Connection] = set()

    async def cut_all_at_the_end(self) -> None:
        """Runs beside the connections: their writes end when it is cancelled."""
        try:
            await trio.sleep_forever()
        finally:
            for connection in self._open:
                connection.cut()

    async def connection(self, stream: trio.SocketStream) -> None:
        """One client, until it has had enough."""
        connection = _Connection(stream)
        if len(self._open) >= MAX_CONNECTIONS:
            await connection.aclose()
            return
        self._open.add(connection)
        app = partial(self._request, connection)
        try:
            with connection.scope:
                await TCPServer(app, self._config, self._context, ConnectionState({}), connection).run()  # type: ignore[arg-type]  # it takes any stream with a socket
        except Exception as error:  # noqa: BLE001  - whatever a client makes of a connection, the session goes on
            self._on_fault(f"a connection to the local interface failed ({error!r})")
        finally:
            self._open.discard(connection)

    async def _request(self, connection: _Connection, scope: Any, receive: Any, send: Any, *_threads: object) -> None:
        """One request: checked, its body read, then the app's."""
        if scope["type"] != "http":
            return  # nothing here speaks WebSocket: hypercorn says so
        try:
            headers = {name.decode("latin1"): value.decode("latin1") for name, value in scope["headers"]}
            headers.setdefault("host", headers.get(":authority", ""))
            refused = _refusal(self._guard, scope["method"], scope["path"], headers)
            body = await read_body(receive)
        except Gone:
            return
        except Refused as error:  # there may be more of it on its way
            with trio.move_on_after(REFUSAL_TIMEOUT_S):
                await _refuse(error, scope["path"], send)
            connection.cut()
            return
        if refused is not None:
            await _refuse(refused, scope["path"], send)
        else:
            await self._app(scope, _after(body, receive), send)


def _refusal(guard: Guard, method: str, path: str, headers: dict[str, str]) -> Refused | None:
    try:
        guard.check(method, path, headers)
    except Refused as refused:
        return refused
    return None


async def _refuse(refused: Refused, path: str, send: Send) -> None:
    body = as_json(refused.ollama_body() if path.startswith("/api/") else refused.openai_body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _after(body: bytes, receive: Receive) -> Receive:
    """Hands on a body that was read already, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


class _Connection:
    """A client's stream; writes are bounded in time, and end when the connection is cut."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.scope = trio.CancelScope()
        self.socket = stream.socket
        self._stream = stream
        self._writing = trio.CancelScope()

    def cut(self) -> None:
        """End it now, a write that hypercorn shields included."""
        self._writing.cancel()
        self.scope.cancel()

    async def send_all(self, data: bytes) -> None:
        """Raises BrokenResourceError when the client does not take it."""
        if self.scope.cancel_called:
            raise trio.BrokenResourceError
        with trio.move_on_after(WRITE_TIMEOUT_S) as self._writing:
            await self._stream.send_all(data)
            return
        raise trio.BrokenResourceError

    async def receive_some(self, max_bytes: int) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


def _config(on_fault: Callable[[str], None]) -> Config:
    config = Config()
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = _faults_to(on_fault)
    return config


def _faults_to(on_fault: Callable[[str], None]) -> logging.Logger:
    """A logger of our own, known to no registry, for what hypercorn would print."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            on_fault(f"the local interface failed on a request ({error!r})" if error else record.getMessage())

    logger = logging.Logger("kafila.api", logging.ERROR)
    logger.addHandler(Handler())
    return logger
