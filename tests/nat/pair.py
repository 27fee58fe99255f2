"""Two path machines joined by a small network: latency, loss, reordering, black holes, MTU, NATs, a relay.

Everything is a function of the seed. Addresses in [brackets] of the comments are what the peer is told.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

from kafila.nat.candidates import Candidate, CandidateKind, may_probe
from kafila.nat.events import Event
from kafila.nat.paths import PeerPaths
from kafila.types import Address, NodeId, PathKind

LINK_KEY = bytes(range(32))
RELAY = Address("198.51.100.1", 4433)


@dataclass
class Mapping:
    """One outside port of a NAT."""

    inside: Address
    port: int
    used_at: float


@dataclass
class Nat:
    """One home router (RFC 4787): how it maps, how it filters, and how soon it forgets."""

    host: str
    mapping: str = "EIM"  # EIM, ADM, APDM
    filtering: str = "APDF"  # EIF, ADF, APDF
    timeout_s: float = float("inf")
    scope: str = "mapping"  # or "endpoint": what the filter remembers destinations by
    keeps_ports: bool = False  # a forgotten mapping gets its old port again
    mappings: dict[object, Mapping] = field(default_factory=dict)
    sent_to: dict[object, set[Address]] = field(default_factory=dict)
    ports: dict[object, int] = field(default_factory=dict)
    next_port: int = 40000
    random_ports: random.Random | None = None

    def outbound(self, inside: Address, to: Address, now: float) -> Address:
        key: object = {"EIM": inside, "ADM": (inside, to.host), "APDM": (inside, to)}[self.mapping]
        mapping = self.mappings.get(key)
        if mapping is None or now - mapping.used_at > self.timeout_s:
            port = self.ports.get(key) if self.keeps_ports else None
            if port is None:
                port = self.ports[key] = self._new_port()
            mapping = self.mappings[key] = Mapping(inside, port, now)
            self.sent_to.pop(self._filter_key(mapping), None)
        mapping.used_at = now
        self.sent_to.setdefault(self._filter_key(mapping), set()).add(to)
        return Address(self.host, mapping.port)

    def inbound(self, source: Address, port: int, now: float) -> Address | None:
        """Whom a packet to ``port`` reaches, if anybody. It does not refresh the mapping."""
        mapping = next((m for m in self.mappings.values() if m.port == port), None)
        if mapping is None or now - mapping.used_at > self.timeout_s:
            return None
        sent_to = self.sent_to[self._filter_key(mapping)]
        passes = {
            "EIF": True,
            "ADF": any(address.host == source.host for address in sent_to),
            "APDF": source in sent_to,
        }[self.filtering]
        return mapping.inside if passes else None

    def _new_port(self) -> int:
        self.next_port += 1
        return self.next_port - 1 if self.random_ports is None else self.random_ports.randrange(1024, 65536)

    def _filter_key(self, mapping: Mapping) -> object:
        return mapping.port if self.scope == "mapping" else mapping.inside

    def forget(self) -> None:
        """Reboot: every mapping is gone, and new ones get new ports."""
        self.mappings.clear()
        self.sent_to.clear()
        self.ports.clear()


@dataclass
class Side:
    """One member: where its socket is bound, and how it is doing."""

    name: str
    node: NodeId
    address: Address
    nat: Nat | None = None
    extra: tuple[Address, ...] = ()
    from_extra: bool = False
    """Packets to an extra (loopback) address come from one."""
    paths: PeerPaths = field(init=False)
    events: list[Event] = field(default_factory=list)
    socket_of: dict[Address, int] = field(default_factory=dict)  # inside address -> socket number
    probes: list[tuple[float, Address | None, int]] = field(default_factory=list)
    arrivals: list[tuple[int, float, float]] = field(default_factory=list)  # number, sent, arrived
    seen: set[int] = field(default_factory=set)
    sending: bool = False
    data_direct: int = 0
    data_relayed: int = 0

    @property
    def lines(self) -> list[str]:
        return [str(event) for event in self.events]


Filter = Callable[[str, bytes, Address], bool]


class Pair:
    """The network and its two members, ``a`` and ``b``. ``filters`` drop a direct packet when one says so."""

    def __init__(
        self,
        seed: int = 0,
        *,
        latency_s: float = 0.02,
        relay_latency_s: float = 0.06,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        mtu_bytes: int = 1472,
        shared_lan: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.latency_s, self.relay_latency_s, self.jitter_s, self.loss = latency_s, relay_latency_s, jitter_s, loss
        self.mtu_bytes = {"a": mtu_bytes, "b": mtu_bytes}
        self.shared_lan = shared_lan
        self.relay_up = True
        self.blocked: set[str] = set()
        self.filters: list[Filter] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._numbers = count()
        self.a = Side("a", NodeId(b"aaaaaaaa"), Address("192.168.1.2", 4242))
        self.b = Side("b", NodeId(b"bbbbbbbb"), Address("192.168.1.3", 4242))
        self.started: set[str] = set()
        self._standstill = 0

    # -- set-up ---------------------------------------------------------------------------------------------------

    def other(self, side: Side) -> Side:
        return self.b if side is self.a else self.a

    def behind(self, side: Side, mapping: str, filtering: str, **more: Any) -> None:
        self.shared_lan = False
        host = {"a": "203.0.113.1", "b": "203.0.113.2"}[side.name]
        side.address = Address({"a": "10.0.0.2", "b": "10.1.0.2"}[side.name], 4242)
        side.nat = Nat(host, mapping, filtering, **more)

    def advertised(self, side: Side) -> list[Candidate]:
        """[its own address, and the one that the rendezvous sees]."""
        candidates = [Candidate(address, CandidateKind.HOST) for address in (side.address, *side.extra)]
        if side.nat is not None:
            reflexive = side.nat.outbound(side.address, RELAY, self.now)
            candidates.append(Candidate(reflexive, CandidateKind.REFLEXIVE))
        return candidates

    def start(
        self,
        a_delay_s: float = 0.0,
        b_delay_s: float = 0.0,
        *,
        told: Sequence[Candidate] | None = None,
        same_machine: bool = False,
    ) -> None:
        """Make the machines, ``a`` and ``b`` that long from now; ``told`` replaces what each is told of the other."""
        for side, delay_s in ((self.a, a_delay_s), (self.b, b_delay_s)):
            other = self.other(side)

            def begin(side: Side = side, other: Side = other) -> None:
                candidates = self.advertised(other) if told is None else told
                source = random.Random(self.random.getrandbits(64))
                side.paths = PeerPaths(
                    side.node, other.node, LINK_KEY, candidates, self.now, source, same_machine=same_machine
                )
                self.started.add(side.name)
                self.flush(side)

            self.at(delay_s, begin)

    # -- time -----------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), action))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let ``seconds`` pass, or less: whether ``until`` became true."""
        end = self.now + seconds
        while True:
            if until is not None and until():
                return True
            timers = [(t, side) for side in self.sides() if (t := side.paths.next_timer()) is not None]
            timer, side = min(timers, key=lambda item: item[0], default=(end + 1, self.a))
            first = self._heap[0][0] if self._heap else end + 1
            if min(timer, first) > end:
                self.now = end
                return until is not None and until()
            if first <= timer:
                self._move_to(first)
                heapq.heappop(self._heap)[2]()
            else:
                self._move_to(timer)
                self._standstill += 1
                assert self._standstill < 20, "a timer that fires and does not move on"
                side.paths.handle_timer(self.now)
                self.flush(side)

    def _move_to(self, time: float) -> None:
        if time > self.now:
            self.now, self._standstill = time, 0

    def sides(self) -> list[Side]:
        return [side for side in (self.a, self.b) if side.name in self.started]

    # -- traffic --------------------------------------------------------------------------------------------------

    def flush(self, side: Side) -> None:
        for probe in side.paths.probes_to_send(self.now):
            side.probes.append((self.now, probe.to, len(probe.data)))
            self._transmit(side, probe.data, probe.to, probe.socket)
        while (event := side.paths.next_event()) is not None:
            side.events.append(event)
        assert 1 <= len(side.paths.routes(self.now)) <= 2
        assert side.paths.max_datagram_bytes >= 1200

    def stream(self, side: Side, every_s: float = 0.04) -> None:
        """From now on ``side`` sends a full datagram every ``every_s`` seconds, each answered by an acknowledgement."""
        side.sending = True

        def tick() -> None:
            if side.sending:
                if side.name in self.started:
                    number = next(self._numbers)
                    payload = b"\x40D" + number.to_bytes(8, "big") + repr(self.now).encode().ljust(32)
                    self.send_data(side, payload.ljust(side.paths.max_datagram_bytes, b"."))
                self.at(every_s, tick)

        self.at(0.0, tick)

    def send_data(self, side: Side, payload: bytes, *, answerable: bool = True) -> None:
        for route in side.paths.routes(self.now):
            if route is None:
                side.data_relayed += 1
            else:
                side.data_direct += 1
            self._transmit(side, payload, route, 0 if route is None else side.paths.socket_for(route))
        if answerable:
            side.paths.data_sent(self.now)
        self.flush(side)

    def _transmit(self, side: Side, data: bytes, to: Address | None, socket: int = 0) -> None:
        if to is None:
            if self.relay_up:
                self._deliver(side, self.other(side), None, data, self.relay_latency_s)
            return
        assert may_probe(to, same_machine=True), f"forbidden address {to}"
        inside = Address(side.address.host, side.address.port + socket)
        if side.from_extra and to in self.other(side).extra:
            inside = side.extra[0]
        side.socket_of[inside] = socket
        source = inside if side.nat is None else side.nat.outbound(inside, to, self.now)
        if len(data) > self.mtu_bytes[side.name] or side.name in self.blocked:
            return
        if any(drops(side.name, data, to) for drops in self.filters):
            return
        self.at(self._delay_s(self.latency_s), lambda: self._arrive(side, source, to, data))

    def _arrive(self, sender: Side, source: Address, to: Address, data: bytes) -> None:
        """At the far edge of the network: whose address is it, and does its NAT let the packet in?"""
        if self.random.random() < self.loss:
            return
        target = self.other(sender)
        inside: Address | None = to
        if target.nat is not None and to.host == target.nat.host:
            inside = target.nat.inbound(source, to.port, self.now)
        elif to not in (target.address, *target.extra) or not (self.shared_lan or target.nat is None):
            return
        if inside is not None:
            self._receive(target, source, data, target.socket_of.get(inside, 0))

    def _deliver(self, sender: Side, target: Side, source: Address | None, data: bytes, latency_s: float) -> None:
        if self.random.random() >= self.loss:
            self.at(self._delay_s(latency_s), lambda: self._receive(target, source, data))

    def _delay_s(self, latency_s: float) -> float:
        return latency_s + self.random.random() * self.jitter_s

    def _receive(self, target: Side, source: Address | None, data: bytes, socket: int = 0) -> None:
        if target.name not in self.started:
            return
        if data[0] & 0x40:
            self._receive_data(target, source, data)
        else:
            target.paths.receive(data, source, self.now, socket)
            self.flush(target)

    def _receive_data(self, target: Side, source: Address | None, data: bytes) -> None:
        if source is not None and not target.paths.owns(source):
            return
        target.paths.data_received(source, self.now)
        if data[1:2] == b"D":
            number = int.from_bytes(data[2:10], "big")
            if number not in target.seen:
                target.seen.add(number)
                target.arrivals.append((number, float(data[10:42]), self.now))
            self.send_data(target, b"\x40A", answerable=False)
        self.flush(target)

    # -- what is asked of it --------------------------------------------------------------------------------------

    def both_direct(self) -> bool:
        return len(self.started) == 2 and all(side.paths.kind is PathKind.DIRECT for side in self.sides())

    def longest_gap_s(self, side: Side, since: float) -> float:
        """The longest time in which nothing new arrived at ``side``, from ``since`` until now."""
        times = [since, *(arrived for _, _, arrived in side.arrivals if arrived >= since), self.now]
        return max(later - earlier for earlier, later in pairwise(times))


def most_in_a_second(times: Sequence[float]) -> int:
    """The most of ``times`` within any one second."""
    window: deque[float] = deque()
    most = 0
    for time in times:
        window.append(time)
        while window[0] <= time - 1.0:
            window.popleft()
        most = max(most, len(window))
    return most
