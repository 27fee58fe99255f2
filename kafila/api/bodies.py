"""Request bodies, read whole before anything is done with them: bounded in bytes and in time."""

from __future__ import annotations

import trio
from starlette.types import Receive

from kafila.api.refusals import Refused

MAX_BODY_BYTES = 4 << 20
"""A conversation of a million tokens is about as long."""
DRAIN_BYTES = 64 << 20
"""What is read of a body that is too long before the sender is told so. A client hears an answer only when it has sent
all it had to say: a connection that is closed while it sends looks broken to it."""
BODY_TIMEOUT_S = 30.0
"""A body that is not here by then is somebody else's attempt to hold the connection."""


async def read_body(receive: Receive) -> bytes:
    """The whole body. Refuses one that is too long or too slow; raises :class:`Gone` when the client is."""
    with trio.move_on_after(BODY_TIMEOUT_S):
        return await _read(receive)
    raise Refused(408, f"the request's body was not here within {BODY_TIMEOUT_S:.0f} s")


async def _read(receive: Receive) -> bytes:
    kept, length = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part: bytes = message.get("body", b"")
        length += len(part)
        if length <= MAX_BODY_BYTES:
            kept.append(part)
        else:
            kept.clear()
        if not message.get("more_body", False) or length > DRAIN_BYTES:
            break
    if length > MAX_BODY_BYTES:
        raise Refused(413, f"the request's body is too long: at most {MAX_BODY_BYTES >> 20} MiB are read")
    return b"".join(kept)


class Gone(Exception):
    """The client hung up."""
