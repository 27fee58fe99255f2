"""A member's part of a new plan: its links, its shard, and when both are there (Trio)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from kafila.backend import Duty
from kafila.errors import SessionError
from kafila.members import link_candidates
from kafila.mesh import Mesh
from kafila.plan import Plan
from kafila.ring.agreement import EDGES, LAST_ROWS, PARTS, SCORES, Assign, MemberInfo, ModelOffer
from kafila.ring.parts import is_parts
from kafila.scoring import vocabulary_of
from kafila.serve import Place
from kafila.serving import ServingRing
from kafila.shard.worker import Coming
from kafila.sharing import Sharing
from kafila.trace import Recorder
from kafila.types import NodeId

LINK_TIMEOUT_S = 30.0
"""A link that the relay alone carries is up within a few round trips; half a minute forgives a member that is still
starting, and ends in words that name it."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(slots=True)
class Build:
    """One assignment at one member."""

    me: MemberInfo
    offer: ModelOffer
    assignment: Assign
    plan: Plan
    serving: ServingRing
    sharing: Sharing
    duty: Duty | None
    """None: a guest's."""
    guests: dict[NodeId, MemberInfo] = field(default_factory=dict)
    """At the head, those it is linked with."""
    linked: dict[NodeId, trio.Event] = field(default_factory=dict)

    @property
    def place(self) -> int | None:
        """This member's place in the ring, the head's being 0; None: it is a guest."""
        ring = [info.node_id for info in self.assignment.ring]
        return ring.index(self.me.node_id) if self.me.node_id in ring else None

    def name_of(self, node: NodeId) -> str:
        """What people call a member."""
        known = (*self.assignment.ring, *self.guests.values())
        return next((info.name for info in known if info.node_id == node), node.hex())

    @property
    def neighbours(self) -> list[MemberInfo]:
        """The members before and after this one, each once, this one left out; a guest's is the head."""
        ring = self.assignment.ring
        if self.place is None:
            return [ring[0]]
        beside = {info.node_id: info for info in (ring[self.place - 1], ring[(self.place + 1) % len(ring)])}
        beside.pop(self.me.node_id, None)
        return list(beside.values())

    def open_links(self, mesh: Mesh, now: float, poke: Callable[[], None]) -> None:
        """Begin linking with the neighbours."""
        can_be_asked = {peer.node_id: peer.name for peer in self.neighbours if PARTS in peer.knows}
        self.sharing.begin(mesh, {} if self.place is None else can_be_asked, poke)
        for peer in self.neighbours:
            self.linked[peer.node_id] = trio.Event()
            self._open_link(peer, mesh, now)

    def _open_link(self, peer: MemberInfo, mesh: Mesh, now: float) -> None:
        mesh.open_link(
            peer.node_id,
            peer.fingerprint,
            link_candidates(peer, self.me),
            now,
            same_machine=peer.machine == self.me.machine,
            early_key=peer.early_key,
            epoch=self.assignment.epoch,
        )

    def guest_came(self, guest: MemberInfo, mesh: Mesh, now: float) -> None:
        """Begin linking with a guest."""
        self.guests[guest.node_id] = guest
        self._open_link(guest, mesh, now)
        self.serving.guest_came(guest.node_id, takes_edges=EDGES in guest.knows)

    def guest_left(self, guest: NodeId, mesh: Mesh, now: float) -> None:
        """Drop the link, and what the guest asked."""
        if self.guests.pop(guest, None) is not None:
            mesh.close_link(guest, now, "left")
            self.serving.guest_left(guest)

    def link_up(self, peer: NodeId) -> None:
        """A link was authenticated."""
        self.sharing.link_up(peer)
        if (event := self.linked.get(peer)) is not None:
            event.set()

    def receive(self, peer: NodeId, data: bytes, *, bulk: bool) -> None:
        """A message of somebody linked with this member."""
        if bulk and is_parts(data):
            self.sharing.receive(peer, data)
            return
        if bulk:
            self.sharing.batch_passed()
        self.serving.receive(peer, data, bulk=bulk)

    def drain(self) -> None:
        """The node calls this around every flush."""
        self.serving.drain()
        self.sharing.drain()

    async def wait(self) -> None:
        """Until the shard is loaded and every link is up. Raises SessionError that names whom there is no link to."""
        for peer in self.neighbours:
            with trio.move_on_after(LINK_TIMEOUT_S) as scope:
                await self.linked[peer.node_id].wait()
            if scope.cancelled_caught:
                raise SessionError(
                    f"no link to {peer.name} came up in {LINK_TIMEOUT_S:.0f} s: is its kafila-node still running?"
                )
        await self.serving.loaded.wait()


def make_build(
    me: MemberInfo,
    offer: ModelOffer,
    assignment: Assign,
    mesh: Mesh,
    recorder: Recorder,
    sharing: Sharing,
    *,
    poke: Callable[[], None],
    on_broken: Callable[[str], None],
    on_coming: Callable[[Coming], None],
) -> Build:
    """Everything a member needs to take its place, or a guest; nothing is started. Raises ProtocolError for a plan that
    is none."""
    plan = Plan.from_json(assignment.plan)
    place = Place(
        me=me.node_id,
        ring=tuple(info.node_id for info in assignment.ring),
        epoch=assignment.epoch,
        hidden=offer.manifest.hidden_bytes // ITEM_BYTES[offer.dtype],
        dtype=offer.dtype,
        slots=offer.slots,
        context=offer.context,
        telling_edges=frozenset(info.node_id for info in assignment.ring if EDGES in info.knows),
        scored_percent=plan.scored_percent if all(SCORES in info.knows for info in assignment.ring) else 0,
        vocab=vocabulary_of(offer.config),
        last_rows=all(LAST_ROWS in info.knows for info in assignment.ring),
    )
    duty = None
    if not place.visiting:
        stage, is_head = plan.stages[place.position], place.position == 0
        percent = place.scored_percent if is_head or place.last else 0
        spare_bytes = max(0, stage.memory_room_bytes - stage.memory_used_bytes)
        duty = Duty(stage.blocks, is_head, offer.slots, offer.context, offer.dtype, percent, spare_bytes)
    serving = ServingRing(place, mesh, recorder, poke=poke, on_broken=on_broken, on_coming=on_coming)
    return Build(me, offer, assignment, plan, serving, sharing, duty)
