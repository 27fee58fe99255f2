"""A NAT of a hundred lines and the servers beyond it, in virtual time, to run a ProbePlan against without any I/O.

It is written apart from the simulator on purpose: two independent NATs must agree with the classifier.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from kafila.nat.observations import Observations
from kafila.nat.probe import SOCKETS, ProbePlan
from kafila.nat.report import Allocator, Filtering, FilterScope, Mapping
from kafila.nat.stun_server import Local, StunServer
from kafila.types import Address

INSIDE, OUTSIDE = "192.168.1.10", "198.51.100.1"
ONE_WAY_S = 0.03
LOCAL_PORTS = (50001, 51007, 52011, 53003, 54009)


@dataclass
class FakeNat:
    """Maps, filters and hairpins as told."""

    mapping: Mapping = Mapping.EIM
    filtering: Filtering = Filtering.APDF
    scope: FilterScope = FilterScope.MAPPING
    allocator: Allocator = Allocator.PRESERVING
    step: int = 1
    hairpin: bool = False
    random: Random = field(default_factory=lambda: Random(1))
    external: dict[object, int] = field(default_factory=dict)
    internal: dict[int, int] = field(default_factory=dict)
    sent: set[tuple[int, int, Address]] = field(default_factory=set)
    """(local port, external port, remote)."""
    _last: int = 30000

    def outbound(self, port: int, to: Address) -> Address:
        key = (port, {Mapping.EIM: None, Mapping.ADM: to.host, Mapping.APDM: to}[self.mapping])
        if key not in self.external:
            self.external[key] = self._allocate(port)
            self.internal[self.external[key]] = port
        self.sent.add((port, self.external[key], to))
        return Address(OUTSIDE, self.external[key])

    def inbound(self, source: Address, external: int) -> int | None:
        port = self.internal.get(external)
        if port is None:
            return None
        per_endpoint = self.scope is FilterScope.ENDPOINT
        contacted = {to for local, out, to in self.sent if (local == port if per_endpoint else out == external)}
        if self.filtering is Filtering.EIF:
            return port
        if self.filtering is Filtering.ADF:
            return port if source.host in {to.host for to in contacted} else None
        return port if source in contacted else None

    def _allocate(self, port: int) -> int:
        if self.allocator is Allocator.PRESERVING and port not in self.internal:
            return port
        if self.allocator is Allocator.SEQUENTIAL:
            self._last += self.step
            return self._last
        return next(candidate for candidate in self._random_ports() if candidate not in self.internal)

    def _random_ports(self) -> Iterator[int]:
        while True:
            yield self.random.randrange(1024, 65536)


@dataclass
class FakeWorld:
    """One member with five sockets, perhaps behind a NAT, and STUN servers by host. Loss is drawn from ``random``."""

    nat: FakeNat | None
    servers: list[StunServer]
    loss: float = 0.0
    random: Random = field(default_factory=lambda: Random(1))
    open_firewall: bool = True
    """For a member without NAT: whether anybody may come in."""
    packets: int = 0
    sent: list[tuple[float, int, Address]] = field(default_factory=list)
    """(when, from which socket, where to)."""
    took_s: float = 0.0
    _queue: list[tuple[float, int, bytes, Address, Address]] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=count)
    _contacted: set[tuple[int, Address]] = field(default_factory=set)

    def run(self, asked: list[Address]) -> Observations:
        """A whole classification by ``asked``; returns what it saw."""
        plan = ProbePlan(asked, LOCAL_PORTS, [INSIDE], 0.0, self.random.randbytes)
        now = 0.0
        while not plan.finished:
            for socket, data, to in plan.datagrams_to_send(now):
                self.sent.append((now, socket, to))
                self._send_out(LOCAL_PORTS[socket], data, to, now)
            timer = plan.next_timer()
            assert timer is not None
            assert timer > now
            if self._queue and self._queue[0][0] <= timer:
                now, _, data, source, to = heapq.heappop(self._queue)
                self._arrive(plan, data, source, to, now)
            else:
                now = timer
                plan.handle_timer(now)
        self.took_s = now
        assert plan.next_timer() is None
        assert len(LOCAL_PORTS) == SOCKETS
        return plan.observations()

    def _send_out(self, port: int, data: bytes, to: Address, now: float) -> None:
        self.packets += 1
        self._contacted.add((port, to))
        source = self.nat.outbound(port, to) if self.nat else Address(INSIDE, port)
        if to.host == OUTSIDE:
            if self.nat and self.nat.hairpin:
                self._travel(data, source, to, now + 0.001)
        else:
            self._travel(data, source, to, now + ONE_WAY_S)

    def _travel(self, data: bytes, source: Address, to: Address, at: float) -> None:
        if self.random.random() >= self.loss:
            heapq.heappush(self._queue, (at, next(self._serial), data, source, to))

    def _arrive(self, plan: ProbePlan, data: bytes, source: Address, to: Address, now: float) -> None:
        if to.host in (OUTSIDE, INSIDE):
            port = self.nat.inbound(source, to.port) if self.nat else self._firewall(source, to.port)
            if port is not None:
                plan.receive(LOCAL_PORTS.index(port), data, source, now)
            return
        for server in self.servers:
            if to.host in server.hosts and to.port in server.ports:
                local = Local(server.hosts.index(to.host), server.ports.index(to.port))
                reply = server.respond(data, source, local, now)
                if reply is not None:
                    origin = Address(server.hosts[reply.local.host], server.ports[reply.local.port])
                    self._travel(reply.data, origin, source, now + ONE_WAY_S)

    def _firewall(self, source: Address, port: int) -> int | None:
        return port if self.open_firewall or (port, source) in self._contacted else None
