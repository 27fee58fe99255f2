"""STUN servers in the virtual network, for tests of whatever asks them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from kafila.nat.stun_server import Local, StunServer
from kafila.net import DatagramSocket
from kafila.types import Address
from sims.net import Machine
from sims.packet import is_v6
from sims.topology import VirtualNetwork

PORTS = (3478, 3479)
_KEY = bytes(16)


class StunWorld:
    """A virtual network with a rendezvous of one or two hosts, two ports each, in every family asked for."""

    def __init__(self, seed: int, *, hosts: int, v6: bool = False) -> None:
        self.net = VirtualNetwork(seed)
        self.servers: list[Machine] = [self.net.machine(f"rendezvous-{n}", v6=v6) for n in range(hosts)]

    @property
    def addresses(self) -> list[Address]:
        """What a member is told to ask: the first host, in each of its families."""
        return [Address(host, PORTS[0]) for host in self.servers[0].hosts()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Deliver packets and answer requests within the block."""
        async with self.net.running(), self.serving():
            yield

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer requests within the block, in a network that runs already."""
        async with trio.open_nursery() as nursery:
            sockets: dict[Local, DatagramSocket] = {
                Local(host, port): await machine.bind(PORTS[port])
                for host, machine in enumerate(self.servers)
                for port in (0, 1)
            }
            for local, socket in sockets.items():
                nursery.start_soon(self._serve, local, socket, sockets)
            yield
            nursery.cancel_scope.cancel()

    async def _serve(self, local: Local, socket: DatagramSocket, sockets: dict[Local, DatagramSocket]) -> None:
        responders = {
            v6: StunServer(hosts, PORTS, _KEY)
            for v6 in (False, True)
            if (hosts := tuple(host for one in self.servers for host in one.hosts() if is_v6(host) is v6))
        }
        while True:
            data, source = await socket.receive()
            reply = responders[is_v6(source.host)].respond(data, source, local, trio.current_time())
            if reply is not None:
                await sockets[reply.local].send(reply.data, source)
