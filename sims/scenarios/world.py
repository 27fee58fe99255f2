"""The stage of every scenario: a rendezvous that can be stopped, and members that are the deployed network stack.

    async with World(net).running() as world:
        a = await world.member(net.nat("home").machine("a"))
        b = await world.member(net.machine("b"))
        link = world.link(a, b)
        await link.up()

A :class:`Member` is `kafila.mesh.Mesh` driven by `kafila.endpoint.Endpoint` on a virtual machine, registered at
`kafila.rendezvous_service`; it offers the candidates that a node offers. Nothing stands in for anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import trio

from kafila.endpoint import Endpoint
from kafila.mesh import Mesh
from kafila.reachability import NO_ROUTERS, Routers, nearest_server
from kafila.rendezvous_service import Alternate, Running, rendezvous
from kafila.ring.identity import Identity, make_identity
from kafila.ring.rendezvous_client import RendezvousClient
from kafila.types import Address
from sims.gateway import Gateway
from sims.net import Machine
from sims.scenarios.link import Link
from sims.scenarios.member import Member
from sims.topology import VirtualNetwork

RENDEZVOUS_RTT_S = 0.060
"""From every site; two members' sites are 40 ms apart unless a scenario says otherwise."""
WOBBLE_S = 0.002
"""By how much at most a packet to or from the rendezvous is later than the fastest."""
PORT = 7443
PATIENCE_S = 10.0
"""Registering takes a few round trips; with losses, some more."""
LOCATOR_LETTERS = "ABCDEFGHJKMNPQRSTVWXYZ"


class World:
    """A rendezvous on a machine of its own, and sessions of two at it."""

    def __init__(self, net: VirtualNetwork, *, v6: bool = False) -> None:
        self.net = net
        self.server = net.machine("rendezvous", v6=v6)
        self._second = net.machine("rendezvous' second address")
        self.random: Random = net.fabric.random("world")
        self.service: Running | None = None
        self.members: list[Member] = []
        self._nursery: trio.Nursery | None = None
        self._serving: trio.CancelScope | None = None
        self._stopped = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """Packets are delivered and the rendezvous answers within the block."""
        async with self.net.running(), trio.open_nursery() as nursery:
            self._nursery = nursery
            await self.start_rendezvous()
            yield self
            nursery.cancel_scope.cancel()

    @property
    def nursery(self) -> trio.Nursery:
        """For whatever runs beside the scenario's body."""
        if self._nursery is None:
            raise RuntimeError("the world is not running")
        return self._nursery

    async def start_rendezvous(self) -> None:
        """A fresh process with no memory of any before it."""
        await self.nursery.start(self._serve)

    async def stop_rendezvous(self) -> None:
        """End its process without a word, as a crash or a power cut does."""
        if self._serving is not None:
            self.server.unplug()
            self._serving.cancel()
            await self._stopped.wait()
            self.server.plug()

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        self._stopped = trio.Event()
        with trio.CancelScope() as self._serving:
            async with rendezvous(self.server, PORT, self._alternate) as self.service:
                task_status.started()
                await trio.sleep_forever()
        self._stopped.set()

    @property
    def _alternate(self) -> Alternate:
        """With a second address for STUN the members' surveys are complete (RFC 5780)."""
        return Alternate(self._second, self.server.hosts()[0], self._second.hosts()[0])

    def near(self, site: Machine | Gateway, rtt_s: float = RENDEZVOUS_RTT_S) -> None:
        """How far the rendezvous is from a site."""
        self.net.rtt(self.server, site, rtt_s)
        for way in (self.net.path(self.server, site), self.net.path(site, self.server)):
            way.set(jitter_s=WOBBLE_S)

    async def member(
        self, machine: Machine, *, identity: Identity | None = None, port: int = 0, routers: Routers = NO_ROUTERS
    ) -> Member:
        """The deployed stack on ``machine``, not yet registered anywhere."""
        self.near(machine)
        socket = await machine.bind(port)
        identity = identity or make_identity()
        random = self.net.fabric.random(f"member/{machine.name}")
        servers = [Address(host, PORT) for host in self.server.hosts()]
        nearest = nearest_server(servers, servers[0], machine.interface_addresses())
        mesh = Mesh(identity, self.link_key, RendezvousClient(identity, nearest, random), random)
        member = Member(machine, socket, identity, mesh, servers, routers)
        member.endpoint = Endpoint(socket, member.tap, member.progress)
        self.nursery.start_soon(machine.run, member.endpoint.run)
        self.nursery.start_soon(machine.run, member.survey)
        self.members.append(member)
        return member

    @property
    def link_key(self) -> bytes:
        """The same for all: what a session's code would give its members."""
        return bytes(32)

    def identities(self) -> tuple[Identity, Identity]:
        """Two, of which the scenario's seed decides who is the lower one and so the QUIC client."""
        low, high = sorted((make_identity(), make_identity()), key=lambda identity: identity.node_id)
        return (low, high) if self.random.random() < 0.5 else (high, low)

    async def pair(self, one: Machine, other: Machine, *, port: int = 0, routers: Routers = NO_ROUTERS) -> Link:
        """Two members of one session, both registered and surveyed, whose link is to be opened. ``port`` and
        ``routers`` are the first one's."""
        first, second = self.identities()
        a = await self.member(one, identity=first, port=port, routers=routers)
        b = await self.member(other, identity=second)
        await self.register(a, b)
        return Link(a, b)

    async def register(self, host: Member, *others: Member) -> None:
        """One session: ``host`` opens it, the others join. Raises ``trio.TooSlowError``."""
        locator = "".join(self.random.choices(LOCATOR_LETTERS, k=5))
        with trio.fail_after(PATIENCE_S):
            host.mesh.control.create(locator, 1 + len(others), b"", trio.current_time())
            host.endpoint.poke()
            await host.joined.wait()
            for other in others:
                other.mesh.control.join(locator, trio.current_time())
                other.endpoint.poke()
            for member in (host, *others):
                await member.joined.wait()
                await member.reach.surveyed.wait()
