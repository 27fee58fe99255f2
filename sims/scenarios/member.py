"""One member's deployed network stack on a virtual machine, and what was seen of it from outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import trio

from kafila.endpoint import Endpoint
from kafila.mesh import LinkDown, LinkMessage, LinkUp, Mesh, PathNews
from kafila.nat.candidates import Candidate, CandidateKind
from kafila.nat.events import PathChanged
from kafila.reachability import Hearing, Reachability, Routers, nearest_server
from kafila.ring.control import Signal
from kafila.ring.identity import Identity
from kafila.ring.rendezvous_client import Joined, Lost, Moved
from kafila.types import Address, NodeId, PathKind, Transmit
from kafila.wire import Kind, classify
from sims.net import Machine, VirtualSocket


class Tap:
    """The mesh as its endpoint drives it, with a note of every datagram that passes straight between members."""

    def __init__(self, mesh: Mesh) -> None:
        self.sent: dict[bytes, Address] = {}
        """Datagram to destination; both path messages and QUIC packets are sealed, so no two are alike."""
        self.received: list[tuple[bytes, Address]] = []
        self.is_noting = False
        self._mesh = mesh

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """One datagram came."""
        if self.is_noting and source != self._mesh.control.server and classify(data) in (Kind.PATH, Kind.QUIC):
            self.received.append((data, source))
        self._mesh.receive(data, source, now)

    def handle_timer(self, now: float) -> None:
        """The mesh's."""
        self._mesh.handle_timer(now)

    def next_timer(self) -> float | None:
        """The mesh's."""
        return self._mesh.next_timer()

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        """The mesh's."""
        transmits = self._mesh.datagrams_to_send(now)
        if self.is_noting:
            server = self._mesh.control.server
            self.sent.update((transmit.data, transmit.to) for transmit in transmits if transmit.to != server)
        return transmits


class Member:
    """Made by :meth:`sims.scenarios.world.World.member`. As a node does, it surveys its network, and tells its peers
    through the rendezvous when it has moved."""

    endpoint: Endpoint

    def __init__(
        self,
        machine: Machine,
        socket: VirtualSocket,
        identity: Identity,
        mesh: Mesh,
        servers: Sequence[Address],
        routers: Routers,
    ) -> None:
        self.machine = machine
        self.socket = socket
        self.identity = identity
        self.mesh = mesh
        self.servers = servers
        """The rendezvous, in each of its families."""
        self.tap = Tap(mesh)
        hearing = Hearing(self._reached_otherwise, self._network_changed, lambda _line: None)
        self.reach = Reachability(machine, socket.address.port, routers, hearing, port_mapping=True)
        self.joined = trio.Event()
        self.observed: Address | None = None
        """As the rendezvous sees it."""
        self.peers: list[NodeId] = []
        """Those it has a link with, who are told of its moves."""
        self.rejoined_at: list[float] = []
        self.lost_at: list[float] = []
        self.ups: dict[NodeId, float] = {}
        self.downs: list[tuple[float, LinkDown]] = []
        self.messages: list[tuple[float, LinkMessage]] = []
        self.on_message: Callable[[float, LinkMessage], None] | None = None
        """Takes messages instead of :attr:`messages`."""
        self.news: list[tuple[float, PathNews]] = []
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def node_id(self) -> NodeId:
        """Who it is."""
        return self.identity.node_id

    def progress(self) -> None:
        """The endpoint's owner: note what the mesh tells."""
        now = trio.current_time()
        while (event := self.mesh.next_event()) is not None:
            match event:
                case LinkMessage() if self.on_message is not None:
                    self.on_message(now, event)
                case LinkMessage():
                    self.messages.append((now, event))
                case LinkUp(peer):
                    self.ups[peer] = now
                case LinkDown():
                    self.downs.append((now, event))
                case PathNews():
                    self.news.append((now, event))
                case Signal(sender, sealed):
                    self.mesh.peer_moved(sender, _candidates_from(sealed), now)
                case Joined(observed=observed, resumed=resumed):
                    self.observed = observed
                    self.reach.observed(observed)
                    self.joined.set()
                    if resumed:
                        self.rejoined_at.append(now)
                case Moved(observed):
                    self.observed = observed
                    self.reach.observed(observed)
                case Lost():
                    self.lost_at.append(now)
            self._changed.unpark_all()

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until something that this member is told makes ``holds`` true."""
        while not holds():
            await self._changed.park()

    async def survey(self) -> None:
        """Find out how this machine is reached, for as long as the scenario lasts."""

        async def servers() -> Sequence[Address]:
            await trio.lowlevel.checkpoint()
            return self.servers

        await self.reach.run(servers)

    def _reached_otherwise(self) -> None:
        """Sealing is left out: who may read this is not what a scenario of paths is about."""
        told = json.dumps([[*candidate.address, candidate.kind.value] for candidate in self.reach.candidates]).encode()
        for peer in self.peers:
            self.mesh.control.signal(peer, told)
        self.endpoint.poke()

    def _network_changed(self) -> None:
        control = self.mesh.control
        control.server = nearest_server(self.servers, control.server, self.machine.interface_addresses())
        self.mesh.network_changed(trio.current_time())
        self.endpoint.poke()

    def kind_to(self, peer: Member) -> PathKind | None:
        """How bulk data travels to ``peer`` now; None without a link."""
        state = self.mesh.link_state(peer.node_id)
        return None if state is None else state.kind

    def changes_to(self, peer: Member) -> list[tuple[float, PathChanged]]:
        """Every change of the path to ``peer``, with its time."""
        return [
            (time_s, event.news)
            for time_s, event in self.news
            if event.peer == peer.node_id and isinstance(event.news, PathChanged)
        ]


def _candidates_from(told: bytes) -> list[Candidate]:
    return [Candidate(Address(host, port), CandidateKind(kind)) for host, port, kind in json.loads(told)]
