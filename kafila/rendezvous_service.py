"""The rendezvous as a running service: its machine on one socket, STUN on that one and on a second (Trio).

The second port answers STUN alone. With it a member can tell how its NAT treats another port of a host it knows (RFC
5780 sections 4.3 and 4.4); the rest of that method needs a second host, which this service does not have.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address

import trio

from kafila.console import Console
from kafila.endpoint import Endpoint
from kafila.errors import UsageError
from kafila.nat.stun_server import Local, StunServer
from kafila.net import DatagramSocket, Network
from kafila.ring.identity import make_identity
from kafila.ring.rendezvous import RendezvousServer
from kafila.types import Address, Transmit
from kafila.wire import Kind, classify

DEFAULT_PORT = 7443

_SECRET_BYTES = 32
_UNKNOWN_HOSTS = {4: "0.0.0.0", 6: "::"}  # noqa: S104  - says "the host you asked", and is bound to nothing
"""The service cannot know its public host: it listens on all of its machine's, perhaps behind a NAT."""


@dataclass(frozen=True, slots=True)
class Running:
    """A service that runs: where it is bound (the host is a wildcard), its STUN ports, and what it counts."""

    address: Address
    stun_ports: tuple[int, ...]
    server: RendezvousServer


async def serve(network: Network, port: int, console: Console) -> None:
    """Run until cancelled; members are told when it ends. Raises UsageError when the port is taken."""
    async with rendezvous(network, port) as running:
        ports = " and ".join(str(each) for each in running.stun_ports)
        console.status(f"rendezvous listening on UDP port {running.address.port} (STUN on {ports})")
        await trio.sleep_forever()


@asynccontextmanager
async def rendezvous(network: Network, port: int = 0) -> AsyncIterator[Running]:
    """A service that runs as long as the block does. Port 0 picks a free one. Raises UsageError when it is taken."""
    main = await _bind(network, port)
    try:
        second = await _bind_second(network, main.address.port)
        try:
            async with _running(main, second) as running:
                yield running
        finally:
            second.close()
    finally:
        main.close()


@asynccontextmanager
async def _running(main: DatagramSocket, second: DatagramSocket) -> AsyncIterator[Running]:
    stun = _Stun((main, second), os.urandom)
    server = RendezvousServer(make_identity(), os.urandom, stun.on(0))
    endpoint = Endpoint(main, server)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endpoint.run)
        nursery.start_soon(Endpoint(second, _StunOnly(stun.on(1))).run)
        try:
            yield Running(main.address, stun.ports, server)
        finally:
            server.close(trio.current_time())
            endpoint.poke()
            nursery.cancel_scope.cancel()


async def _bind(network: Network, port: int) -> DatagramSocket:
    try:
        return await network.bind(port)
    except OSError as error:
        raise UsageError(
            f"UDP port {port} cannot be had ({error.strerror}): another rendezvous may run here; choose another port"
        ) from error


async def _bind_second(network: Network, first: int) -> DatagramSocket:
    """The next port, which whoever opens a firewall can foresee; any, where that is taken."""
    try:
        return await network.bind(first + 1 if first < 65_535 else 0)
    except OSError:
        return await network.bind()


class _Stun:
    """Answers on the service's sockets; a reply asked for from the other socket leaves there."""

    def __init__(self, sockets: Sequence[DatagramSocket], randbytes: Callable[[int], bytes]) -> None:
        self.ports = tuple(socket.address.port for socket in sockets)
        self._sockets = sockets
        key = randbytes(_SECRET_BYTES)
        self._servers = {family: StunServer((host,), self.ports, key) for family, host in _UNKNOWN_HOSTS.items()}

    def on(self, number: int) -> Callable[[bytes, Address, float], bytes | None]:
        """What answers on socket ``number``."""

        def answer(data: bytes, source: Address, now: float) -> bytes | None:
            server = self._servers[ip_address(source.host).version]
            reply = server.respond(data, source, Local(0, number), now)
            if reply is None or reply.local.port == number:
                return reply.data if reply else None
            self._sockets[reply.local.port].send_batch([Transmit(reply.data, source)])
            return None

        return answer


class _StunOnly:
    """The second socket's machine."""

    def __init__(self, answer: Callable[[bytes, Address, float], bytes | None]) -> None:
        self._answer = answer
        self._replies: list[Transmit] = []

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """Answer a STUN request; anything else is for the other port."""
        reply = self._answer(data, source, now) if classify(data) is Kind.STUN else None
        if reply is not None:
            self._replies.append(Transmit(reply, source))

    def handle_timer(self, now: float) -> None:
        """Nothing waits here."""

    def next_timer(self) -> float | None:
        """Never."""
        return None

    def datagrams_to_send(self, now: float) -> list[Transmit]:  # noqa: ARG002  - the shape of every machine
        """The answers, once."""
        replies, self._replies = self._replies, []
        return replies
