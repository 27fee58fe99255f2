"""What strangers and misbehaving members get of the rendezvous: little."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring import control, notice, rendezvous
from kafila.ring.control import Reason, Refused, Signal
from kafila.ring.quic import Stream
from kafila.ring.rendezvous import RendezvousServer
from kafila.ring.rendezvous_client import Lost, RendezvousClient, State, Unreachable
from kafila.types import Address, NodeId
from tests.ring.world import IDENTITIES, SERVER, Liar, Party, World, address_of, new_server, node

# Strangers.

first_bytes = st.sampled_from([0x00, 0x40, 0x45, 0x80, 0x81, 0xBF, 0xC0, 0xC3, 0xD0, 0xE0, 0xF0, 0xFF])
noise = st.builds(lambda first, rest: bytes((first,)) + rest, first_bytes, st.binary(max_size=1500))


def test_packets_copied_to_another_address_move_nobody() -> None:
    """Somebody on the path sends a member's packets from his own address, ahead of the member's."""
    thief = Address("203.0.113.66", 6666)
    party = Party()
    host, anna = party.host(), party.member(1)
    stolen: Counter[Address] = Counter()

    def copying(data: bytes, source: Address, destination: Address) -> tuple[bytes, ...]:
        if source == address_of(1):
            party._flying.append((party.now + 0.01, -1, data, thief, SERVER))
            party._flying.sort()
            stolen[thief] += len(data)
        return (data,)

    party.travel = copying
    for client in (host, anna):
        party.heard(client)
    for _ in range(20):
        anna.signal(node(host), b"ping")
        party.run(1)
    assert len(party.heard(host)) == 20
    host.signal(node(anna), b"pong")
    party.run(1)
    assert party.heard(anna) == [Signal(node(host), b"pong")]
    sent_to_thief = sum(len(data) for _, _, to, data in party.traffic if to == thief)
    assert 0 < sent_to_thief <= stolen[thief]  # asked to confirm, and no more


def test_an_old_packet_from_elsewhere_asks_nothing() -> None:
    party = Party()
    party.host()
    old = [data for _, source, _, data in party.traffic if source == address_of(0)]
    sent = len(party.traffic)
    for data in old:
        party.machines[SERVER].receive(data, Address("203.0.113.66", 6666), party.now)
    party.flush()
    answered = [data for _, _, to, data in party.traffic[sent:] if to.host == "203.0.113.66"]
    assert all(data[0] & 0xF0 == 0xF0 for data in answered)  # nothing but Retry to the very first


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x01",
        b"\x01\x63",
        control.encode(control.Ping()) + b"x",
        control.encode(control.Send(None, b"from a stranger")),
        control.encode(control.Evict(NodeId(bytes(8)))),
        control.encode(control.Pong(Address("192.0.2.9", 1))),
        control.encode(control.Signal(NodeId(bytes(8)), b"not yours to say")),
    ],
)
def test_a_member_that_breaks_the_rules_is_cut_off_with_words(said: bytes) -> None:
    party = Party()
    host = party.host()
    liar = Liar(party, 1)
    liar.say(said)
    assert liar.quic.closed
    assert party.server.counters["protocol_errors"] == 1
    assert party.server.connections == 1
    assert host.state is State.READY


def test_bulk_and_oversized_messages_are_refused() -> None:
    party = Party()
    liar = Liar(party, 1)
    liar.say(control.encode(control.Ping()), Stream.BULK)
    assert liar.quic.closed
    liar = Liar(party, 2)
    liar.say(bytes(control.MAX_CONTROL_BYTES + 1))
    assert liar.quic.closed
    assert party.server.connections == 0


def test_one_connection_registers_once() -> None:
    party = Party()
    liar = Liar(party, 1)
    liar.say(control.encode(control.Create("AB3DE", 2, b"")))
    assert party.server.sessions == 1
    liar.say(control.encode(control.Create("AB3DF", 2, b"")))
    assert liar.quic.closed
    assert party.server.sessions == 0


def test_another_version_is_told_so() -> None:
    party = Party()
    liar = Liar(party, 1)
    liar.say(b"\x07\x01 whatever version 7 may say")
    answers = []
    while (event := liar.quic.next_event()) is not None:
        answers.append(event)
    assert any(getattr(event, "data", None) == control.encode(Refused(Reason.VERSION)) for event in answers)


def test_somebody_who_never_asks_is_hung_up_on() -> None:
    party = Party()
    liar = Liar(party, 1)
    party.run(rendezvous.LINGER_S + 1)
    assert liar.quic.closed
    assert party.server.connections == 0


def test_talking_too_much_ends_the_talker_and_nobody_else() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    party.heard(anna)
    for _ in range(60):
        anna.signal(None, bytes(60_000))
        party.run(0.05)
    assert any(isinstance(event, Lost) and "too much" in event.reason for event in party.heard(anna))
    assert host.state is State.READY
    assert Lost not in [type(event) for event in party.heard(host)]


def test_a_member_that_does_not_read_costs_a_bounded_queue() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    del party.machines[address_of(1)]
    party.clients.remove(anna)
    for _ in range(12):
        host.signal(node(anna), bytes(60_000))
        party.run(0.1)
    held = max(connection.quic.buffered_bytes for connection in party.server._connections.values())
    assert held <= rendezvous.MAX_UNSENT_BYTES + control.MAX_CONTROL_BYTES
    assert party.server.counters["member_reads_slowly"] > 0
    assert host.state is State.READY


def test_guessing_locators_is_slow() -> None:
    party = Party()
    party.host()
    answers = Counter[Reason]()
    for guess in range(14):
        liar = Liar(party, 1)
        liar.say(control.encode(control.Join(f"ZZZ{guess:02}")))
        events = [control.decode(event.data) for event in iter(liar.quic.next_event, None) if hasattr(event, "data")]
        answers.update(event.reason for event in events if isinstance(event, Refused))
    assert answers[Reason.UNKNOWN_SESSION] < 14
    assert answers[Reason.BUSY] > 0


def test_connections_are_limited_in_number_and_by_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_CONNECTIONS", 2)
    party = Party()
    party.host()
    party.member(1)
    late = party.member(2)
    assert isinstance(party.heard(late)[0], Unreachable)
    assert party.server.counters["connections_full"] > 0


@given(st.lists(st.tuples(noise, st.integers(0, 3)), max_size=30), st.integers(0, 2**32))
def test_strangers_never_get_more_bytes_than_they_sent(datagrams: list[tuple[bytes, int]], seed: int) -> None:
    random = Random(seed)

    def echoing_stun(data: bytes, source: Address, now: float) -> bytes:
        return bytes(random.randrange(0, 200))

    server = RendezvousServer(IDENTITIES[7], random.randbytes, echoing_stun)
    taken: Counter[Address] = Counter()
    given_: Counter[Address] = Counter()
    now = 0.0
    for data, who in datagrams:
        source = Address(f"203.0.113.{who}", 1000 + who)
        stun = b"\0\1\0\0\x21\x12\xa4\x42" + bytes(12 + random.randrange(40)) if random.random() < 0.2 else data
        server.receive(stun, source, now)
        taken[source] += len(stun)
        for transmit in server.datagrams_to_send(now):
            given_[transmit.to] += len(transmit.data)
        now += random.random() / 10
        if (due := server.next_timer()) is not None and due <= now:
            server.handle_timer(now)
    assert all(given_[source] <= taken[source] for source in given_)
    assert server.connections == 0
    assert server.next_timer() is None


@given(st.binary(max_size=1500), st.integers(0, 3))
def test_mangled_first_packets_get_no_more_than_they_sent(tail: bytes, cut: int) -> None:
    world = World()
    client = RendezvousClient(IDENTITIES[0], SERVER, Random(0))
    client.create("AB3DE", 2, b"", world.now)
    (initial,) = client.datagrams_to_send(world.now)
    mangled = initial.data[: len(initial.data) - cut * 100] + tail
    server = new_server()
    server.receive(mangled, address_of(0), world.now)
    assert sum(len(transmit.data) for transmit in server.datagrams_to_send(world.now)) <= len(mangled)
    assert server.connections == 0


def test_a_spoofed_first_packet_with_a_stolen_token_makes_nothing() -> None:
    party = Party()
    party.host()
    initials = [data for _, source, _, data in party.traffic if source == address_of(0) and len(data) >= 1200]
    server = party.restart()
    server._gate = party.server._gate
    for data in initials:
        server.receive(data, Address("203.0.113.66", 6666), party.now)
    assert server.connections == 0


def test_a_full_queue_of_answers_is_counted() -> None:
    server = new_server()
    for port in range(rendezvous.MAX_STATELESS + 5):
        server.receive(b"\x80" + os.urandom(30), Address("203.0.113.1", port + 1), 0.0)
    assert server.counters["reply_queue_full"] == 5
    assert len(server.datagrams_to_send(0.0)) == rendezvous.MAX_STATELESS


@given(st.binary(min_size=10, max_size=60))
def test_notices_are_notices_or_somebodys_datagrams(body: bytes) -> None:
    envelope = b"\x80" + body
    decoded = notice.decode_notice(envelope)
    assert decoded is None or notice.encode_notice(decoded) == envelope


def test_a_wrong_nonce_moves_nobody() -> None:
    party = Party()
    liar = Liar(party, 1)
    liar.say(control.encode(control.Create("AB3DE", 2, b"")))
    elsewhere = party.public[liar.address] = Address("203.0.113.77", 50001)
    liar.say(control.encode(control.Ping()))  # the rendezvous asks the new address to confirm
    liar.say(control.encode(control.Confirm(bytes(16))))
    (connection,) = party.server._connections.values()
    assert (connection.address, connection.challenge and connection.challenge[1]) == (liar.address, elsewhere)
    assert party.server.counters["challenge_failed"] == 1


def test_who_was_put_out_is_not_listened_to_and_hung_up_on() -> None:
    party = Party()
    host = party.host()
    liar = Liar(party, 1)
    liar.say(control.encode(control.Join("AB3DE")))
    host.evict(IDENTITIES[1].node_id)
    party.run(1)
    liar.say(control.encode(control.Create("ZZZZZ", 2, b"")))
    assert party.server.sessions == 1
    assert party.server.connections == 2
    party.run(rendezvous.LINGER_S)
    assert liar.quic.closed
    assert party.server.connections == 1


def test_handshakes_of_one_network_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_BURST", 3.0)
    monkeypatch.setattr(rendezvous, "HANDSHAKES_PER_S", 0.01)
    party = Party()
    liars = [Liar(party, 1) for _ in range(5)]
    assert [liar.quic.established for liar in liars] == [True, True, True, False, False]
    assert party.server.counters["handshakes_over_quota"] > 0
    assert party.member(2).state is State.OVER  # refused: no such session; but let in


def test_every_address_is_asked_with_a_nonce_of_its_own() -> None:
    party = Party()
    liar = Liar(party, 1)
    nonces = set()
    for last in (1, 2):
        party.public[liar.address] = Address(f"203.0.113.{last}", 50001)
        sent = len(party.traffic)
        liar.say(control.encode(control.Ping()))
        asked = [data for _, source, to, data in party.traffic[sent:] if source == SERVER and to != liar.address]
        notices = {notice.decode_notice(data) for data in asked if data[0] == 0x80}
        nonces |= {each.nonce for each in notices if isinstance(each, notice.Challenge)}
    assert len(nonces) == 2


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.booleans())
def test_nothing_that_is_said_upsets_the_service(said: list[bytes], well_formed: bool) -> None:
    party = Party()
    host = party.host()
    liar = Liar(party, 1)
    for each in said:
        kind = sorted(control._LAYOUT)[len(each) % len(control._LAYOUT)]
        liar.say(bytes((control.VERSION, kind)) + each if well_formed else each)
    host.signal(None, b"still here")
    party.run(0.5)
    assert host.state is State.READY
