"""Which probe to send, from which socket, to which server: a machine that needs about a second at the very worst.

RFC 5780's tests, arranged so that they do not disturb one another and overlap in time. Five fresh sockets:

    socket 0        mapping: asks every address of every server; then filter scope, for it has sent to them all
    socket 1        filtering: asks one server at one address and nobody else, then wants replies from elsewhere
    sockets 0 to 4  allocator: each asks the first server in turn, so their external ports come in the NAT's own order
    sockets 2, 3    hairpin: each sends to the other's reflexive address

Which probes should exist follows from what is known so far (:meth:`ProbePlan._advance`), each at most once:

    known                                                   probes then wanted
    nothing                                                 all sockets -> first server, socket 0 -> other servers
    a server with a second host (else a second port)        socket 0 -> its other addresses; socket 1 -> it
    its cookie for socket 1                                 socket 1: reply from other host and port; from other port
    socket 0's mappings towards it and its opposite differ  socket 0: reply from the opposite
    reflexive addresses of sockets 2 and 3, not our own     2 -> 3 and 3 -> 2

A probe is WAITING until it is ANSWERED, REFUSED (the server cannot do what was asked) or SILENT (its time is up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from typing import NamedTuple

from kafila.nat.observations import Mapped, Observations, ScopeTest
from kafila.nat.stun import (
    STALE_NONCE,
    TRANSACTION_ID_BYTES,
    Change,
    MessageClass,
    StunMessage,
    binding_request,
    decode,
)
from kafila.types import Address

SOCKETS = 5
"""Five ports in a row tell a sequential allocator from a random one even with one lost and one out of line."""
MAX_SERVERS = 4
"""The rendezvous and three others: more would add packets, not knowledge."""
_FIRST_SENDS_S = (0.0, 0.2, 0.6)
"""Before a round trip has been measured. RFC 8489 section 6.2.1 doubles from 500 ms; we begin at 200, about the longest
round trip between two continents, because a probe given up too early costs only accuracy."""
_FIRST_PATIENCE_S = 1.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.05, 0.25
_MAX_STALE_NONCES = 2
_HARD_LIMIT_S = 3.0
"""No classification takes longer, whatever the servers do."""


class Kind(Enum):
    """What a probe asks."""

    PLAIN = "plain"
    OTHER_HOST = "reply from the other host and port"
    OTHER_PORT = "reply from the other port"
    SCOPE = "reply from the opposite socket"
    HAIRPIN = "hairpin"


class State(Enum):
    """Where a probe stands; all but WAITING are final."""

    WAITING = "waiting"
    ANSWERED = "answered"
    REFUSED = "refused"
    SILENT = "silent"


class ProbeTransmit(NamedTuple):
    """One datagram the plan wants sent from socket ``socket``."""

    socket: int
    data: bytes
    to: Address


class _Key(NamedTuple):
    kind: Kind
    socket: int
    to: Address


@dataclass(slots=True)
class _Probe:
    key: _Key
    transaction_id: bytes
    data: bytes
    first_sent: float
    sends: list[float]
    """When it is still to be sent."""
    expires: float
    change: Change | None = None
    replier: Address | None = None
    """The only address a reply may come from."""
    state: State = State.WAITING
    reply: StunMessage | None = None
    stale_nonces: int = 0


class ProbePlan:
    """One classification over one address family. The caller owns :data:`SOCKETS` fresh sockets and sends from them."""

    def __init__(
        self,
        servers: Sequence[Address],
        local_ports: Sequence[int],
        interfaces: Sequence[str],
        now: float,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        """``servers``: one family, the rendezvous first; ``local_ports``: of each socket; ``interfaces``: own hosts."""
        self._servers = tuple(dict.fromkeys(servers))[:MAX_SERVERS]
        self._local_ports = tuple(local_ports)
        self._interfaces = frozenset(interfaces)
        self._random_bytes = random_bytes
        self._deadline = now + _HARD_LIMIT_S
        self._rtt_s: float | None = None
        self._probes: dict[_Key, _Probe] = {}
        self._nonces: dict[tuple[int, Address], bytes] = {}
        self._subject: tuple[Address, Address] | None = None
        self._advance(now)

    # -- the machine ---------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether nothing is left to send or to wait for."""
        return all(probe.state is not State.WAITING for probe in self._probes.values())

    @property
    def rtt_s(self) -> float | None:
        """The shortest round trip to a server so far, in seconds."""
        return self._rtt_s

    def receive(self, socket: int, data: bytes, source: Address, now: float) -> None:
        """A datagram that came in at ``socket``. What is no answer to a probe is ignored."""
        message = decode(data)
        if message is None:
            return
        for probe in self._probes.values():
            if probe.transaction_id == message.transaction_id and probe.state is State.WAITING:
                self._answer(probe, socket, message, source, now)
                self._advance(now)
                return

    def handle_timer(self, now: float) -> None:
        """Give up on what has waited long enough."""
        for probe in self._probes.values():
            if probe.state is State.WAITING and (now >= probe.expires or now >= self._deadline):
                probe.state = State.SILENT
        self._advance(now)

    def next_timer(self) -> float | None:
        """When to call :meth:`handle_timer` and :meth:`datagrams_to_send` again; ``None`` once finished."""
        waiting = [probe for probe in self._probes.values() if probe.state is State.WAITING]
        return min((time for probe in waiting for time in (*probe.sends[:1], probe.expires)), default=None)

    def datagrams_to_send(self, now: float) -> list[ProbeTransmit]:
        """What is due, in the order in which it must leave."""
        due: list[ProbeTransmit] = []
        for probe in self._probes.values():
            if probe.state is State.WAITING and probe.sends and probe.sends[0] <= now:
                probe.sends = [time for time in probe.sends if time > now]
                due.append(ProbeTransmit(probe.key.socket, probe.data, probe.key.to))
        return due

    def observations(self) -> Observations:
        """What has been seen. Complete once :attr:`finished`, and of use before."""
        return Observations(
            local_ports=self._local_ports,
            interfaces=self._interfaces,
            mapped=tuple(self._mapped()),
            other_host_got_in=self._got_in(Kind.OTHER_HOST),
            other_port_got_in=self._got_in(Kind.OTHER_PORT),
            scope=self._scope_test(),
            hairpinned=self._hairpinned(),
        )

    # -- which probes there should be ----------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Want every probe that what is known by now calls for."""
        if now >= self._deadline or not self._servers:
            return
        for socket in range(SOCKETS):
            self._want(Kind.PLAIN, socket, self._servers[0], now)
        for server in self._servers[1:]:
            self._want(Kind.PLAIN, 0, server, now)
        self._subject = self._subject or self._choose_subject()
        if self._subject is not None:
            self._advance_subject(*self._subject, now)
        self._advance_hairpin(now)

    def _advance_subject(self, subject: Address, opposite: Address, now: float) -> None:
        for other in _other_addresses(subject, opposite):
            self._want(Kind.PLAIN, 0, other, now)
        self._want(Kind.PLAIN, 1, subject, now)
        two_hosts = opposite.host != subject.host
        if self._reflexive(1, subject):
            if two_hosts:
                self._want_change(Kind.OTHER_HOST, 1, subject, opposite, now)
            self._want_change(Kind.OTHER_PORT, 1, subject, subject._replace(port=opposite.port), now)
        here, there = self._reflexive(0, subject), self._reflexive(0, opposite)
        if here and there and here != there:
            self._want_change(Kind.SCOPE, 0, subject, opposite, now)

    def _advance_hairpin(self, now: float) -> None:
        if not self._servers:
            return
        second, third = self._reflexive(2, self._servers[0]), self._reflexive(3, self._servers[0])
        if second and third and second.host not in self._interfaces:
            self._want(Kind.HAIRPIN, 2, third, now)
            self._want(Kind.HAIRPIN, 3, second, now)

    def _choose_subject(self) -> tuple[Address, Address] | None:
        """The server to test filtering with, and its opposite: one with two hosts; failing all, one with two ports.

        Socket 1 must not have sent to the other host, and it has sent to the first server.
        """
        first = self._servers[0]
        first_round = [self._probes[_Key(Kind.PLAIN, 0, server)] for server in self._servers]
        pairs = [(probe.key.to, opposite) for probe in first_round if (opposite := _opposite(probe)) is not None]
        pairs = [(subject, other) for subject, other in pairs if subject == first or other.host != first.host]
        two_hosts = [pair for pair in pairs if pair[0].host != pair[1].host]
        if two_hosts:
            return two_hosts[0]
        if any(probe.state is State.WAITING for probe in first_round):
            return None
        return pairs[0] if pairs else None

    def _want_change(self, kind: Kind, socket: int, to: Address, replier: Address, now: float) -> None:
        change = Change(address=replier.host != to.host, port=replier.port != to.port)
        self._want(kind, socket, to, now, change=change, replier=replier)

    def _want(
        self,
        kind: Kind,
        socket: int,
        to: Address,
        now: float,
        *,
        change: Change | None = None,
        replier: Address | None = None,
    ) -> None:
        key = _Key(kind, socket, to)
        if key in self._probes:
            return
        transaction_id = self._random_bytes(TRANSACTION_ID_BYTES)
        nonce = self._nonces.get((socket, to), b"") if change else b""
        sends, expires = self._schedule(now)
        self._probes[key] = _Probe(
            key,
            transaction_id,
            binding_request(transaction_id, change=change, nonce=nonce),
            now,
            sends,
            expires,
            change,
            replier if replier is not None else to,
        )

    def _schedule(self, now: float) -> tuple[list[float], float]:
        """When to send a new probe, and when to take silence for an answer."""
        if self._rtt_s is None:
            return [now + after for after in _FIRST_SENDS_S], now + _FIRST_PATIENCE_S
        interval = min(max(1.25 * self._rtt_s, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
        sends = [now, now + interval, now + 3 * interval]
        return sends, sends[-1] + max(2 * self._rtt_s, _MIN_INTERVAL_S)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer(self, probe: _Probe, socket: int, message: StunMessage, source: Address, now: float) -> None:
        if probe.key.kind is Kind.HAIRPIN:
            if socket != probe.key.socket and message.kind is MessageClass.REQUEST:
                probe.state = State.ANSWERED
            return
        if socket != probe.key.socket or message.kind not in (MessageClass.SUCCESS, MessageClass.ERROR):
            return
        from_asked = source == probe.key.to
        code = message.error.code if message.error is not None else None
        if from_asked and code == STALE_NONCE.code and probe.stale_nonces < _MAX_STALE_NONCES:
            self._retry(probe, message.nonce, now)
        elif from_asked and (message.kind is MessageClass.ERROR or probe.replier != source):
            probe.state = State.REFUSED  # it says it cannot, or ignores CHANGE-REQUEST as many public servers do
        elif source == probe.replier and message.reflexive is not None:
            self._accept(probe, message, now)

    def _accept(self, probe: _Probe, message: StunMessage, now: float) -> None:
        probe.state, probe.reply = State.ANSWERED, message
        self._rtt_s = min(now - probe.first_sent, self._rtt_s or _HARD_LIMIT_S)
        if message.nonce:
            self._nonces[probe.key.socket, probe.key.to] = message.nonce

    def _retry(self, probe: _Probe, nonce: bytes, now: float) -> None:
        """Ask again with the cookie the server wants; a new transaction, as RFC 8489 section 9.2.5 has it."""
        self._nonces[probe.key.socket, probe.key.to] = nonce
        probe.stale_nonces += 1
        probe.transaction_id = self._random_bytes(TRANSACTION_ID_BYTES)
        probe.data = binding_request(probe.transaction_id, change=probe.change, nonce=nonce)
        probe.first_sent = now
        probe.sends, probe.expires = self._schedule(now)

    # -- what they amount to -------------------------------------------------------------------------------------------

    def _reflexive(self, socket: int, server: Address) -> Address | None:
        probe = self._probes.get(_Key(Kind.PLAIN, socket, server))
        return probe.reply.reflexive if probe is not None and probe.reply is not None else None

    def _mapped(self) -> list[Mapped]:
        plain = [key for key in self._probes if key.kind is Kind.PLAIN]
        seen = [(key, self._reflexive(key.socket, key.to)) for key in plain]
        return [Mapped(key.socket, key.to, reflexive) for key, reflexive in seen if reflexive is not None]

    def _got_in(self, kind: Kind) -> bool | None:
        states = [probe.state for key, probe in self._probes.items() if key.kind is kind]
        return {State.ANSWERED: True, State.SILENT: False}.get(states[0]) if states else None

    def _scope_test(self) -> ScopeTest | None:
        arrived = self._got_in(Kind.SCOPE)
        if arrived is None or self._subject is None:
            return None
        return ScopeTest(*self._subject, arrived)

    def _hairpinned(self) -> bool | None:
        states = [probe.state for key, probe in self._probes.items() if key.kind is Kind.HAIRPIN]
        if not states:
            return None
        return State.ANSWERED in states


def _opposite(probe: _Probe) -> Address | None:
    """The server's address that differs the most from the one asked, where it has another that may be probed.

    A server names it in OTHER-ADDRESS. The unspecified host is our own server's word for "the host you asked". What the
    server says is not trusted further than a few small packets: no multicast, no loopback from afar, no service port.
    """
    asked = probe.key.to
    named = probe.reply.other_address if probe.reply is not None else None
    if named is None:
        return None
    host, asked_host = ip_address(named.host), ip_address(asked.host)
    foreign = host.version != asked_host.version or (host.is_loopback and not asked_host.is_loopback)
    if named.port == asked.port or named.port < 1024 <= asked.port:
        return None  # every test needs a second port
    if host.is_unspecified:
        return named._replace(host=asked.host)
    return None if foreign or host.is_multicast else named


def _other_addresses(subject: Address, opposite: Address) -> list[Address]:
    """The server's addresses besides ``subject``: two hosts times two ports, or one host's other port."""
    same_host = subject._replace(port=opposite.port)
    if opposite.host == subject.host:
        return [same_host]
    return [same_host, opposite._replace(port=subject.port), opposite]
