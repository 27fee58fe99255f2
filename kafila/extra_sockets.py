"""More sockets for one peer, while birthday probing needs them and as long as a path stands on one of them (Trio).

Where this member's NAT gives every destination a random port and the peer's filter wants the exact one, many sockets
here meet many guesses there (``nat/birthday.py``). It is the one case in which a member has more than its one socket.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import trio

from kafila.mesh import Mesh
from kafila.nat.birthday import GAP_S, MAX_GUESSES, MAX_SOCKETS, BirthdayRole
from kafila.net import DatagramSocket, Network
from kafila.types import NodeId

ATTEMPT_S = MAX_GUESSES * GAP_S + 5.0
"""As long as the peer guesses, and what the start of its attempt may lag behind ours."""
LOOK_S = 5.0
"""How often it is looked whether a path still needs its socket."""
_BATCH = 64


class ExtraSockets:
    """All that are open, by peer; within a peer they are numbered from 1."""

    def __init__(self, network: Network, mesh: Mesh, poke: Callable[[], None]) -> None:
        self._network = network
        self._mesh = mesh
        self._poke = poke
        self._lent: dict[NodeId, list[DatagramSocket]] = {}

    async def lend(self, peer: NodeId) -> None:
        """Try birthday probing towards ``peer``; returns when none of the sockets is needed any more."""
        if peer in self._lent:
            return
        sockets = self._lent[peer] = []
        try:
            with suppress(OSError):  # fewer must do
                for _ in range(MAX_SOCKETS):
                    sockets.append(await self._network.bind())  # noqa: PERF401  - those bound before one fails are used
            now = trio.current_time()
            if self._mesh.begin_birthday(peer, BirthdayRole.OPEN_SOCKETS, now, len(sockets)):
                await self._listen_to_all(peer, sockets)
        finally:
            del self._lent[peer]
            for socket in sockets:
                socket.close()

    async def _listen_to_all(self, peer: NodeId, sockets: list[DatagramSocket]) -> None:
        async with trio.open_nursery() as nursery:
            for number, socket in enumerate(sockets, start=1):
                nursery.start_soon(self._listen, peer, number, socket)
            self._poke()
            await trio.sleep(ATTEMPT_S)
            used = self._mesh.extra_socket_of(peer)
            for number, socket in enumerate(sockets, start=1):
                if number != used:
                    socket.close()
            while used and self._mesh.extra_socket_of(peer) == used:  # noqa: ASYNC110  - a look is all it takes
                await trio.sleep(LOOK_S)
            nursery.cancel_scope.cancel()

    async def _listen(self, peer: NodeId, number: int, socket: DatagramSocket) -> None:
        with suppress(trio.ClosedResourceError):
            while True:
                for data, source in await socket.receive_batch(_BATCH):
                    self._mesh.receive_extra(peer, number, data, source, trio.current_time())
                self._poke()

    def flush(self) -> None:
        """Send what the mesh wants sent from them."""
        while (extra := self._mesh.next_extra()) is not None:
            sockets = self._lent.get(extra.peer, [])
            if 0 < extra.number <= len(sockets):
                with suppress(trio.ClosedResourceError):  # given back already: lost, as in a network
                    sockets[extra.number - 1].send_batch([extra.transmit])
