"""What packet experiments are made of."""

from __future__ import annotations

import itertools

import trio

from kafila.types import Address
from sims.net import VirtualSocket

_tokens = itertools.count()

PATIENCE_S = 1.0
"""More than any path of these tests takes; virtual, so it costs nothing."""


def at(socket: VirtualSocket, host: int = 0) -> Address:
    """Where a socket listens: its machine's first address (or another) and its port."""
    return Address(socket.machine.hosts()[host], socket.address.port)


async def reaches(sender: VirtualSocket, to: Address, receiver: VirtualSocket) -> Address | None:
    """Send one datagram; the source that ``receiver`` sees, or None where it does not arrive."""
    token = b"experiment %d" % next(_tokens)
    await sender.send(token, to)
    with trio.move_on_after(PATIENCE_S):
        while True:
            data, source = await receiver.receive()
            if data == token:
                return source
    return None


async def mapped(sender: VirtualSocket, server: VirtualSocket, host: int = 0) -> Address:
    """The external address that ``server`` sees ``sender`` under."""
    source = await reaches(sender, at(server, host), server)
    assert source is not None
    return source
