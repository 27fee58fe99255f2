"""A member's local interface, from its settings to its socket (Trio)."""

from __future__ import annotations

import platform
import secrets
import socket
import time

from kafila.api import server
from kafila.api.app import Desk, make_app
from kafila.api.engine import Engine
from kafila.api.guard import Guard
from kafila.api.metrics import Metrics
from kafila.api.openai_requests import Defaults
from kafila.console import Console
from kafila.settings import ApiSettings


async def serve_api(settings: ApiSettings, engine: Engine, console: Console) -> None:
    """Answer until cancelled. Raises UsageError when the address cannot be listened on."""
    listener = server.bind(settings.host, settings.port, fixed=settings.fixed)
    console.status(f"local API and page: {_url(settings, listener)}")
    defaults = Defaults(settings.sampling, settings.max_tokens, lambda: secrets.randbits(62), settings.rolling)
    # The clock that people read: clients are told when an answer was made, and nothing waits for it.
    desk = Desk(engine, Metrics(engine), defaults, time.time, _new_id, time.time())
    await server.serve(make_app(desk), listener, Guard(settings.host, settings.key, _own_names()), console.error)


def _url(settings: ApiSettings, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    moved = "" if port == settings.port or settings.fixed else f" (port {settings.port} is taken)"
    return f"http://{host}:{port}/{moved}"


def _own_names() -> frozenset[str]:
    """What this machine is called in its own network."""
    name = platform.node().lower()
    return frozenset({name, f"{name.partition('.')[0]}.local"} if name else ())


def _new_id(beginning: str) -> str:
    return beginning + secrets.token_hex(12)
