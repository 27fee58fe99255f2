"""The relay: passes a session's datagrams between its registered members, unread (pure).

A datagram is passed on when its source is the validated address of a registered member, its addressee is another
member of the same session, and the quotas allow it. Signalling (path messages and QUIC handshakes) has a quota of its
own and never waits; everything else waits in a bounded queue a member while quotas are short, so that a sender meets a
narrow link, which congestion control understands, and not a wall. What does not pass is counted by its reason.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kafila.ring.quota import Buckets, TokenBucket, network_of
from kafila.types import Address, NodeId, Transmit
from kafila.wire import Kind, classify, unwrap_relay, wrap_relay

_MIB = 2**20

MEMBER_BYTES_PER_S = 4.0 * _MIB
"""About 34 Mbit/s: what a good family line uploads, and 25 times what decoding needs (8 KiB a token, 20 tokens/s)."""
MEMBER_BURST_BYTES = 20.0 * _MIB
"""A prefill of 16 MiB, with QUIC's and the envelope's headers and some retransmission, passes at the line's speed."""
SHARED_BYTES_PER_S = 2 * MEMBER_BYTES_PER_S
SHARED_BURST_BYTES = 2 * MEMBER_BURST_BYTES
"""For a whole session, and for all members behind one network address: two edges at once in full. The paper's worst
fleet relays four of five, at decoding's pace."""

SIGNALLING_BYTES_PER_S = 128.0 * 1024
"""Probes are at most 100 a second a peer (DESIGN section 5), of about 80 bytes: fifteen peers punched at once."""
SIGNALLING_BURST_BYTES = 256.0 * 1024
"""Fifteen QUIC handshakes begun at once, with retransmission."""

QUEUE_BYTES = 512 * 1024
"""What one member may have waiting: 125 ms at its rate, the bandwidth-delay product of a long relayed path."""
_TICK_S = 0.005
"""While quotas are short the queues are served this often: a dozen datagrams a time rather than a timer for each."""

_LONG_HEADER = 0xC0
"""QUIC's handshake packets (RFC 9000 section 17.2: header form and fixed bit)."""


@dataclass(slots=True, eq=False)
class _Port:
    """One member's place at the relay."""

    session: str
    node: NodeId
    address: Address
    network: str
    quota: TokenBucket
    signalling: TokenBucket
    waiting: deque[Transmit] = field(default_factory=deque)
    waiting_bytes: int = 0


class Relay:
    """``counters`` is the service's: relayed datagrams and bytes, and drops by reason (names begin ``relay_``)."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._ports: dict[tuple[str, NodeId], _Port] = {}
        self._by_address: dict[Address, _Port] = {}
        self._sessions = Buckets(SHARED_BYTES_PER_S, SHARED_BURST_BYTES)
        self._networks = Buckets(SHARED_BYTES_PER_S, SHARED_BURST_BYTES)
        self._ready: list[Transmit] = []
        self._turns: deque[_Port] = deque()
        self._next_turn: float | None = None

    def admit(self, session: str, node: NodeId, address: Address, now: float) -> None:
        """``node`` is a registered member, and its validated address is ``address``; again when it has moved."""
        port = self._ports.get((session, node))
        if port is None:
            port = _Port(
                session,
                node,
                address,
                network_of(address.host),
                TokenBucket(MEMBER_BYTES_PER_S, MEMBER_BURST_BYTES, now),
                TokenBucket(SIGNALLING_BYTES_PER_S, SIGNALLING_BURST_BYTES, now),
            )
            self._ports[session, node] = port
        elif self._by_address.get(port.address) is port:
            del self._by_address[port.address]
        port.address, port.network = address, network_of(address.host)
        self._by_address[address] = port

    def remove(self, session: str, node: NodeId) -> None:
        """``node`` is no member any more; what it has waiting is dropped."""
        port = self._ports.pop((session, node), None)
        if port is None:
            return
        if self._by_address.get(port.address) is port:
            del self._by_address[port.address]
        if port.waiting:
            self._counters["relay_sender_left"] += len(port.waiting)
            self._turns.remove(port)

    def receive(self, envelope: bytes, source: Address, now: float) -> bool:
        """An envelope (what ``wire.classify`` calls ``RELAY``) came from ``source``; whether that is a member's."""
        sender = self._by_address.get(source)
        if sender is None:
            self._counters["relay_unknown_source"] += 1
            return False
        to, datagram = unwrap_relay(envelope)
        addressee = self._ports.get((sender.session, to))
        if addressee is None or addressee is sender:
            self._counters["relay_unknown_addressee"] += 1
            return True
        transmit = Transmit(wrap_relay(sender.node, datagram), addressee.address)
        if _is_signalling(datagram):
            self._pass_signalling(sender, transmit, now)
        else:
            self._queue(sender, transmit)
        return True

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        """What may leave now: signalling first, then a datagram a member in turn."""
        self._serve(now)
        ready, self._ready = self._ready, []
        return ready

    def next_timer(self) -> float | None:
        """When ``datagrams_to_send`` will have more, without new input."""
        return self._next_turn

    def _pass_signalling(self, sender: _Port, transmit: Transmit, now: float) -> None:
        if sender.signalling.take(len(transmit.data), now):
            self._pass(transmit)
        else:
            self._counters["relay_signalling_over_quota"] += 1

    def _queue(self, sender: _Port, transmit: Transmit) -> None:
        if sender.waiting_bytes + len(transmit.data) > QUEUE_BYTES:
            self._counters["relay_queue_full"] += 1
            return
        if not sender.waiting:
            self._turns.append(sender)
        sender.waiting.append(transmit)
        sender.waiting_bytes += len(transmit.data)

    def _serve(self, now: float) -> None:
        """Give every member with something waiting a datagram's turn, until quotas stop them all."""
        stopped: list[_Port] = []
        next_turn: float | None = None
        while self._turns:
            port = self._turns.popleft()
            ready_at = self._take_quota(port, len(port.waiting[0].data), now)
            if ready_at > now:
                stopped.append(port)
                next_turn = ready_at if next_turn is None else min(next_turn, ready_at)
                continue
            transmit = port.waiting.popleft()
            port.waiting_bytes -= len(transmit.data)
            self._pass(transmit)
            if port.waiting:
                self._turns.append(port)
        self._turns.extend(stopped)
        self._next_turn = None if next_turn is None else max(next_turn, now + _TICK_S)

    def _take_quota(self, port: _Port, cost: int, now: float) -> float:
        """Take ``cost`` from all three quotas and return ``now``, or take nothing and return when to come again."""
        quotas = (port.quota, self._sessions.get(port.session, now), self._networks.get(port.network, now))
        ready_at = max(quota.ready_at(cost, now) for quota in quotas)
        if ready_at <= now:
            for quota in quotas:
                quota.take(cost, now)
        return ready_at

    def _pass(self, transmit: Transmit) -> None:
        self._counters["relayed_datagrams"] += 1
        self._counters["relayed_bytes"] += len(transmit.data)
        self._ready.append(transmit)


def _is_signalling(datagram: bytes) -> bool:
    kind = classify(datagram)
    return kind is Kind.PATH or (kind is Kind.QUIC and datagram[0] & _LONG_HEADER == _LONG_HEADER)
