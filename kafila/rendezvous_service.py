"""The rendezvous as a running service: its machine on one socket, STUN on that one and on a second (Trio).

The second port answers STUN alone. With it a member can tell how its NAT treats another port of a host it knows (RFC
5780 sections 4.3 and 4.4). The rest of that method needs a second host, which a machine with two addresses can be: then
there are two more sockets, for STUN alone as well.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
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


@dataclass(frozen=True, slots=True)
class Alternate:
    """A second address for STUN. Networks bind to one host each here; ``first`` and ``second`` are these hosts as
    members reach them, of one family."""

    network: Network
    first: str
    second: str


async def serve(network: Network, port: int, console: Console, alternate: Alternate | None = None) -> None:
    """Run until cancelled; members are told when it ends. Raises UsageError when the port is taken."""
    async with rendezvous(network, port, alternate) as running:
        ports = " and ".join(str(each) for each in running.stun_ports)
        also = "" if alternate is None else f", on {alternate.second} as well"
        console.status(f"rendezvous listening on UDP port {running.address.port} (STUN on {ports}{also})")
        await trio.sleep_forever()


@asynccontextmanager
async def rendezvous(network: Network, port: int = 0, alternate: Alternate | None = None) -> AsyncIterator[Running]:
    """A service that runs as long as the block does. Port 0 picks a free one. Raises UsageError when it is taken."""
    with ExitStack() as stack:
        main = await _bind(network, port)
        stack.callback(main.close)
        second = await _bind_second(network, main.address.port)
        stack.callback(second.close)
        sockets = {Local(0, 0): main, Local(0, 1): second}
        if alternate is not None:
            for number in (0, 1):
                socket = await _bind(alternate.network, sockets[Local(0, number)].address.port)
                stack.callback(socket.close)
                sockets[Local(1, number)] = socket
        async with _running(sockets, alternate) as running:
            yield running


@asynccontextmanager
async def _running(sockets: Mapping[Local, DatagramSocket], alternate: Alternate | None) -> AsyncIterator[Running]:
    stun, main = _Stun(sockets, alternate, os.urandom), Local(0, 0)
    server = RendezvousServer(make_identity(), os.urandom, stun.on(main))
    endpoint = Endpoint(sockets[main], server)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endpoint.run)
        for local, socket in sockets.items():
            if local != main:
                nursery.start_soon(Endpoint(socket, _StunOnly(stun.on(local))).run)
        try:
            yield Running(sockets[main].address, stun.ports, server)
        finally:
            server.close(trio.current_time())
            endpoint.poke()
            nursery.cancel_scope.cancel()


async def _bind(network: Network, port: int) -> DatagramSocket:
    try:
        return await network.bind(port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError("this machine does not have that address: --bind and --alt-address are its own") from error
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
    """Answers on the service's sockets; a reply asked for from another socket leaves there."""

    def __init__(
        self, sockets: Mapping[Local, DatagramSocket], alternate: Alternate | None, randbytes: Callable[[int], bytes]
    ) -> None:
        self.ports = tuple(sockets[Local(0, number)].address.port for number in (0, 1))
        self._sockets = sockets
        key = randbytes(_SECRET_BYTES)
        hosts = {family: (host,) for family, host in _UNKNOWN_HOSTS.items()}
        self._servers = {family: StunServer(unknown, self.ports, key) for family, unknown in hosts.items()}
        if alternate is not None:
            known = (alternate.first, alternate.second)
            self._servers[ip_address(alternate.first).version] = StunServer(known, self.ports, key)

    def on(self, local: Local) -> Callable[[bytes, Address, float], bytes | None]:
        """What answers on one socket."""

        def answer(data: bytes, source: Address, now: float) -> bytes | None:
            server = self._servers[ip_address(source.host).version]
            reply = server.respond(data, source, local, now)
            if reply is None or reply.local == local:
                return reply.data if reply else None
            self._sockets[reply.local].send_batch([Transmit(reply.data, source)])
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
