"""A member's side of the rendezvous: registered, heard, and back again after any loss (sans-IO).

    state       on                                becomes
    idle        create(), join()                  connecting
    connecting  certificate shown, request sent   registering
    registering Joined                            ready        event Joined
    connecting  5 s since the start, never ready  over         event Unreachable
    registering Refused                           over         event Refused (too busy, after a loss: waiting)
    ready       silence, or the connection ends   waiting      event Lost
    connecting  one attempt's time is up          waiting      (after a loss)
    waiting     the pause is over                 connecting
    any         leave()                           over

After a loss the member comes back by itself, for as long as it lives: the host with Create, the others with Restore,
which revives a session that a restarted rendezvous has forgotten. Direct links never notice. What is signalled
meanwhile waits; what was on its way at the moment of the loss may be lost with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from kafila.errors import ProtocolError
from kafila.ring import control, notice
from kafila.ring.control import (
    Confirm,
    Create,
    Evict,
    Join,
    MemberJoined,
    MemberLeft,
    Ping,
    Pong,
    Reason,
    Refused,
    Restore,
    Send,
    Signal,
)
from kafila.ring.identity import Identity
from kafila.ring.pulse import Pulse, Uniform
from kafila.ring.quic import Closed, Established, Message, QuicConnection, Stream
from kafila.types import Address, NodeId, Transmit
from kafila.wire import Kind, classify, unwrap_relay, wrap_relay

FIRST_ANSWER_S = 5.0
"""How long a person waits before hearing that the rendezvous does not answer: four retransmissions of a packet."""
ATTEMPT_S = 1.0
"""One attempt to come back. Its first packet is sent at 0, 0.2 and 0.6 s, so a rendezvous that returns hears one within
half a second; where the round trip is known and slow, an attempt gets six of them."""
_ATTEMPT_RTTS = 6
PAUSES_S = (0.05, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Between attempts, times 0.75 to 1.25 so that members do not come in step."""
_PAUSES_WHILE_RELAYING = 2
"""While the relay carries a link, only so many of them count: that link stands still until we are back."""

HINT_SPACING_S = 0.25
"""Notices are forgeable: at most four pings a second come of them."""
IDLE_TIMEOUT_S = 40.0
"""As the service's. Silence is noticed by pings long before."""

MAX_EVENTS = 8192
"""Events waiting for the owner, who drains after every input. What comes over it is dropped and counted."""
MAX_HELD_BYTES = 256 * 1024
"""What is signalled while there is no connection, as much as the service holds for a slow reader."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Registered. After a loss ``resumed`` is true and ``members`` may lack some who have yet to come back."""

    host: NodeId
    seats: int
    greeting: bytes
    members: tuple[NodeId, ...]
    observed: Address
    resumed: bool


@dataclass(frozen=True, slots=True)
class Moved:
    """The rendezvous sees us at another address than before."""

    observed: Address


@dataclass(frozen=True, slots=True)
class Relayed:
    """A datagram from ``sender`` came through the relay."""

    sender: NodeId
    datagram: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """The rendezvous does not answer any more, or hung up; we keep trying."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """There was never an answer; this machine is over."""

    reason: str


Event = Joined | Moved | MemberJoined | MemberLeft | Signal | Relayed | Refused | Lost | Unreachable


class State(Enum):
    """Where the member stands with the rendezvous."""

    IDLE = auto()
    CONNECTING = auto()
    REGISTERING = auto()
    READY = auto()
    WAITING = auto()
    OVER = auto()


class RendezvousClient:
    """The machine. ``server`` is resolved; ``random`` only spreads timers."""

    def __init__(self, identity: Identity, server: Address, random: Uniform) -> None:
        self.state = State.IDLE
        self.observed: Address | None = None
        """Our address as the rendezvous sees it."""
        self.server = server
        self.dropped = 0
        """Relayed datagrams and signals dropped because a queue was full."""
        self._identity = identity
        self._random = random
        self._pulse = Pulse(random)
        self._request: Create | Join | Restore | None = None
        self._quic: QuicConnection | None = None
        self._was_ready = False
        self._failures = 0
        self._timer: float | None = None
        """When the attempt or the pause is over; not used while ready."""
        self._hints: dict[type, float] = {}
        """When the next notice of a kind will be heeded."""
        self._last_rtt_s = 0.0
        self._events: deque[Event] = deque()
        self._held: deque[Send | Evict] = deque()
        self._held_bytes = 0

    @property
    def rtt_s(self) -> float | None:
        """The smoothed round trip to the rendezvous, seconds; ``None`` while unknown."""
        return self._quic.rtt_s if self._quic else None

    @property
    def minimum_rtt_s(self) -> float | None:
        """The shortest round trip, seconds: distance, where the smoothed one tells of a busy start as well."""
        return self._quic.minimum_rtt_s if self._quic else None

    def network_changed(self, now: float) -> None:
        """This machine's network changed: hear at once whether the rendezvous still answers, and where it sees us."""
        if self.state is State.READY and not self._pulse.waiting:
            self._ping(now)

    def create(self, locator: str, seats: int, greeting: bytes, now: float) -> None:
        """Open a session as its host. Raises ProtocolError where an argument is out of ``control``'s bounds."""
        self._begin(Create(locator, seats, greeting), now)

    def join(self, locator: str, now: float) -> None:
        """Enter a session. Raises ProtocolError where ``locator`` cannot be one."""
        self._begin(Join(locator), now)

    def signal(self, to: NodeId | None, sealed: bytes) -> None:
        """Pass ``sealed`` to a member, or to all others. Waits for the connection where there is none.

        Raises ProtocolError over ``control.MAX_SEALED_BYTES``.
        """
        self._say(Send(to, sealed), len(sealed))

    def evict(self, member: NodeId) -> None:
        """Put a member out; the host's right alone."""
        self._say(Evict(member), 0)

    def relay(self, to: NodeId, datagram: bytes, now: float) -> Transmit:
        """``datagram`` on its way to ``to`` by the relay. Nothing is promised, as of any datagram."""
        self._note_relaying(datagram, now)
        return Transmit(wrap_relay(to, datagram), self.server)

    def leave(self, now: float) -> None:
        """Go, and say so with the next datagram."""
        if self._quic is not None:
            self._quic.close(now, "left")
        self.state, self._timer = State.OVER, None

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """A datagram of kind QUIC or RELAY came from the rendezvous. Never raises, whatever the bytes."""
        if source != self.server or self.state is State.OVER:
            return
        kind = classify(data)
        if kind is Kind.RELAY:
            self._take_envelope(data, now)
        elif kind is Kind.QUIC and self._quic is not None:
            newest = self._quic.newest_packet
            self._quic.receive([data], now)
            if self._quic.newest_packet > newest:
                self._pulse.heard(now)
            self._progress(now)

    def handle_timer(self, now: float) -> None:
        """Call at or after :meth:`next_timer`."""
        if self._quic is not None and self.state is not State.OVER:
            self._quic.handle_timer(now)
            self._progress(now)
        due = self._own_timer
        if due is None or now < due:
            return
        if self.state is State.WAITING:
            self._connect(now)
        elif self.state is not State.READY:
            self._lose("it did not answer", now)
        elif self._pulse.waiting:
            self._lose("it went silent", now)
        else:
            self._ping(now)

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` wants to be called."""
        if self.state is State.OVER:
            return None
        quic = self._quic.next_timer() if self._quic else None
        return min((due for due in (quic, self._own_timer) if due is not None), default=None)

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        """What should leave now."""
        if self._quic is None:
            return []
        return [Transmit(data, self.server) for data in self._quic.datagrams_to_send(now)]

    def next_event(self) -> Event | None:
        """The next thing that happened, or ``None``."""
        return self._events.popleft() if self._events else None

    def _begin(self, request: Create | Join, now: float) -> None:
        if self.state is not State.IDLE:
            raise ProtocolError("one client enters one session once")
        control.encode(request)  # out of bounds is the caller's to hear, here and now
        self._request = request
        self._connect(now)
        self._timer = now + FIRST_ANSWER_S

    def _connect(self, now: float) -> None:
        self.state = State.CONNECTING
        self._quic = QuicConnection.client(
            self._identity,
            None,
            now,
            alpn=control.ALPN,
            idle_timeout_s=IDLE_TIMEOUT_S,
            max_message_bytes=control.MAX_CONTROL_BYTES,
        )
        self._timer = now + max(ATTEMPT_S, _ATTEMPT_RTTS * self._known_rtt_s)

    def _progress(self, now: float) -> None:
        """Act on what the connection has to tell."""
        quic = self._quic
        while quic is not None and quic is self._quic and (event := quic.next_event()) is not None:
            if isinstance(event, Established):
                self._established()
            elif isinstance(event, Message):
                self._take(event, now)
            elif isinstance(event, Closed) and self.state is not State.OVER:
                self._lose(event.reason, now)

    def _established(self) -> None:
        self.state = State.REGISTERING
        if self._request is not None:
            self._transmit(self._request)

    def _take(self, event: Message, now: float) -> None:
        try:
            message = control.decode(event.data)
        except ProtocolError as error:
            self._lose(f"it spoke nonsense: {error}", now)
            return
        match message:
            case control.Joined():
                self._joined(message, now)
            case Pong():
                self._observe(message.observed)
            case MemberJoined() | MemberLeft() | Signal():
                self._tell(message)
            case control.OtherVersion():
                self._refused(Refused(Reason.VERSION), now)
            case Refused():
                self._refused(message, now)
            case _:
                self._lose("it spoke nonsense: that is a member's to say", now)

    def _joined(self, joined: control.Joined, now: float) -> None:
        self._tell(
            Joined(joined.host, joined.seats, joined.greeting, joined.members, joined.observed, resumed=self._was_ready)
        )
        if isinstance(self._request, Join):
            self._request = Restore(self._request.locator, joined.host, joined.seats, joined.greeting)
        self.observed = joined.observed
        self.state, self._was_ready, self._failures = State.READY, True, 0
        self._pulse.rest(now)
        while self._held:
            self._transmit(self._held.popleft())
        self._held_bytes = 0

    def _observe(self, observed: Address) -> None:
        if observed != self.observed:
            self.observed = observed
            self._tell(Moved(observed))

    def _refused(self, refused: Refused, now: float) -> None:
        if refused.reason is Reason.BUSY and self._was_ready:
            self._lose("it is too busy", now)
            return
        self._tell(refused)
        self.leave(now)

    def _lose(self, reason: str, now: float) -> None:
        """This connection is no use any more."""
        if not self._was_ready:
            self._tell(Unreachable(reason))
            self.state, self._timer, self._quic = State.OVER, None, None
            return
        if self.state is State.READY:
            self._tell(Lost(reason))
        self._last_rtt_s = self._known_rtt_s
        # Dropped without a word: a close that arrived after all would announce to the others that we left.
        self._quic = None
        self.state = State.WAITING
        pauses = PAUSES_S[:_PAUSES_WHILE_RELAYING] if self._pulse.relaying(now) else PAUSES_S
        pause = pauses[min(self._failures, len(pauses) - 1)]
        self._failures += 1
        self._timer = now + pause * self._random.uniform(0.75, 1.25)

    def _ping(self, now: float) -> None:
        self._transmit(Ping())
        self._pulse.asked(now, self._known_rtt_s)

    def _take_envelope(self, envelope: bytes, now: float) -> None:
        sender, datagram = unwrap_relay(envelope)
        if sender != notice.NOBODY:
            self._note_relaying(datagram, now)
            self._tell(Relayed(sender, datagram))
            return
        hint = notice.decode_notice(envelope)
        if hint is None or self.state is not State.READY or now < self._hints.get(type(hint), 0.0):
            return
        self._hints[type(hint)] = now + HINT_SPACING_S
        if isinstance(hint, notice.Challenge):
            self._transmit(Confirm(hint.nonce))
        elif not self._pulse.waiting:
            self._ping(now)

    def _say(self, message: Send | Evict, length: int) -> None:
        control.encode(message)  # out of bounds is the caller's to hear, here and now
        if self.state is State.READY:
            self._transmit(message)
        elif self.state is State.OVER or self._held_bytes + length > MAX_HELD_BYTES:
            self.dropped += 1
        else:
            self._held.append(message)
            self._held_bytes += length

    def _transmit(self, message: control.ToServer) -> None:
        if self._quic is not None:
            self._quic.send(Stream.CONTROL, control.encode(message))

    def _tell(self, event: Event) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        else:
            self.dropped += 1

    def _note_relaying(self, datagram: bytes, now: float) -> None:
        if classify(datagram) is not Kind.PATH:  # probes alone do not make a link depend on the relay
            self._pulse.relayed(now)

    @property
    def _own_timer(self) -> float | None:
        return self._pulse.due if self.state is State.READY else self._timer

    @property
    def _known_rtt_s(self) -> float:
        return self.rtt_s or self._last_rtt_s
