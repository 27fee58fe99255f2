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
from typing import NamedTuple

from kafila.ring.agreement import (
    PROTOCOL_VERSION,
    Assign,
    Hello,
    Measured,
    MemberInfo,
    ModelOffer,
    Over,
    Ready,
    Refusal,
    RefusalReason,
    Roster,
    Serve,
    SessionMessage,
    Trouble,
    Welcome,
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


class Outgoing(NamedTuple):
    """A message to seal for one member."""

    to: NodeId
    message: SessionMessage


@dataclass(frozen=True, slots=True)
class Present:
    """Somebody joined, or the roster changed; ``expected`` 0 while unknown."""

    names: tuple[str, ...]
    expected: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Host only: a member cannot take part, and why; its place is free."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class MeasureWanted:
    """Measure this device with the offer's shapes, then call ``measured`` or ``trouble``."""

    name: str
    offer: ModelOffer


@dataclass(frozen=True, slots=True)
class PlanWanted:
    """Host only: divide the model among these, in the order they joined, then call ``assign`` or ``end``."""

    members: tuple[tuple[MemberInfo, Capability], ...]


@dataclass(frozen=True, slots=True)
class BuildWanted:
    """Load the shard and link with the neighbours, then call ``ready``."""

    assignment: Assign


@dataclass(frozen=True, slots=True)
class Serving:
    """Prompts may be asked."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over. ``names``: who left, where that is why; ``refusal``: where the host did not take us;
    ``wished``: the host's owner ended it, so nothing is wrong."""

    text: str
    names: tuple[str, ...] = ()
    refusal: RefusalReason | None = None
    wished: bool = False


Event = Present | Dropped | MeasureWanted | PlanWanted | BuildWanted | Serving | Ended


class _Machine:
    """What both roles share: the two queues and the end."""

    def __init__(self, state: State) -> None:
        self.state = state
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


@dataclass(slots=True)
class _Guest:
    """What the host knows of one member."""

    info: MemberInfo
    capability: Capability | None = None
    ready: bool = False


class HostSession(_Machine):
    """The host's side. ``expected`` counts the host itself; None waits for :meth:`start`."""

    def __init__(self, me: MemberInfo, offer: ModelOffer, expected: int | None) -> None:
        super().__init__(State.GATHERING)
        self._me = me
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
                case Measured(capability):
                    self._measured(sender, capability)
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
        """The plan is made: tell everybody. ``ring`` begins at the head."""
        self._epoch += 1
        assignment = Assign(self._epoch, plan, tuple(self._members[node].info for node in ring))
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
        super().__init__(State.KNOCKING)
        self._me = me
        self._host = host
        self._host_name = "the host"
        self._names: dict[NodeId, str] = {}
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
        """An opened message; only the host's count, and only those that the state allows."""
        if sender != self._host or self.state is State.OVER:
            return
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
        self._names = {info.node_id: info.name for info in assignment.ring}
        self.state = State.BUILDING
        self._events.append(BuildWanted(assignment))

    def measured(self, capability: Capability) -> None:
        """This device, measured."""
        if self.state is State.MEASURING:
            self.state = State.WAITING
            self._send(self._host, Measured(capability))

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
        elif node in self._names and self.state in {State.BUILDING, State.SERVING}:
            self._over(Ended(f"{self._names[node]} left the session", (self._names[node],)))
