"""The composition root: one member of one session, all its parts wired, one nursery tree.

    socket -- Endpoint -- Mesh (rendezvous, links) --events--> Node --> Formation --> session machine, serving ring
    worker thread --results--> serving ring --sends--> Mesh --> socket

Everything that happens ends in :meth:`Node._progress`, which moves what one part has said to the part it is for, until
nobody has more to say. The endpoint calls it around every flush; it never waits. What takes long (reading a checkpoint,
measuring, loading) is the backend's, and tasks of the node's nursery wait for it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio

from kafila.api.engine import ModelFacts, RingFacts
from kafila.backend import Backend
from kafila.console import Console
from kafila.endpoint import Endpoint
from kafila.entrance import Door, open_door, refusal
from kafila.errors import KafilaError, RendezvousUnreachable, SealBroken, SessionError, WrongSecret
from kafila.extra_sockets import ExtraSockets
from kafila.formation import Formation, Surroundings
from kafila.mailbox import Mailbox
from kafila.members import member_info, reachable
from kafila.mesh import GONE_WITHOUT_RENDEZVOUS_S, LinkDown, LinkMessage, LinkUp, PathNews
from kafila.mesh import Event as MeshEvent
from kafila.nat.birthday import BirthdayRole
from kafila.nat.events import PathChanged, PunchFailed, show_address
from kafila.net import Network
from kafila.reachability import NO_ROUTERS, Hearing, Reachability, Routers, nearest_server
from kafila.ring.agreement import Reachable
from kafila.ring.control import Departure, MemberJoined, MemberLeft, Refused, Signal
from kafila.ring.rendezvous_client import Event as ControlEvent
from kafila.ring.rendezvous_client import Joined, Lost, Moved, Unreachable
from kafila.ringfacts import model_facts, ring_facts
from kafila.ringview import people, ring_table
from kafila.settings import HostSettings, JoinSettings, NodeSettings
from kafila.sharing import Sharing
from kafila.trace import Recorder
from kafila.types import Address, NodeId, Question

LEFT = "left"
"""What a link is closed with by a member that goes of its own will; any other reason is why the session is over."""
GOODBYE_S = 0.1
"""How long a leaving node still sends: its last words need one flush and perhaps a retransmission on a LAN. A peer that
misses them notices the silence."""


class Person(Protocol):
    """Whoever sits in front of a node."""

    async def gather(self, node: Node) -> None:
        """The session is open: a host may call ``node.start`` before everybody is here. Cancelled once it serves."""
        ...

    async def chat(self, node: Node) -> None:
        """Prompts may be asked; the node leaves when this returns."""
        ...


async def run_node(
    settings: NodeSettings,
    network: Network,
    backend: Backend,
    console: Console,
    recorder: Recorder,
    person: Person,
    *,
    routers: Routers = NO_ROUTERS,
    sharing: Sharing | None = None,
) -> None:
    """One member's whole life: enter the session, form it, serve, and leave when the person has had enough.

    ``routers``: how to ask this machine's gateways for a port, if at all. ``sharing``: through what
    the backend gives neighbours parts of its checkpoint; None: it gives none. Raises a KafilaError that says why, when
    it ends otherwise than by somebody's wish.
    """
    async with open_door(settings, network, backend) as door, trio.open_nursery() as nursery:
        node = Node(settings, network, backend, console, recorder, door, nursery, routers, sharing or Sharing())
        nursery.start_soon(node.endpoint.run)
        nursery.start_soon(node.survey)
        if settings.api is not None:
            from kafila.api.service import serve_api  # noqa: PLC0415  - HTTP libraries take a while to import

            nursery.start_soon(serve_api, settings.api, node, console)
        try:
            await node.live(person)
        finally:
            with trio.CancelScope(shield=True):
                await node.say_goodbye()
            nursery.cancel_scope.cancel()
    if node.failure is not None:
        raise node.failure


class Node:
    """One member, from the moment it speaks to its rendezvous."""

    def __init__(
        self,
        settings: NodeSettings,
        network: Network,
        backend: Backend,
        console: Console,
        recorder: Recorder,
        door: Door,
        nursery: trio.Nursery,
        routers: Routers,
        sharing: Sharing,
    ) -> None:
        self.failure: KafilaError | None = None
        """Why the session ended, unless somebody wished it."""
        self.code = door.code
        self.endpoint = Endpoint(door.socket, door.mesh, self._progress)
        self._settings = settings
        self._network = network
        self._door = door
        hearing = Hearing(self._reached_otherwise, self._network_changed, console.status)
        self.reach = Reachability(
            network, door.socket.address.port, routers, hearing, port_mapping=settings.port_mapping
        )
        self._around = Surroundings(
            settings,
            backend,
            console,
            recorder,
            nursery,
            door.mesh,
            door.room,
            self.reach.surveyed,
            sharing,
            self.endpoint.poke,
            self._finish,
        )
        self._extra_sockets = ExtraSockets(network, door.mesh, self.endpoint.poke)
        self._formation: Formation | None = None
        self._admitted = trio.Event()
        self._over = trio.Event()
        self._back = trio.Event()
        """Set once the rendezvous is back after it was lost."""
        self._tampered = 0

    # -- the life of a node -------------------------------------------------------------------------------------------

    async def live(self, person: Person) -> None:
        """Until the session is over, for whatever reason; ``failure`` says which."""
        server = self._door.mesh.control.server
        self._around.console.status(f"joining through the rendezvous {server.host}:{server.port}")
        self._door.knock(self._settings, trio.current_time())
        self.endpoint.poke()
        self._around.nursery.start_soon(self._attend, person)
        await self._over.wait()

    async def _attend(self, person: Person) -> None:
        await self._admitted.wait()
        formation = self._formation
        if formation is None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(person.gather, self)
            await formation.serving.wait()
            nursery.cancel_scope.cancel()
        await person.chat(self)
        formation.leave()
        self._finish(None)

    async def survey(self) -> None:
        """Find out how this machine is reached, for as long as the session lasts."""
        await self.reach.run(self._stun_servers)

    async def _stun_servers(self) -> list[Address]:
        return await self._door.stun_servers(self._settings.stun)

    def start(self) -> None:
        """Host: do not wait for more members."""
        if self._formation is not None:
            self._formation.start()
            self.endpoint.poke()

    async def say_goodbye(self) -> None:
        """Tell those who listen and let the datagrams leave; bounded by the clock alone."""
        if self._formation is not None and self._formation.build is not None:
            self._formation.build.serving.end_answers(
                "the session is over" if self.failure is None else str(self.failure)
            )
        self.endpoint.poke()  # what the session machine has left to say
        await trio.sleep(GOODBYE_S / 2)
        self._door.mesh.close(trio.current_time(), LEFT if self.failure is None else str(self.failure))
        self.endpoint.poke()
        await trio.sleep(GOODBYE_S / 2)

    def _finish(self, error: KafilaError | None) -> None:
        if not self._over.is_set():
            self.failure = error
        self._over.set()

    # -- everything that happens --------------------------------------------------------------------------------------

    def _progress(self) -> None:
        """Move everything that was said to whom it is for, until nobody has more to say."""
        moved = True
        while moved:
            moved = False
            while (event := self._door.mesh.next_event()) is not None:
                moved = True
                self._heard(event)
            if self._formation is not None:
                moved |= self._formation.move()
        self._extra_sockets.flush()

    def _heard(self, event: MeshEvent) -> None:
        formation = self._formation
        build = None if formation is None else formation.build
        match event:
            case LinkMessage(peer, bulk, data):
                if build is not None:
                    build.receive(peer, data, bulk=bulk)
            case LinkUp(peer):
                if build is not None:
                    build.link_up(peer)
                    self._around.recorder.record("link", trio.current_time(), {"member": build.name_of(peer)})
            case LinkDown():
                if formation is not None:
                    _link_down(formation, event)
            case PathNews():
                self._path_news(event)
            case _:
                self._rendezvous_said(event)

    def _rendezvous_said(self, event: ControlEvent) -> None:
        match event:
            case Signal(sender, sealed):
                message = self._door.room.open(sender, sealed)
                if message is not None and self._formation is not None:
                    self._formation.receive(sender, message)
                self._tell_tampering()
            case MemberLeft(member, how):
                # A member whose signalling broke while its link carries on is still there.
                lost_only_here = how is Departure.LOST and self._door.mesh.is_linked(member)
                if self._formation is not None and not lost_only_here:
                    self._formation.gone(member)
            case Joined():
                self._joined(event)
            case Lost(reason):
                self._lost(reason)
            case Refused(reason):
                self._finish(refusal(reason, hosting=isinstance(self._settings.role, HostSettings)))
            case Unreachable(reason):
                self._finish(RendezvousUnreachable(self._nobody_answers(reason)))
            case Moved(observed):
                self.reach.observed(observed)
            case MemberJoined():
                self._around.nursery.start_soon(self.reach.recount, self._stun_servers)

    def _nobody_answers(self, reason: str) -> str:
        server, report = self._door.mesh.control.server, self.reach.sight.report
        text = f"{self._settings.name}: no rendezvous answers at {server.host}:{server.port} ({reason})"
        if report is not None and not report.udp_blocked:
            return f"{text}: is it running? UDP works here, other servers answer"
        return f"{text}: is it running, and does this network let UDP through?"

    # -- this machine's network ---------------------------------------------------------------------------------------

    def _whereabouts(self) -> Reachable:
        return reachable(self.reach.candidates, self.reach.sight.report, self._door.mesh.control.minimum_rtt_s)

    def _reached_otherwise(self) -> None:
        where = self._whereabouts()
        told = {"candidates": [f"{c.kind.value} {show_address(c.address)}" for c in self.reach.candidates]}
        self._around.recorder.record("reachable", trio.current_time(), {**told, "nat": where.nat_report})
        if self._formation is not None:
            self._formation.reachable(where)
            self.endpoint.poke()

    def _network_changed(self) -> None:
        mesh, now = self._door.mesh, trio.current_time()
        mesh.control.server = nearest_server(
            self._door.servers, mesh.control.server, self._network.interface_addresses()
        )
        mesh.network_changed(now)
        self._around.recorder.record("network", now, {"rendezvous": show_address(mesh.control.server)})
        self.endpoint.poke()

    # -- the rendezvous -----------------------------------------------------------------------------------------------

    def _joined(self, joined: Joined) -> None:
        self.reach.observed(joined.observed)
        if self._formation is not None:
            self._around.console.status("the rendezvous is back")
            self._back.set()
            return
        hosting = isinstance(self._settings.role, HostSettings)
        if not hosting:
            try:
                self._door.room.open_greeting(joined.host, joined.greeting)
            except SealBroken:
                text = "that code's secret does not open the session: compare the code with the host's, all of it"
                self._finish(WrongSecret(text))
                return
        me = member_info(self._door.identity, self._settings.name, self._settings.machine, self._whereabouts())
        self._formation = Formation(self._around, me, joined.host, self._door.offer)
        self._admitted.set()
        if hosting:
            self._around.console.invite(str(self.code))

    def _lost(self, reason: str) -> None:
        linked = self._formation is not None and self._formation.build is not None
        go_on = "direct links go on, and it is tried again" if linked else "it is tried again"
        self._around.console.status(f"the rendezvous is lost ({reason}); {go_on}")
        if not linked and isinstance(self._settings.role, JoinSettings):
            self._back = trio.Event()
            self._around.nursery.start_soon(self._miss, self._back)

    async def _miss(self, back: trio.Event) -> None:
        """Without links, nobody else can tell that the host is gone: most often it was the rendezvous, too."""
        with trio.move_on_after(GONE_WITHOUT_RENDEZVOUS_S) as scope:
            await back.wait()
        if scope.cancelled_caught and (self._formation is None or self._formation.build is None):
            text = (
                f"no ring is formed, and the rendezvous has not answered for {GONE_WITHOUT_RENDEZVOUS_S:.0f} s: "
                "ask the host whether its kafila-node still runs, then join again"
            )
            self._finish(SessionError(text))

    def _tell_tampering(self) -> None:
        tampered = self._door.room.tampered
        if tampered > self._tampered:
            if not self._tampered:
                text = "a message was altered or replayed on its way and was ignored: distrust the rendezvous"
                self._around.console.error(text)
            self._tampered = tampered
            self._around.recorder.record("tampered", trio.current_time(), {"messages": tampered})

    def _path_news(self, path: PathNews) -> None:
        build = None if self._formation is None else self._formation.build
        name = path.peer.hex() if build is None else build.name_of(path.peer)
        kind = {"kind": path.news.kind.value} if isinstance(path.news, PathChanged) else {}
        self._around.recorder.record("path", trio.current_time(), {"member": name, "news": str(path.news), **kind})
        if isinstance(path.news, PathChanged) and path.news.kind is not path.news.previous_kind:
            self._around.console.status(f"link to {name}: {path.news}")
        if isinstance(path.news, PunchFailed) and self._formation is not None:
            self._try_birthday(path.peer, self._formation.part_in_birthday(path.peer))

    def _try_birthday(self, peer: NodeId, role: BirthdayRole | None) -> None:
        if role is BirthdayRole.OPEN_SOCKETS:
            self._around.nursery.start_soon(self._extra_sockets.lend, peer)
        elif role is not None:
            self._door.mesh.begin_birthday(peer, role, trio.current_time())

    # -- what the prompt asks -----------------------------------------------------------------------------------------

    def answer(self, question: Question) -> AbstractAsyncContextManager[Mailbox]:
        """Ask the ring; the answer's parts as they come. Leaving the context early cancels the answer.

        Raises SessionError before the session serves; entering raises UsageError for a question that cannot be meant.
        """
        if self._formation is None or self._formation.build is None:
            raise SessionError("the session does not serve yet: ask again when it does")
        return self._formation.build.serving.answer(question)

    def model(self) -> ModelFacts | None:
        """What is served; None until prompts may be asked, and once the session is over."""
        formation = self._formation
        if formation is None or formation.build is None or not formation.serving.is_set() or self._over.is_set():
            return None
        return model_facts(formation.build.offer)

    def ring(self) -> RingFacts | None:
        """The ring as this member knows it now; None until it is formed."""
        build = None if self._formation is None else self._formation.build
        return None if build is None else ring_facts(build, self._door.mesh.link_state)

    def describe_people(self) -> str:
        """Who is here, for a person: the ring's members, and the guests that this one knows of."""
        build = None if self._formation is None else self._formation.build
        if build is None:
            return "the ring is not formed yet"
        names = {info.node_id: info.name for info in build.assignment.ring}
        guests = {node: info.name for node, info in build.guests.items()}
        return people(names, {build.me.node_id: build.me.name, **guests}, build.me.node_id)

    def describe_ring(self) -> str:
        """The ring as a table for a person."""
        build = None if self._formation is None else self._formation.build
        if build is None:
            return "the ring is not formed yet"
        link_state = self._door.mesh.link_state
        guests = None if build.place is not None else link_state(build.assignment.ring[0].node_id)
        return ring_table(ring_facts(build, link_state), guests)


def _link_down(formation: Formation, down: LinkDown) -> None:
    # A guest ends nobody's session but its own, whatever it says.
    if down.by_peer and down.reason != LEFT and not formation.is_guest(down.peer):
        formation.told_over(down.reason)
    else:
        formation.gone(down.peer)
