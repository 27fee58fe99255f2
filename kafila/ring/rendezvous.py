"""The rendezvous service: one socket's worth of QUIC control connections, relay and STUN (sans-IO).

It introduces members to each other, passes on what they seal, relays what they encrypt, and learns neither. Strangers
cost it nothing: an address gets no memory before it has returned a Retry token, and never more bytes than it sent.

    connection  on                                  becomes
    -           a first packet with a valid token   handshake
    handshake   certificate shown                   stranger (its id is its certificate's)
    stranger    Create, Join, Restore: taken        member (its address may relay)
    stranger    any of them refused                 refused
    member      evicted, replaced                   refused
    any         closes, falls silent, misbehaves    - (the others in its session hear of it)
    handshake, stranger, refused   ``LINGER_S`` pass    -

A member whose packets come from a new address is asked there to confirm (``notice.Challenge``); until its connection
returns the nonce, everything still goes to the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from kafila.errors import ProtocolError
from kafila.ring import control, notice
from kafila.ring.control import (
    Confirm,
    Create,
    Departure,
    Evict,
    Join,
    OtherVersion,
    Ping,
    Pong,
    Refused,
    Restore,
    Send,
)
from kafila.ring.identity import Identity, node_id_of
from kafila.ring.quic import MIN_DATAGRAM_BYTES, Closed, Established, Message, QuicConnection, Stream
from kafila.ring.quic_retry import Accept, Reply, RetryGate, packet_header
from kafila.ring.quota import Buckets, TokenBucket, network_of
from kafila.ring.registry import Caller, Delivery, Registry
from kafila.ring.relay import Relay
from kafila.types import Address, Transmit
from kafila.wire import Kind, classify

Stun = Callable[[bytes, Address, float], bytes | None]
"""Answers a STUN datagram: ``(data, source, now)``. An answer longer than ``data`` is not sent."""

IDLE_TIMEOUT_S = 40.0
"""Two keepalives of at most 18 s may be lost before a silent member counts as gone."""
LINGER_S = 10.0
"""How long a connection may be no member's: time for a slow handshake, or for a refused member to hang up."""
MAX_CONNECTIONS = 2048
"""About 100 KiB each with QUIC's state: 200 MiB on a small cloud machine."""
MAX_UNSENT_BYTES = 256 * 1024
"""What may wait for a member that reads slowly. The start of a session of 64 says about 64 KiB to each."""
MAX_STATELESS = 256
"""Answers to strangers waiting for the driver, which takes them after each batch of at most 64 datagrams."""

HANDSHAKES_PER_S, HANDSHAKE_BURST = 4.0, 64.0
"""New connections from one network. The burst: a dozen members behind one NAT, each trying a few times as the
rendezvous restarts. A handshake is the dearest thing a stranger can ask for, about 5 ms of this machine."""
MISSES_PER_S, MISS_BURST = 0.2, 10.0
"""Wrong locators from one network. At one in five seconds, guessing any one of a thousand live sessions takes two days,
and what is found is a greeting that cannot be opened."""
SAID_BYTES_PER_S, SAID_BURST_BYTES = 128.0 * 1024, 2.0 * 2**20
"""What one member says through the rendezvous, times the members it reaches. The burst: a host hands 63 members a plan
of 32 KiB. Beyond it the connection closes, with words: a message silently dropped would hang the session."""
_MESSAGE_COST_BYTES = 512
"""What handling one message costs, as bytes, so that many tiny ones are no way round the quota."""


class _State(Enum):
    HANDSHAKE = auto()
    STRANGER = auto()
    MEMBER = auto()
    REFUSED = auto()


@dataclass(slots=True, eq=False)
class _Connection:
    number: int
    quic: QuicConnection
    address: Address
    """Validated: where everything goes."""
    said: TokenBucket
    deadline: float | None
    """When it is given up unless it is a member's by then."""
    retry_id: bytes
    """What the client addresses until it has our first packet."""
    ids: tuple[bytes, ...] = ()
    """What it may address after that, as last entered in the server's index."""
    state: _State = _State.HANDSHAKE
    fingerprint: bytes = b""
    challenge: tuple[bytes, Address] | None = None

    @property
    def caller(self) -> Caller:
        return Caller(self.number, node_id_of(self.fingerprint), self.fingerprint, self.address)


class RendezvousServer:
    """The machine. ``randbytes(n)`` must be fit for keys. ``counters`` says what was done and dropped, and why."""

    def __init__(self, identity: Identity, randbytes: Callable[[int], bytes], stun: Stun | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._randbytes = randbytes
        self._stun = stun
        self._gate = RetryGate(randbytes(32))
        self._registry = Registry()
        self._relay = Relay(self.counters)
        self._connections: dict[int, _Connection] = {}
        self._by_id: dict[bytes, _Connection] = {}
        self._timers: dict[int, float] = {}
        self._touched: dict[int, _Connection] = {}
        self._stateless: list[Transmit] = []
        self._next_number = 0
        self._handshakes = Buckets(HANDSHAKES_PER_S, HANDSHAKE_BURST)
        self._misses = Buckets(MISSES_PER_S, MISS_BURST)

    @property
    def sessions(self) -> int:
        """How many sessions live."""
        return len(self._registry)

    @property
    def connections(self) -> int:
        """How many control connections are remembered, members' or not."""
        return len(self._connections)

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """One datagram came. Never raises, whatever the bytes."""
        kind = classify(data)
        self.counters[f"received_{kind.value}"] += 1
        if kind is Kind.QUIC:
            self._receive_quic(data, source, now)
        elif kind is Kind.RELAY:
            if not self._relay.receive(data, source, now):
                self._answer(notice.encode_notice(notice.Unknown()), data, source)
        elif kind is Kind.STUN and self._stun is not None:
            reply = self._stun(data, source, now)
            if reply is not None:
                self._answer(reply, data, source)

    def handle_timer(self, now: float) -> None:
        """Call at or after :meth:`next_timer`."""
        for number in [number for number, due in self._timers.items() if due <= now]:
            connection = self._connections[number]
            if connection.deadline is not None and connection.deadline <= now:
                connection.quic.close(now, "nothing was asked for")
            else:
                connection.quic.handle_timer(now)
            self._progress(connection, now)

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` wants to be called."""
        relay = self._relay.next_timer()
        dues = self._timers.values() if relay is None else (relay, *self._timers.values())
        return min(dues, default=None)

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        """What should leave now: answers to strangers and control before what is relayed."""
        leaving, self._stateless = self._stateless, []
        touched, self._touched = self._touched, {}
        for connection in touched.values():
            leaving.extend(Transmit(data, connection.address) for data in connection.quic.datagrams_to_send(now))
            self._watch(connection)
        leaving.extend(self._relay.datagrams_to_send(now))
        return leaving

    def close(self, now: float) -> None:
        """Tell every member that the service ends; what to send follows from :meth:`datagrams_to_send`."""
        for connection in list(self._connections.values()):
            connection.quic.close(now, "the rendezvous is closing")
            self._touched[connection.number] = connection

    def _answer(self, reply: bytes, request: bytes, source: Address) -> None:
        """Answer a source that has proven nothing: never with more bytes than it sent."""
        if len(reply) > len(request):
            self.counters["reply_would_amplify"] += 1
        elif len(self._stateless) >= MAX_STATELESS:
            self.counters["reply_queue_full"] += 1
        else:
            self._stateless.append(Transmit(reply, source))

    def _receive_quic(self, data: bytes, source: Address, now: float) -> None:
        header = packet_header(data)
        if header is None:
            self.counters["quic_malformed"] += 1
            return
        connection = self._by_id.get(header.destination_cid)
        if connection is None:
            connection = self._accept(data, source, now)
        if connection is None:
            return
        newest = connection.quic.newest_packet
        connection.quic.receive([data], now)
        if source != connection.address and connection.quic.newest_packet > newest:
            self._challenge(connection, data, source)
        self._progress(connection, now)

    def _accept(self, data: bytes, source: Address, now: float) -> _Connection | None:
        """A datagram of no connection's: a beginning, or nothing."""
        verdict = self._gate.check(data, source, now)
        if isinstance(verdict, Reply):
            self._answer(verdict.data, data, source)
        elif not isinstance(verdict, Accept):
            self.counters["quic_unknown"] += 1
        elif len(self._connections) >= MAX_CONNECTIONS:
            self.counters["connections_full"] += 1
        elif not self._handshakes.get(network_of(source.host), now).take(1, now):
            self.counters["handshakes_over_quota"] += 1
        else:
            return self._open(verdict, source, now)
        return None

    def _open(self, accept: Accept, source: Address, now: float) -> _Connection:
        quic = QuicConnection.server(
            self._identity,
            None,
            now,
            alpn=control.ALPN,
            accepted=accept,
            idle_timeout_s=IDLE_TIMEOUT_S,
            max_message_bytes=control.MAX_CONTROL_BYTES,
        )
        said = TokenBucket(SAID_BYTES_PER_S, SAID_BURST_BYTES, now)
        connection = _Connection(self._next_number, quic, source, said, now + LINGER_S, accept.retry_source_cid)
        self._next_number += 1
        self._connections[connection.number] = connection
        self._by_id[connection.retry_id] = connection
        return connection

    def _challenge(self, connection: _Connection, data: bytes, source: Address) -> None:
        """An authentic and newest packet came from elsewhere: ask there whether the member receives there."""
        if connection.challenge is None or connection.challenge[1] != source:
            connection.challenge = (self._randbytes(notice.NONCE_BYTES), source)
        self._answer(notice.encode_notice(notice.Challenge(connection.challenge[0])), data, source)

    def _progress(self, connection: _Connection, now: float) -> None:
        """Act on what a connection has to tell, and see that what it wants to send leaves."""
        self._touched[connection.number] = connection
        while (event := connection.quic.next_event()) is not None:
            if isinstance(event, Established):
                connection.state, connection.fingerprint = _State.STRANGER, event.fingerprint
            elif isinstance(event, Closed):
                self._forget(connection, Departure.LEFT if event.by_peer else Departure.LOST, now)
            elif connection.state in (_State.STRANGER, _State.MEMBER):
                self._take(connection, event, now)

    def _take(self, connection: _Connection, event: Message, now: float) -> None:
        try:
            self._obey(connection, _decoded(event), len(event.data), now)
        except ProtocolError as error:
            self.counters["protocol_errors"] += 1
            connection.quic.close(now, str(error))

    def _obey(self, connection: _Connection, message: control.Message | OtherVersion, length: int, now: float) -> None:
        reach = 1
        said: list[Delivery] = []
        match message:
            case Create() | Join() | Restore():
                said = self._register(connection, message, now)
            case Send():
                said = self._registry.send(connection.number, message)
                reach = max(len(said), 1)
                self.counters["signals_in"] += 1
                self.counters["signals_out"] += len(said)
            case Evict():
                said = self._evict(connection, message)
            case Ping():
                said = [Delivery(connection.number, Pong(connection.address))]
            case Confirm():
                said = self._confirm(connection, message, now)
            case OtherVersion():
                said = [Delivery(connection.number, Refused(control.Reason.VERSION))]
            case _:
                raise ProtocolError("that is the rendezvous's to say")
        if not connection.said.take((length + _MESSAGE_COST_BYTES) * reach, now):
            raise ProtocolError("too much was said at once")
        self._deliver(said, now)

    def _register(self, connection: _Connection, request: Create | Join | Restore, now: float) -> list[Delivery]:
        misses = self._misses.get(network_of(connection.address.host), now)
        if isinstance(request, Join) and misses.ready_at(1, now) > now:
            return [Delivery(connection.number, Refused(control.Reason.BUSY))]
        said = self._registry.register(connection.caller, request)
        membership = self._registry.membership(connection.number)
        if membership is not None:
            connection.state, connection.deadline = _State.MEMBER, None
            self._relay.admit(membership.locator, membership.node, connection.address, now)
        elif isinstance(request, Join):
            misses.take(1, now)
        return said

    def _evict(self, connection: _Connection, request: Evict) -> list[Delivery]:
        said = self._registry.evict(connection.number, request)
        membership = self._registry.membership(connection.number)
        if membership is not None:
            self._relay.remove(membership.locator, request.member)
        return said

    def _confirm(self, connection: _Connection, confirm: Confirm, now: float) -> list[Delivery]:
        if connection.challenge is None or confirm.nonce != connection.challenge[0]:
            self.counters["challenge_failed"] += 1
            return []
        connection.address = connection.challenge[1]
        connection.challenge = None
        connection.quic.path_changed(now, MIN_DATAGRAM_BYTES)
        membership = self._registry.membership(connection.number)
        if membership is not None:
            self._relay.admit(membership.locator, membership.node, connection.address, now)
        return [Delivery(connection.number, Pong(connection.address))]

    def _deliver(self, deliveries: Iterable[Delivery], now: float) -> None:
        """The one place where the service speaks to members."""
        for number, message in deliveries:
            connection = self._connections[number]
            self._touched[number] = connection
            if isinstance(message, Refused):
                connection.state, connection.deadline = _State.REFUSED, now + LINGER_S
            elif connection.quic.buffered_bytes > MAX_UNSENT_BYTES:
                self.counters["member_reads_slowly"] += 1
                continue
            connection.quic.send(Stream.CONTROL, control.encode(message))

    def _forget(self, connection: _Connection, how: Departure, now: float) -> None:
        membership = self._registry.membership(connection.number)
        if membership is not None:
            self._relay.remove(membership.locator, membership.node)
        said = self._registry.gone(connection.number, how)
        del self._connections[connection.number]
        self._timers.pop(connection.number, None)
        self._deliver(said, now)

    def _watch(self, connection: _Connection) -> None:
        """After a connection has spoken: its timer and its ids are as they will be until it is touched again."""
        number = connection.number
        gone = number not in self._connections
        ids = () if gone else connection.quic.connection_ids
        if ids != connection.ids:
            for old in connection.ids:
                self._by_id.pop(old, None)
            connection.ids = ids
            self._by_id.update(dict.fromkeys(ids, connection))
        if gone:
            self._by_id.pop(connection.retry_id, None)
            return
        due = _earliest(connection.quic.next_timer(), connection.deadline)
        if due is None:
            self._timers.pop(number, None)
        else:
            self._timers[number] = due


def _decoded(event: Message) -> control.Message | OtherVersion:
    """What a member said. Raises ProtocolError."""
    if event.stream is not Stream.CONTROL:
        raise ProtocolError("the rendezvous takes no bulk")
    return control.decode(event.data)


def _earliest(one: float | None, other: float | None) -> float | None:
    return min((due for due in (one, other) if due is not None), default=None)
