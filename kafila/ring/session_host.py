"""The host's side of a session (pure): who is here, what was measured, who is ready. :mod:`kafila.ring.session` has the
states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    Visit,
    VisitOver,
    Welcome,
)
from kafila.ring.session_machine import MAX_MEMBERS, Machine, State
from kafila.ring.steps import (
    BuildWanted,
    Dropped,
    Ended,
    Fetching,
    GuestCame,
    GuestLeft,
    Guests,
    MeasureWanted,
    PlanWanted,
    Present,
    Serving,
)
from kafila.types import Capability, NodeId

MAX_GUESTS = 32
"""Each costs the head a link; with as many, forming and asking stay as quick as with none."""


@dataclass(slots=True)
class _Member:
    """What the host knows of one member."""

    info: MemberInfo
    capability: Capability | None = None
    ready: bool = False


class HostSession(Machine):
    """The host's side. ``expected`` counts the host itself; None waits for :meth:`start`."""

    def __init__(self, me: MemberInfo, offer: ModelOffer, expected: int | None) -> None:
        super().__init__(State.GATHERING, me)
        self._offer = offer
        self._expected = expected
        self._members: dict[NodeId, _Member] = {me.node_id: _Member(me)}
        self._epoch = 0
        self._plan = ""
        self._events.append(MeasureWanted(me.name, offer))
        self._announce()

    @property
    def names(self) -> tuple[str, ...]:
        """Who is here, the host first, in the order they came."""
        return tuple(member.info.name for member in self._members.values())

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
        elif sender in self._guests:
            match message:
                case Reachable():
                    self._moved(sender, message)
                case Trouble():
                    self.gone(sender)
                case _:
                    pass  # nothing depends on a guest

    def _hello(self, sender: NodeId, hello: Hello) -> None:
        known = sender in self._members or sender in self._guests
        if hello.member.node_id != sender or known or self.state is State.OVER:
            return
        if (refusal := self._refusal(hello)) is not None:
            self._send(sender, refusal)
            return
        info = replace(hello.member, name=self._unique(hello.member.name))
        self._send(sender, Welcome(info.name, self._offer))
        if hello.guest:
            self._guests[sender] = info
            self._send(sender, Roster(self.names, self._expected or 0))
            self._tell_guests()
            self._seat(sender)
        else:
            self._members[sender] = _Member(info)
            self._announce()

    def _tell_guests(self) -> None:
        self._events.append(Guests(tuple(info.name for info in self._guests.values())))

    def _seat(self, guest: NodeId) -> None:
        """Once there is a ring, a guest is linked with its head."""
        if not self._ring:
            return
        self._send(guest, Assign(self._epoch, self._plan, self._ring))
        if self._ring[0].node_id == self._me.node_id:
            self._events.append(GuestCame(self._guests[guest]))
        else:
            self._send(self._ring[0].node_id, Visit(self._guests[guest]))
        if self.state is State.SERVING:
            self._send(guest, Serve(self._epoch))

    def _refusal(self, hello: Hello) -> Refusal | None:
        if hello.member.version != PROTOCOL_VERSION:
            text = (
                f"{self._me.name} runs session protocol {PROTOCOL_VERSION}, you run {hello.member.version}: "
                "install the same version of kafila on both"
            )
            return Refusal(RefusalReason.VERSION, text)
        if hello.guest:
            text = f"the session has its {MAX_GUESTS} guests already"
            return Refusal(RefusalReason.FULL, text) if len(self._guests) >= MAX_GUESTS else None
        if self.state is not State.GATHERING:
            text = (
                f"{self._me.name} has started already; join with --guest to ask without lending this machine, "
                "or ask for a new session with one more member"
            )
            return Refusal(RefusalReason.STARTED, text)
        limit = self._expected or MAX_MEMBERS
        if len(self._members) >= limit:
            text = (
                f"the session has all of its {limit} members; ask {self._me.name} to host it with --members {limit + 1}"
            )
            return Refusal(RefusalReason.FULL, text)
        return None

    def _unique(self, name: str) -> str:
        taken = {*self.names, *(info.name for info in self._guests.values())}
        candidates = (name if n == 1 else f"{name}-{n}" for n in range(1, MAX_MEMBERS + MAX_GUESTS + 2))
        return next(candidate for candidate in candidates if candidate not in taken)

    def _announce(self) -> None:
        expected = self._expected or 0
        self._tell(Roster(self.names, expected))
        self._events.append(Present(self.names, expected))

    def _tell(self, message: SessionMessage) -> None:
        """Each member by itself: a message addressed to one cannot be kept back and shown to a later one."""
        for node in (*self._members, *self._guests):
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
        known = [(member.info, member.capability) for member in self._members.values()]
        measured = tuple((info, capability) for info, capability in known if capability is not None)
        if len(measured) == len(known) == self._expected:
            self.state = State.BUILDING
            self._events.append(PlanWanted(measured))

    def assign(self, plan: str, ring: Sequence[NodeId]) -> None:
        """The plan is made: tell everybody. ``ring`` begins at the head and has the host in it; members that it leaves
        out are guests from here on."""
        self._epoch += 1
        self._plan = plan
        self._ring = tuple(self._members[node].info for node in ring)
        for node in [node for node in self._members if node not in ring]:
            self._guests[node] = self._members.pop(node).info
        assignment = Assign(self._epoch, plan, self._ring)
        for node in self._members:
            if node != self._me.node_id:
                self._send(node, assignment)
        self._events.append(BuildWanted(assignment))
        for guest in self._guests:
            self._seat(guest)

    def ready(self) -> None:
        """The host's own shard and links."""
        self._ready(self._me.node_id)

    def _ready(self, sender: NodeId) -> None:
        self._members[sender].ready = True
        if self.state is State.BUILDING and all(member.ready for member in self._members.values()):
            self.state = State.SERVING
            self._tell(Serve(self._epoch))
            self._events.append(Serving())

    def gone(self, node: NodeId) -> None:
        """A member is gone for good. While gathering its place is free again; later the session cannot go on."""
        if node in self._guests and self.state is not State.OVER:
            self._guest_gone(node)
        if (member := self._members.get(node)) is None or self.state is State.OVER:
            return
        if self.state is State.GATHERING:
            del self._members[node]
            self._announce()
        else:
            self.end(f"{member.info.name} left the session", (member.info.name,))

    def _guest_gone(self, guest: NodeId) -> None:
        del self._guests[guest]
        self._tell_guests()
        if self._ring and self._ring[0].node_id == self._me.node_id:
            self._events.append(GuestLeft(guest))
        elif self._ring:
            self._send(self._ring[0].node_id, VisitOver(guest))

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
