"""A web server for checkpoints that can be made to misbehave, and that counts what it gave."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

CHUNK_BYTES = 8192
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(frozen=True)
class Asked:
    """One request."""

    file: str
    range: tuple[int, int] | None
    headers: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one answer: a status instead of it, an end after so many bytes of it."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    break_after: int | None = None


class Web:
    """Serves ``folder`` at ``base``. The attributes may be set while it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[Asked] = []
        self.sent: dict[str, int] = {}
        """Bytes of each file that went out."""
        self.ranges = True
        self.etags = True
        self.shift = 0
        """Parts begin so many bytes too late."""
        self.moved_from = ""
        """Requests below this are redirected to the same path without it."""
        self.fault: Callable[[Asked], Fault | None] = lambda asked: None
        self.on_sent: Callable[[int], None] = lambda total: None
        """Called with all bytes sent so far, before each chunk."""
        self.lock = threading.Lock()
        self.base = ""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weight files that went out."""
        return sum(count for file, count in self.sent.items() if file.endswith(".safetensors"))

    def forget(self) -> None:
        """Count from here."""
        self.asked.clear()
        self.sent.clear()


@contextmanager
def serving(folder: Path) -> Iterator[Web]:
    """A server of ``folder`` on this machine, for as long as the block."""
    web = Web(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(web))
    server.daemon_threads = True
    web.base = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(web: Web) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # whoever asked has gone
                super().handle()

        def do_GET(self) -> None:
            _answer(web, self)

    return Handler


def _answer(web: Web, handler: BaseHTTPRequestHandler) -> None:
    path = unquote(handler.path).lstrip("/")
    if web.moved_from and path.startswith(web.moved_from):
        return _say(handler, 302, {"Location": "/" + path.removeprefix(web.moved_from)})
    match = _RANGE.fullmatch(handler.headers.get("Range", ""))
    asked = Asked(path, (int(match[1]), int(match[2]) + 1) if match else None, dict(handler.headers.items()))
    with web.lock:
        web.asked.append(asked)
        fault = web.fault(asked) or Fault()
    file = web.folder / path
    if fault.status is not None:
        return _say(handler, fault.status, fault.headers)
    if not file.is_file():
        return _say(handler, 404, {})
    data = file.read_bytes()
    headers = {"ETag": f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'} if web.etags else {}
    if web.etags and handler.headers.get("If-None-Match") == headers["ETag"]:
        return _say(handler, 304, headers)
    wanted = asked.range if web.ranges and handler.headers.get("If-Range") in {None, headers.get("ETag")} else None
    if wanted is None:
        return _send(web, handler, path, data, headers, fault, 200)
    if wanted[0] >= len(data):
        return _say(handler, 416, {"Content-Range": f"bytes */{len(data)}"})
    first = wanted[0] + web.shift
    part = data[first : wanted[1] + web.shift]
    headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
    return _send(web, handler, path, part, headers, fault, 206)


def _say(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": "0", **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()


def _send(
    web: Web,
    handler: BaseHTTPRequestHandler,
    path: str,
    data: bytes,
    headers: dict[str, str],
    fault: Fault,
    status: int,
) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(data))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    stop = len(data) if fault.break_after is None else min(len(data), fault.break_after)
    try:
        for at in range(0, stop, CHUNK_BYTES):
            chunk = data[at : min(at + CHUNK_BYTES, stop)]
            with web.lock:
                web.on_sent(sum(web.sent.values()))
                web.sent[path] = web.sent.get(path, 0) + len(chunk)
            handler.wfile.write(chunk)
    except OSError:
        handler.close_connection = True  # whoever asked has gone
    if stop < len(data):
        handler.close_connection = True
