"""Meshes and a rendezvous joined by an in-memory network: links come up relayed, go direct, survive what happens."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from kafila.endpoint import DatagramMachine
from kafila.mesh import GONE_AFTER_S, Event, LinkDown, LinkMessage, LinkUp, Mesh, PathNews
from kafila.nat.birthday import BirthdayRole
from kafila.nat.candidates import Candidate, CandidateKind
from kafila.ring.identity import Identity, make_identity
from kafila.ring.rendezvous import RendezvousServer
from kafila.ring.rendezvous_client import RendezvousClient, State
from kafila.types import Address, NodeId, PathKind

RENDEZVOUS = Address("203.0.113.1", 7443)
LINK_KEY = bytes(range(32))


class Wire:
    """Delivers every datagram after ``delay_s``, unless ``blocked`` says no; time moves from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.delay_s = 0.02
        self.blocked: Callable[[Address, Address], bool] = lambda source, to: False
        self._machines: dict[Address, DatagramMachine] = {}
        self._flights: list[tuple[float, int, bytes, Address, Address]] = []
        self._order = itertools.count()

    def attach(self, address: Address, machine: DatagramMachine) -> None:
        self._machines[address] = machine

    def detach(self, address: Address) -> None:
        del self._machines[address]

    def flush(self) -> None:
        for address, machine in list(self._machines.items()):
            for data, to in machine.datagrams_to_send(self.now):
                if not self.blocked(address, to):
                    heapq.heappush(self._flights, (self.now + self.delay_s, next(self._order), data, address, to))

    def run(self, duration_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        end = self.now + duration_s
        while not until():
            self.flush()
            timers = [due for machine in self._machines.values() if (due := machine.next_timer()) is not None]
            arrivals = [self._flights[0][0]] if self._flights else []
            upcoming = max(min([*timers, *arrivals], default=end), self.now)
            if upcoming > end:
                self.now = end
                return until()
            self.now = upcoming
            while self._flights and self._flights[0][0] <= self.now:
                _, _, data, source, to = heapq.heappop(self._flights)
                if to in self._machines:
                    self._machines[to].receive(data, source, self.now)
            for machine in list(self._machines.values()):
                if (due := machine.next_timer()) is not None and due <= self.now:
                    machine.handle_timer(self.now)
        return True


class Member:
    """One mesh and what it told."""

    def __init__(self, wire: Wire, n: int, *, host: bool) -> None:
        self.wire = wire
        self.identity: Identity = make_identity()
        self.address = Address(f"192.168.1.{n + 1}", 4000 + n)
        client = RendezvousClient(self.identity, RENDEZVOUS, random.Random(n))
        self.mesh = Mesh(self.identity, LINK_KEY, client, random.Random(n))
        self.events: list[Event] = []
        wire.attach(self.address, self.mesh)
        if host:
            client.create("ABCDE", 8, b"greeting", wire.now)
        else:
            client.join("ABCDE", wire.now)

    @property
    def node(self) -> NodeId:
        return self.identity.node_id

    def open(self, peer: Member, *, fingerprint: bytes | None = None) -> None:
        candidates = [Candidate(peer.address, CandidateKind.HOST)]
        pinned = fingerprint or peer.identity.fingerprint
        early_key = peer.identity.early.public
        self.mesh.open_link(
            peer.node, pinned, candidates, self.wire.now, same_machine=False, early_key=early_key, epoch=1
        )

    def drain(self) -> list[Event]:
        while (event := self.mesh.next_event()) is not None:
            self.events.append(event)
        return self.events

    def messages(self) -> list[bytes]:
        return [event.data for event in self.drain() if isinstance(event, LinkMessage)]

    def down(self) -> list[LinkDown]:
        return [event for event in self.drain() if isinstance(event, LinkDown)]


class Pair:
    def __init__(self) -> None:
        self.wire = Wire()
        self.server = RendezvousServer(make_identity(), random.Random(99).randbytes)
        self.wire.attach(RENDEZVOUS, self.server)
        self.a = Member(self.wire, 0, host=True)
        self.wire.run(1.0, lambda: self.a.mesh.control.state is State.READY)
        self.b = Member(self.wire, 1, host=False)
        self.wire.run(1.0, lambda: self.b.mesh.control.state is State.READY)

    def relay_only(self) -> None:
        self.wire.blocked = lambda source, to: RENDEZVOUS not in {source, to}

    def link(self) -> None:
        self.a.open(self.b)
        self.b.open(self.a)
        assert self.wire.run(2.0, self.linked)

    def linked(self) -> bool:
        return self.a.mesh.is_linked(self.b.node) and self.b.mesh.is_linked(self.a.node)

    def kinds(self) -> set[PathKind | None]:
        states = [self.a.mesh.link_state(self.b.node), self.b.mesh.link_state(self.a.node)]
        return {None if state is None else state.kind for state in states}


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_link_carries_data_within_one_round_trip_to_the_rendezvous_even_without_a_direct_path(pair: Pair) -> None:
    pair.relay_only()
    began = pair.wire.now
    pair.a.open(pair.b)
    pair.b.open(pair.a)
    pair.a.mesh.send(pair.b.node, b"first", bulk=False)
    pair.b.mesh.send(pair.a.node, b"first", bulk=False)
    assert pair.wire.run(5.0, lambda: bool(pair.a.messages() and pair.b.messages()))
    # A rendezvous round trip is two delays; a message from member to member by relay takes two as well.
    assert pair.wire.now - began <= 2 * pair.wire.delay_s + 1e-9
    assert pair.wire.run(1.0, pair.linked)
    assert pair.kinds() == {PathKind.RELAYED}


def test_a_direct_path_takes_over_and_no_message_is_lost_or_doubled(pair: Pair) -> None:
    pair.link()
    sent = [b"%d" % n + bytes(3000) for n in range(60)]
    for message in sent:
        pair.a.mesh.send(pair.b.node, message, bulk=True)
        pair.wire.run(0.01)
    assert pair.wire.run(5.0, lambda: len(pair.b.messages()) >= len(sent))
    assert pair.b.messages() == sent
    assert pair.kinds() == {PathKind.DIRECT}
    assert any(isinstance(event, PathNews) for event in pair.b.events)


def test_when_the_direct_path_dies_data_flows_over_the_relay_within_a_second(pair: Pair) -> None:
    pair.link()
    pair.wire.run(3.0)
    assert pair.kinds() == {PathKind.DIRECT}
    pair.a.mesh.send(pair.b.node, b"before", bulk=True)
    pair.wire.run(0.5)
    pair.relay_only()
    sent_at = pair.wire.now
    pair.a.mesh.send(pair.b.node, b"after", bulk=True)
    assert pair.wire.run(5.0, lambda: b"after" in pair.b.messages())
    assert pair.wire.now - sent_at <= 1.0 + 4 * pair.wire.delay_s


def test_whoever_is_dialled_before_it_was_told_keeps_the_first_flight(pair: Pair) -> None:
    pair.relay_only()
    first, second = sorted([pair.a, pair.b], key=lambda member: member.node)
    first.open(second)  # the QUIC client speaks
    pair.wire.run(0.2)
    began = pair.wire.now
    second.open(first)
    assert pair.wire.run(1.0, pair.linked)
    assert pair.wire.now - began < 0.2


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_peer_with_another_certificate_gets_no_link_and_no_byte(pair: Pair, who: str) -> None:
    victim, other = (pair.a, pair.b) if who == "a" else (pair.b, pair.a)
    victim.open(other, fingerprint=make_identity().fingerprint)
    other.open(victim)
    victim.mesh.send(other.node, b"secret", bulk=False)
    pair.wire.run(3.0)
    assert not victim.mesh.is_linked(other.node)
    assert other.messages() == []
    assert victim.down()
    assert other.down()


def test_a_member_that_goes_says_so(pair: Pair) -> None:
    pair.link()
    pair.a.mesh.close(pair.wire.now, "left")
    pair.wire.run(0.2)
    (down,) = pair.b.down()
    assert (down.reason, down.by_peer) == ("left", True)


def test_a_member_that_dies_is_missed_within_seconds(pair: Pair) -> None:
    pair.link()
    pair.wire.run(5.0)
    pair.wire.detach(pair.a.address)
    began = pair.wire.now
    assert pair.wire.run(30.0, lambda: bool(pair.b.down()))
    assert pair.wire.now - began <= GONE_AFTER_S + 2.0
    assert "no sign of life" in pair.b.down()[0].reason


def test_a_peer_that_comes_late_to_a_link_is_waited_for(pair: Pair) -> None:
    """It may be slow to hear of the link, or stand still before its first word: whoever waits says for how long."""
    pair.a.open(pair.b)
    pair.wire.run(3 * GONE_AFTER_S)
    assert not pair.a.down()
    pair.b.open(pair.a)
    assert pair.wire.run(3.0, pair.linked)
    pair.wire.run(2.0)
    assert not pair.a.down()
    assert not pair.b.down()


def test_who_was_given_up_for_silence_is_told_so_when_it_is_back(pair: Pair) -> None:
    pair.link()
    pair.wire.detach(pair.a.address)
    assert pair.wire.run(30.0, lambda: bool(pair.b.down()))
    pair.wire.attach(pair.a.address, pair.a.mesh)
    assert pair.wire.run(10.0, lambda: bool(pair.a.down()))
    (down,) = pair.a.down()
    assert down.by_peer
    assert "nothing of it" in down.reason


def test_a_machine_that_stood_still_does_not_take_its_own_pause_for_its_peers(pair: Pair) -> None:
    pair.link()
    pair.wire.run(5.0)
    pair.wire.now += 20.0  # nobody was driven, and nothing was sent
    pair.wire.run(20.0)
    assert pair.linked()
    assert not pair.a.down()
    assert not pair.b.down()


def test_an_idle_link_lives_on(pair: Pair) -> None:
    pair.link()
    pair.wire.run(300.0)
    assert pair.linked()
    assert not pair.a.down()
    assert not pair.b.down()


def test_a_rendezvous_that_restarts_leaves_a_relayed_link_standing(pair: Pair) -> None:
    pair.relay_only()
    pair.link()
    pair.wire.run(2.0)
    pair.wire.detach(RENDEZVOUS)
    pair.wire.run(10.0)
    pair.wire.attach(RENDEZVOUS, RendezvousServer(make_identity(), random.Random(98).randbytes))
    back_at = pair.wire.now
    pair.a.mesh.send(pair.b.node, b"still here", bulk=False)
    assert pair.wire.run(10.0, lambda: b"still here" in pair.b.messages())
    assert pair.wire.now - back_at <= 2.0


@pytest.mark.parametrize("opens_later_s", [0.0, 0.01, 0.5])
def test_the_first_words_take_one_trip_through_the_relay(pair: Pair, opens_later_s: float) -> None:
    pair.relay_only()
    pair.a.open(pair.b)
    pair.a.mesh.send(pair.b.node, b"first", bulk=False)
    pair.a.mesh.send(pair.b.node, bytes(5000), bulk=True)
    pair.wire.run(opens_later_s)
    pair.b.open(pair.a)
    began = max(2 * pair.wire.delay_s, pair.wire.now)
    assert pair.wire.run(1.0, lambda: len(pair.b.messages()) == 2)
    assert pair.wire.now <= max(began, 2 * pair.wire.delay_s) + 2 * pair.wire.delay_s
    assert not pair.b.mesh.is_linked(pair.a.node)
    assert pair.wire.run(2.0, pair.linked)
    pair.a.mesh.send(pair.b.node, b"more", bulk=False)
    assert pair.wire.run(1.0, lambda: pair.b.messages()[-1] == b"more")
    assert pair.b.messages() == [b"first", bytes(5000), b"more"]


def test_a_link_without_the_peers_early_key_waits_for_the_handshake(pair: Pair) -> None:
    pair.relay_only()
    for me, peer in ((pair.a, pair.b), (pair.b, pair.a)):
        me.mesh.open_link(peer.node, peer.identity.fingerprint, [], pair.wire.now, same_machine=False)
        me.mesh.send(peer.node, b"first", bulk=False)
    assert pair.wire.run(2.0, lambda: bool(pair.a.messages() and pair.b.messages()))
    assert pair.linked()


def test_datagrams_from_nobody_are_counted_and_dropped(pair: Pair) -> None:
    stranger = Address("198.51.100.7", 5555)
    for data in (b"", b"\x40" + bytes(40), b"\x81" + bytes(60), b"\x80" + bytes(20), b"\x82" + bytes(60), bytes(40)):
        pair.a.mesh.receive(data, stranger, pair.wire.now)
    assert pair.a.mesh.dropped == 6
    assert not [event for event in pair.a.drain() if isinstance(event, LinkUp | LinkDown | LinkMessage)]


def test_a_peer_that_moved_is_found_where_it_says(pair: Pair) -> None:
    pair.link()
    pair.wire.run(3.0)
    old, new = pair.b.address, Address("192.168.1.77", 4077)
    pair.wire.detach(old)
    pair.wire.attach(new, pair.b.mesh)
    pair.wire.blocked = lambda source, to: RENDEZVOUS not in {source, to} and pair.a.address == to  # b's own are lost
    pair.wire.run(3.0)
    assert pair.a.mesh.link_state(pair.b.node) is not None
    pair.wire.blocked = lambda source, to: False
    pair.a.mesh.peer_moved(pair.b.node, [Candidate(new, CandidateKind.HOST)], pair.wire.now)
    pair.b.mesh.network_changed(pair.wire.now)
    assert pair.wire.run(1.0, lambda: pair.kinds() == {PathKind.DIRECT})
    assert pair.linked()


def test_news_of_peers_without_a_link_change_nothing(pair: Pair) -> None:
    pair.a.mesh.peer_moved(pair.b.node, [Candidate(pair.b.address, CandidateKind.HOST)], pair.wire.now)
    assert pair.a.mesh.link_state(pair.b.node) is None


def test_an_extra_socket_lets_in_its_peer_alone(pair: Pair) -> None:
    stranger = Address("198.51.100.7", 5555)
    garbage = (b"", b"\x40" + bytes(40), b"\x81" + bytes(60), b"\x80" + bytes(20), bytes(40))
    pair.a.mesh.receive_extra(pair.b.node, 1, b"\x40" + bytes(40), stranger, pair.wire.now)  # no link yet
    pair.link()
    for data in garbage:
        pair.a.mesh.receive_extra(pair.b.node, 1, data, stranger, pair.wire.now)
    assert pair.a.mesh.dropped == 1 + len(garbage)
    assert pair.a.mesh.next_extra() is None
    assert pair.a.mesh.extra_socket_of(pair.b.node) == 0
    assert pair.linked()


def test_birthday_probing_leaves_from_the_extra_sockets_until_a_direct_path_is_there(pair: Pair) -> None:
    pair.relay_only()
    target = Address("198.51.100.7", 5555)
    pair.a.mesh.open_link(
        pair.b.node,
        pair.b.identity.fingerprint,
        [Candidate(target, CandidateKind.REFLEXIVE)],
        pair.wire.now,
        same_machine=False,
    )
    assert not pair.b.mesh.begin_birthday(pair.a.node, BirthdayRole.OPEN_SOCKETS, pair.wire.now, 4), "no link"
    assert pair.a.mesh.begin_birthday(pair.b.node, BirthdayRole.OPEN_SOCKETS, pair.wire.now, 4)
    pair.wire.run(1.0)
    extras = []
    while (extra := pair.a.mesh.next_extra()) is not None:
        extras.append(extra)
    assert [extra.number for extra in extras] == [1, 2, 3, 4]
    assert {extra.transmit.to for extra in extras} == {target}
