"""Machines on a wire without sockets or clocks: what the tests of rendezvous, client and relay run on."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Protocol

from kafila.ring import control
from kafila.ring.identity import Identity, make_identity
from kafila.ring.quic import QuicConnection, Stream
from kafila.ring.rendezvous import RendezvousServer
from kafila.ring.rendezvous_client import Event, RendezvousClient
from kafila.types import Address, NodeId, Transmit

SERVER = Address("192.0.2.1", 7443)

Travel = Callable[[bytes, Address, Address], Sequence[bytes]]
"""What becomes of a datagram on its way: ``(data, source, destination)`` to what arrives."""


class Machine(Protocol):
    """The shape of every datagram machine."""

    def receive(self, data: bytes, source: Address, now: float) -> None: ...
    def handle_timer(self, now: float) -> None: ...
    def next_timer(self) -> float | None: ...
    def datagrams_to_send(self, now: float) -> Sequence[Transmit]: ...


def honest(data: bytes, source: Address, destination: Address) -> Sequence[bytes]:
    """A network that does nothing but carry."""
    return (data,)


@dataclass
class World:
    """Virtual time, one latency, and addresses that a NAT may change."""

    latency_s: float = 0.03
    travel: Travel = honest
    now: float = 100.0
    machines: dict[Address, Machine] = field(default_factory=dict)
    public: dict[Address, Address] = field(default_factory=dict)
    """A machine's address as others see it, where it differs."""
    traffic: list[tuple[float, Address, Address, bytes]] = field(default_factory=list)
    """Every datagram sent: when, from where (as seen), where to, what."""
    _flying: list[tuple[float, int, bytes, Address, Address]] = field(default_factory=list)
    _order: count[int] = field(default_factory=count)

    def send(self, data: bytes, source: Address, to: Address) -> None:
        """Put a datagram on the wire, from ``source`` as seen."""
        self.traffic.append((self.now, source, to, data))
        for arriving in self.travel(data, source, to):
            heapq.heappush(self._flying, (self.now + self.latency_s, next(self._order), arriving, source, to))

    def flush(self) -> None:
        """Let every machine say what it has to."""
        for address, machine in list(self.machines.items()):
            for data, to in machine.datagrams_to_send(self.now):
                self.send(data, self.public.get(address, address), to)

    def run(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        self.run_until(lambda: False, seconds)

    def run_until(self, done: Callable[[], bool], seconds: float = 10.0) -> bool:
        """Let time pass until ``done`` or ``seconds`` are over; whether it was done."""
        end = self.now + seconds
        self.flush()
        while not done():
            due = self._next_due()
            if due > end:
                self.now = end
                return False
            self.now = max(self.now, due)
            self._step()
            self.flush()
        return True

    def _next_due(self) -> float:
        timers = [due for machine in self.machines.values() if (due := machine.next_timer()) is not None]
        # A timer in the past that a machine does not clear would stop the clock: a millisecond a step is the driver's.
        soonest = max(min(timers, default=float("inf")), self.now + 0.001)
        return min(soonest, self._flying[0][0]) if self._flying else soonest

    def _step(self) -> None:
        private = {public: address for address, public in self.public.items()}
        while self._flying and self._flying[0][0] <= self.now:
            _, _, data, source, to = heapq.heappop(self._flying)
            inside = private.get(to, to)
            if inside in self.machines and to == self.public.get(inside, inside):
                self.machines[inside].receive(data, source, self.now)
        for machine in list(self.machines.values()):
            due = machine.next_timer()
            if due is not None and due <= self.now:
                machine.handle_timer(self.now)


IDENTITIES = [make_identity() for _ in range(8)]
"""Made once: keys cost time, and no test is about theirs."""


def new_server(seed: int = 0, identity: Identity = IDENTITIES[7]) -> RendezvousServer:
    """A rendezvous whose own randomness is fixed."""
    return RendezvousServer(identity, Random(seed).randbytes)


def node(client: RendezvousClient) -> NodeId:
    """The node id of a test's client."""
    return client._identity.node_id


@dataclass
class Party(World):
    """A rendezvous and its members."""

    server: RendezvousServer = field(default_factory=new_server)
    clients: list[RendezvousClient] = field(default_factory=list)
    events: dict[NodeId, list[Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machines[SERVER] = self.server

    def flush(self) -> None:
        """Machines speak, and members' events are gathered."""
        super().flush()
        for client in self.clients:
            while (event := client.next_event()) is not None:
                self.events[node(client)].append(event)

    def client(self, number: int) -> RendezvousClient:
        """A member that has asked for nothing yet, at an address of its own."""
        client = RendezvousClient(IDENTITIES[number], SERVER, Random(number))
        self.clients.append(client)
        self.events[node(client)] = []
        self.machines[address_of(number)] = client
        return client

    def host(self, locator: str = "AB3DE", seats: int = 4, greeting: bytes = b"sealed greeting") -> RendezvousClient:
        """Member 0, registered as host."""
        client = self.client(0)
        client.create(locator, seats, greeting, self.now)
        self.settle(client)
        return client

    def member(self, number: int, locator: str = "AB3DE") -> RendezvousClient:
        """Another member, registered or refused."""
        client = self.client(number)
        client.join(locator, self.now)
        self.settle(client)
        return client

    def settle(self, client: RendezvousClient) -> None:
        """Until ``client`` has an answer and others have heard of it."""
        assert self.run_until(lambda: bool(self.events[node(client)]), 6.0)
        self.run(2 * self.latency_s)

    def heard(self, client: RendezvousClient) -> list[Event]:
        """What ``client`` was told since last asked."""
        events, self.events[node(client)] = self.events[node(client)], []
        return events

    def restart(self) -> RendezvousServer:
        """The rendezvous dies without a word and another takes its place."""
        self.server = self.machines[SERVER] = new_server()
        return self.server


def address_of(number: int) -> Address:
    """Where :meth:`Party.client` puts a member: each in a network of its own."""
    return Address(f"198.51.{number}.1", 40000 + number)


class Liar:
    """A connection to the rendezvous that says what it likes."""

    def __init__(self, party: Party, number: int) -> None:
        self.party = party
        self.address = address_of(number)
        self.quic = QuicConnection.client(IDENTITIES[number], None, party.now, alpn=control.ALPN)
        self.said: list[control.Message | control.OtherVersion] = []
        party.machines[self.address] = self
        party.run(1)

    def receive(self, data: bytes, source: Address, now: float) -> None:
        if data[0] & 0x40:
            self.quic.receive([data], now)

    def handle_timer(self, now: float) -> None:
        self.quic.handle_timer(now)

    def next_timer(self) -> float | None:
        return self.quic.next_timer()

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        return [Transmit(data, SERVER) for data in self.quic.datagrams_to_send(now)]

    def say(self, data: bytes, stream: Stream = Stream.CONTROL) -> None:
        self.quic.send(stream, data)
        self.party.run(0.5)
