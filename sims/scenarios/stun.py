"""STUN servers with two hosts and two ports each: all that the classifier needs for a complete report (RFC 5780)."""

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


class StunServers:
    """One or two public machines that answer as one RFC 5780 server, in every family asked for."""

    def __init__(self, net: VirtualNetwork, *, hosts: int = 2, v6: bool = False) -> None:
        self.machines: list[Machine] = [net.machine(f"stun-{n}", v6=v6) for n in range(hosts)]

    @property
    def addresses(self) -> list[Address]:
        """What a member is told to ask: the first host, in each of its families."""
        return [Address(host, PORTS[0]) for host in self.machines[0].hosts()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests within the block."""
        async with trio.open_nursery() as nursery:
            sockets: dict[Local, DatagramSocket] = {
                Local(host, port): await machine.bind(PORTS[port])
                for host, machine in enumerate(self.machines)
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
            if (hosts := tuple(host for one in self.machines for host in one.hosts() if is_v6(host) is v6))
        }
        while True:
            data, source = await socket.receive()
            reply = responders[is_v6(source.host)].respond(data, source, local, trio.current_time())
            if reply is not None:
                await sockets[reply.local].send(reply.data, source)
