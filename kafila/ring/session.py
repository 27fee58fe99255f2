"""How a session forms and ends: the host's and a member's state machines (pure).

Both take session messages already opened (so sender and content are authentic), and return messages to seal and events
to act on. They know nothing of plans, devices or links beyond when those are wanted and when they are done.

    host     GATHERING --all measured, full or told to start--> BUILDING --everybody ready--> SERVING
    member   KNOCKING --welcome--> MEASURING --measured--> WAITING --assign--> BUILDING --ready, serve--> SERVING
    both     any state --somebody needed leaves, trouble, over, refusal--> OVER

The host is a member too: what its own device and links do is reported with the same calls as a member's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from kafila.ring.agreement import (
    PROTOCOL_VERSION,
    Assign,
    Fetched,
    Hello,
    Measured,
    MemberInfo,
    ModelOffer,
    Over,
    Reachable,
    Ready,
    Refusal,
    RefusalReason,
    Roster,
    Serve,
    SessionMessage,
    Trouble,
    Welcome,
)
from kafila.ring.steps import (
    BuildWanted,
    Dropped,
    Ended,
    Event,
    Fetching,
    MeasureWanted,
    Moved,
    Outgoing,
    PlanWanted,
    Present,
    Serving,
)
from kafila.types import Capability, NodeId

MAX_MEMBERS = 64
"""More than a trusted group has machines; a bound on what strangers with the locator could make the host remember."""
WELCOME_TIMEOUT_S = 10.0
"""A host that is there answers within a round trip or two; ten seconds also covers a busy laptop."""


class State(Enum):
    """Where a session stands, for either role."""

    KNOCKING = auto()
    GATHERING = auto()
    MEASURING = auto()
    WAITING = auto()
    BUILDING = auto()
    SERVING = auto()
    OVER = auto()


class _Machine:
    """What both roles share: the two queues, the ring once there is one, and the end."""

    def __init__(self, state: State, me: MemberInfo) -> None:
        self.state = state
        self._me = me
        self._ring: tuple[MemberInfo, ...] = ()
        self._outgoing: deque[Outgoing] = deque()
        self._events: deque[Event] = deque()

    def next_message(self) -> Outgoing | None:
        """A message to seal and send, or None."""
        return self._outgoing.popleft() if self._outgoing else None

    def next_event(self) -> Event | None:
        """Something to act on, or None."""
        return self._events.popleft() if self._events else None

    def _send(self, to: NodeId, message: SessionMessage) -> None:
        self._outgoing.append(Outgoing(to, message))

    def _over(self, ended: Ended) -> None:
        if self.state is not State.OVER:
            self.state = State.OVER
            self._events.append(ended)

    @property
    def _neighbours(self) -> dict[NodeId, MemberInfo]:
        """The members before and after this one in the ring, in their own words of where they are."""
        ids = [info.node_id for info in self._ring]
        if self._me.node_id not in ids:
            return {}
        place = ids.index(self._me.node_id)
        beside = (self._ring[place - 1], self._ring[(place + 1) % len(ids)])
        return {info.node_id: info for info in beside if info.node_id != self._me.node_id}

    def reachable(self, reachable: Reachable) -> None:
        """This member is reached so from now on; told to whom it concerns, if it is news."""
        moved = self._me.moved(reachable)
        if self.state is not State.OVER and moved != self._me:
            self._me = moved
            for node in self._whom_it_concerns():
                self._send(node, reachable)

    def _whom_it_concerns(self) -> list[NodeId]:
        return list(self._neighbours)

    def _moved(self, sender: NodeId, reachable: Reachable) -> None:
        """A member says where it is: news to act on if it is a ring neighbour."""
        self._ring = tuple(info.moved(reachable) if info.node_id == sender else info for info in self._ring)
        if (neighbour := self._neighbours.get(sender)) is not None:
            self._events.append(Moved(neighbour))


@dataclass(slots=True)
class _Guest:
    """What the host knows of one member."""

    info: MemberInfo
    capability: Capability | None = None
    ready: bool = False


class HostSession(_Machine):
    """The host's side. ``expected`` counts the host itself; None waits for :meth:`start`."""

    def __init__(self, me: MemberInfo, offer: ModelOffer, expected: int | None) -> None:
        super().__init__(State.GATHERING, me)
        self._offer = offer
        self._expected = expected
        self._members: dict[NodeId, _Guest] = {me.node_id: _Guest(me)}
        self._epoch = 0
        self._events.append(MeasureWanted(me.name, offer))
        self._announce()

    @property
    def names(self) -> tuple[str, ...]:
        """Who is here, the host first, in the order they came."""
        return tuple(guest.info.name for guest in self._members.values())

    def receive(self, sender: NodeId, message: SessionMessage) -> None:
        """An opened message. What the state does not allow, or a stranger sends, changes nothing."""
        if isinstance(message, Hello):
            self._hello(sender, message)
        elif sender in self._members:
            match message:
                case Reachable():
                    self._members[sender].info = self._members[sender].info.moved(message)
                    self._moved(sender, message)
                case Measured(capability):
                    self._measured(sender, capability)
                case Fetched(done, wanted) if self.state is State.BUILDING:
                    self._events.append(Fetching(self._members[sender].info.name, done, wanted))
                case Ready(epoch) if epoch == self._epoch:
                    self._ready(sender)
                case Trouble(text):
                    self._trouble(sender, text)
                case _:
                    pass  # the rest are the host's own to say

    def _hello(self, sender: NodeId, hello: Hello) -> None:
        if hello.member.node_id != sender or sender in self._members or self.state is State.OVER:
            return
        if (refusal := self._refusal(hello)) is not None:
            self._send(sender, refusal)
            return
        info = replace(hello.member, name=self._unique(hello.member.name))
        self._members[sender] = _Guest(info)
        self._send(sender, Welcome(info.name, self._offer))
        self._announce()

    def _refusal(self, hello: Hello) -> Refusal | None:
        if hello.member.version != PROTOCOL_VERSION:
            text = (
                f"{self._me.name} runs session protocol {PROTOCOL_VERSION}, you run {hello.member.version}: "
                "install the same version of kafila on both"
            )
            return Refusal(RefusalReason.VERSION, text)
        if self.state is not State.GATHERING:
            text = f"{self._me.name} has started already; ask for a new session with one more member"
            return Refusal(RefusalReason.STARTED, text)
        limit = self._expected or MAX_MEMBERS
        if len(self._members) >= limit:
            text = (
                f"the session has all of its {limit} members; ask {self._me.name} to host it with --members {limit + 1}"
            )
            return Refusal(RefusalReason.FULL, text)
        return None

    def _unique(self, name: str) -> str:
        taken = set(self.names)
        candidates = (name if n == 1 else f"{name}-{n}" for n in range(1, MAX_MEMBERS + 2))
        return next(candidate for candidate in candidates if candidate not in taken)

    def _announce(self) -> None:
        expected = self._expected or 0
        self._tell(Roster(self.names, expected))
        self._events.append(Present(self.names, expected))

    def _tell(self, message: SessionMessage) -> None:
        """Each member by itself: a message addressed to one cannot be kept back and shown to a later one."""
        for node in self._members:
            if node != self._me.node_id:
                self._send(node, message)

    def start(self) -> None:
        """Do not wait for more members."""
        if self.state is State.GATHERING:
            self._expected = len(self._members)
            self._plan_when_measured()

    def reachable(self, reachable: Reachable) -> None:
        """The host's own network."""
        super().reachable(reachable)
        self._members[self._me.node_id].info = self._me

    def fetched(self, done_bytes: int, wanted_bytes: int) -> None:
        """How far the host itself is with its share."""
        if self.state is State.BUILDING:
            self._events.append(Fetching(self._me.name, done_bytes, wanted_bytes))

    def measured(self, capability: Capability) -> None:
        """The host's own device."""
        self._measured(self._me.node_id, capability)

    def _measured(self, sender: NodeId, capability: Capability) -> None:
        if self.state is State.GATHERING:
            self._members[sender].capability = capability
            self._plan_when_measured()

    def _plan_when_measured(self) -> None:
        known = [(guest.info, guest.capability) for guest in self._members.values()]
        measured = tuple((info, capability) for info, capability in known if capability is not None)
        if len(measured) == len(known) == self._expected:
            self.state = State.BUILDING
            self._events.append(PlanWanted(measured))

    def assign(self, plan: str, ring: Sequence[NodeId]) -> None:
        """The plan is made: tell everybody. ``ring`` begins at the head and has the host in it; members that it leaves
        out are let go in words, for nothing leads from them to the head."""
        self._epoch += 1
        self._ring = tuple(self._members[node].info for node in ring)
        for node in [node for node in self._members if node not in ring]:
            text = (
                f"the session of {self._me.name} answers faster without this machine, so it is left out; "
                "with --objective bottleneck everybody serves"
            )
            self._send(node, Over(text, (), True))
            del self._members[node]
        assignment = Assign(self._epoch, plan, self._ring)
        self._tell(assignment)
        self._events.append(BuildWanted(assignment))

    def ready(self) -> None:
        """The host's own shard and links."""
        self._ready(self._me.node_id)

    def _ready(self, sender: NodeId) -> None:
        self._members[sender].ready = True
        if self.state is State.BUILDING and all(guest.ready for guest in self._members.values()):
            self.state = State.SERVING
            self._tell(Serve(self._epoch))
            self._events.append(Serving())

    def gone(self, node: NodeId) -> None:
        """A member is gone for good. While gathering its place is free again; later the session cannot go on."""
        if (guest := self._members.get(node)) is None or self.state is State.OVER:
            return
        if self.state is State.GATHERING:
            del self._members[node]
            self._announce()
        else:
            self.end(f"{guest.info.name} left the session", (guest.info.name,))

    def _trouble(self, sender: NodeId, text: str) -> None:
        """A member that cannot take part costs the others nothing while gathering; later it ends the session."""
        name = self._members[sender].info.name
        if self.state is State.GATHERING:
            self._events.append(Dropped(name, text))
            self.gone(sender)
        else:
            self.end(f"{name} cannot go on: {text}", (name,))

    def end(self, text: str, names: tuple[str, ...] = (), *, wished: bool = False) -> None:
        """End the session for everybody."""
        if self.state is not State.OVER:
            self._tell(Over(text, names, wished))
            self._over(Ended(text, names, wished=wished))


class MemberSession(_Machine):
    """A member's side, from the moment the rendezvous has let it in and the greeting has opened."""

    def __init__(self, me: MemberInfo, host: NodeId, now: float) -> None:
        super().__init__(State.KNOCKING, me)
        self._host = host
        self._host_name = "the host"
        self._early: dict[NodeId, Reachable] = {}
        """What members said of themselves before the host said that they are neighbours."""
        self._epoch = 0
        self._deadline: float | None = now + WELCOME_TIMEOUT_S
        self._send(host, Hello(me))

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
                self.state = State.MEASURING
                self._events.append(MeasureWanted(name, offer))
            case Refusal(reason, text), State.KNOCKING:
                self._deadline = None
                self._over(Ended(text, refusal=reason))
            case Roster(names, expected), _:
                self._host_name = names[0] if names else self._host_name
                self._events.append(Present(names, expected))
            case Assign() as assignment, State.WAITING:
                self._assigned(assignment)
            case Serve(epoch), State.BUILDING if epoch == self._epoch:
                self.state = State.SERVING
                self._events.append(Serving())
            case Over(text, names, wished), _:
                self._over(Ended(text, names, wished=wished))
            case _:
                pass  # out of order or not for us: sealed and authentic, but nothing to act on

    def _assigned(self, assignment: Assign) -> None:
        self._epoch = assignment.epoch
        self.state = State.BUILDING
        early, self._early = self._early, {}
        ring = [info.moved(early[info.node_id]) if info.node_id in early else info for info in assignment.ring]
        self._ring = tuple(ring)
        self._events.append(BuildWanted(replace(assignment, ring=self._ring)))
        as_assigned = next((info for info in ring if info.node_id == self._me.node_id), self._me)
        if replace(self._me, name=as_assigned.name) != as_assigned:  # moved while the host planned
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
        if self.state is State.BUILDING:
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
        if node == self._host:
            self._over(Ended(f"{self._host_name} left, and the session with it", (self._host_name,)))
        name = next((info.name for info in self._ring if info.node_id == node), None)
        if name is not None and self.state in {State.BUILDING, State.SERVING}:
            self._over(Ended(f"{name} left the session", (name,)))


def _whereabouts(info: MemberInfo) -> Reachable:
    return Reachable(info.addresses, info.kinds, info.nat_report, info.rendezvous_rtt_s)
