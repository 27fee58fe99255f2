"""How a session forms and ends: the host's and a member's state machines (pure).

Both take session messages already opened (so sender and content are authentic), and return messages to seal and events
to act on. They know nothing of plans, devices or links beyond when those are wanted and when they are done.

    host     GATHERING --all measured, full or told to start--> BUILDING --everybody ready--> SERVING
    member   KNOCKING --welcome--> MEASURING --measured--> WAITING --assign--> BUILDING --ready, serve--> SERVING
    guest    KNOCKING --welcome--> WAITING --assign--> BUILDING --its link, serve--> SERVING
    both     any state --somebody needed leaves, trouble, over, refusal--> OVER

A guest, or a member that the plan leaves out of the ring, is assigned the ring without a place in it: it links with the
head, whom the host tells of it. The host takes guests at any time, and nothing ends when one goes.

The host is a member too: what its own device and links do is reported with the same calls as a member's.
"""

from __future__ import annotations

from dataclasses import replace

from kafila.ring.agreement import (
    Assign,
    Fetched,
    Hello,
    Measured,
    MemberInfo,
    Over,
    Reachable,
    Ready,
    Refusal,
    Roster,
    Serve,
    SessionMessage,
    Trouble,
    Visit,
    VisitOver,
    Welcome,
)
from kafila.ring.session_machine import MAX_MEMBERS, Machine, State
from kafila.ring.steps import (
    BuildWanted,
    Ended,
    Fetching,
    GuestCame,
    GuestLeft,
    MeasureWanted,
    Present,
    Serving,
    Welcomed,
)
from kafila.types import Capability, NodeId

WELCOME_TIMEOUT_S = 10.0
"""A host that is there answers within a round trip or two; ten seconds also covers a busy laptop."""


class MemberSession(Machine):
    """A member's side, or a guest's, from the moment the rendezvous has let it in and the greeting has opened."""

    def __init__(self, me: MemberInfo, host: NodeId, now: float, *, guest: bool = False) -> None:
        super().__init__(State.KNOCKING, me)
        self._host = host
        self._host_name = "the host"
        self._early: dict[NodeId, Reachable] = {}
        """What members said of themselves before the host said that they are neighbours."""
        self._epoch = 0
        self._deadline: float | None = now + WELCOME_TIMEOUT_S
        self._guest = guest
        self._linked = self._may_serve = False
        """A guest's: whether its link is up, and whether the ring serves."""
        self._send(host, Hello(me, guest))

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` wants to be called."""
        return self._deadline

    def handle_timer(self, now: float) -> None:
        """A host that never answered ends the attempt."""
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            text = "the host does not answer: check that its kafila-node is still running, then join again"
            self._over(Ended(text))

    def receive(self, sender: NodeId, message: SessionMessage) -> None:
        """An opened message; of others than the host only where they are, and only what the state allows."""
        if self.state is State.OVER:
            return
        if isinstance(message, Reachable):
            self._located(sender, message)
        elif sender == self._host:
            self._told(message)

    def _located(self, sender: NodeId, reachable: Reachable) -> None:
        if self._ring:
            self._moved(sender, reachable)
        elif sender in self._early or len(self._early) < MAX_MEMBERS:
            self._early[sender] = reachable

    def _told(self, message: SessionMessage) -> None:
        """By the host."""
        match message, self.state:
            case Welcome(name, offer), State.KNOCKING:
                self._deadline = None
                self.state = State.WAITING if self._guest else State.MEASURING
                self._events.append((Welcomed if self._guest else MeasureWanted)(name, offer))
            case Refusal(reason, text), State.KNOCKING:
                self._deadline = None
                self._over(Ended(text, refusal=reason))
            case Roster(names, expected), _:
                self._host_name = names[0] if names else self._host_name
                self._events.append(Present(names, expected))
            case Assign() as assignment, State.WAITING:
                self._assigned(assignment)
            case Serve(epoch), State.BUILDING if epoch == self._epoch:
                self._may_serve = True
                self._serve_when_linked()
            case Visit(member), State.BUILDING | State.SERVING:
                self._guests[member.node_id] = member
                self._events.append(GuestCame(member))
            case VisitOver(node), _:
                self._guest_gone(node)
            case Over(_, names), _ if self._own_name in names:
                self._over(Ended(f"{self._host_name} went on without this machine: it heard nothing of it for a while"))
            case Over(text, names, wished), _:
                self._over(Ended(text, names, wished=wished))
            case _:
                pass  # out of order or not for us: sealed and authentic, but nothing to act on

    @property
    def _own_name(self) -> str | None:
        """What the others call this member, once it has a place in the ring."""
        return next((info.name for info in self._ring if info.node_id == self._me.node_id), None)

    def _serve_when_linked(self) -> None:
        """A member's links were up before the host let it serve; a guest's may not be."""
        if self._may_serve and (self._linked or not self._guest):
            self.state = State.SERVING
            self._events.append(Serving())

    def _guest_gone(self, guest: NodeId) -> None:
        if self._guests.pop(guest, None) is not None:
            self._events.append(GuestLeft(guest))

    def _assigned(self, assignment: Assign) -> None:
        self._epoch = assignment.epoch
        self.state = State.BUILDING
        early, self._early = self._early, {}
        ring = [info.moved(early[info.node_id]) if info.node_id in early else info for info in assignment.ring]
        self._ring = tuple(ring)
        self._events.append(BuildWanted(replace(assignment, ring=self._ring)))
        as_assigned = next((info for info in ring if info.node_id == self._me.node_id), None)
        self._guest = as_assigned is None
        if as_assigned is None or replace(self._me, name=as_assigned.name) != as_assigned:  # moved since the host knew
            for node in self._neighbours:
                self._send(node, _whereabouts(self._me))

    def _whom_it_concerns(self) -> list[NodeId]:
        return list(dict.fromkeys([self._host, *self._neighbours]))

    def measured(self, capability: Capability) -> None:
        """This device, measured."""
        if self.state is State.MEASURING:
            self.state = State.WAITING
            self._send(self._host, Measured(capability))

    def fetched(self, done_bytes: int, wanted_bytes: int) -> None:
        """How far this member is with its share."""
        if self.state is State.BUILDING:
            self._send(self._host, Fetched(done_bytes, wanted_bytes))
            self._events.append(Fetching(self._me.name, done_bytes, wanted_bytes))

    def ready(self) -> None:
        """The shard is loaded and the links are up."""
        if self.state is State.BUILDING and self._guest:
            self._linked = True
            self._serve_when_linked()
        elif self.state is State.BUILDING:
            self._send(self._host, Ready(self._epoch))

    def trouble(self, text: str) -> None:
        """This member cannot go on: tell the host, which ends the session for all."""
        if self.state is not State.OVER:
            self._send(self._host, Trouble(text))
            self._over(Ended(text))

    def end(self, text: str) -> None:
        """A neighbour told why the session is over, and this member cannot go on without it."""
        self._over(Ended(text))

    def gone(self, node: NodeId) -> None:
        """Somebody is gone for good. Without the host there is no session; without a ring member none either."""
        self._guest_gone(node)
        if node == self._host:
            self._over(Ended(f"{self._host_name} left, and the session with it", (self._host_name,)))
        name = next((info.name for info in self._ring if info.node_id == node), None)
        if name is not None and self.state in {State.BUILDING, State.SERVING}:
            self._over(Ended(f"{name} left the session", (name,)))


def _whereabouts(info: MemberInfo) -> Reachable:
    return Reachable(info.addresses, info.kinds, info.nat_report, info.rendezvous_rtt_s)
