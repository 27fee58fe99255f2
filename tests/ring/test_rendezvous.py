"""The rendezvous and its clients: sessions, signals, losses, moves, and what strangers get."""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError, RendezvousUnreachable, SessionFull, UnknownSession
from kafila.ring import control, notice, rendezvous, rendezvous_client
from kafila.ring.control import Departure, MemberJoined, MemberLeft, Reason, Refused, Signal
from kafila.ring.quic import QuicConnection, Stream
from kafila.ring.refusals import as_error
from kafila.ring.rendezvous import RendezvousServer
from kafila.ring.rendezvous_client import Joined, Lost, Moved, Relayed, RendezvousClient, State, Unreachable
from kafila.types import Address, NodeId, Transmit
from tests.ring.world import IDENTITIES, SERVER, Party, World, address_of, new_server, node


def test_a_host_and_members_find_each_other() -> None:
    party = Party()
    host, anna, bert = party.host(), party.member(1), party.member(2)
    (created, *joins) = party.heard(host)
    assert created == Joined(node(host), 4, b"sealed greeting", (), address_of(0), resumed=False)
    assert joins == [MemberJoined(node(anna)), MemberJoined(node(bert))]
    (joined, *others) = party.heard(anna)
    assert joined == Joined(node(host), 4, b"sealed greeting", (node(host),), address_of(1), resumed=False)
    assert others == [MemberJoined(node(bert))]
    assert party.server.sessions == 1


def test_registration_takes_three_round_trips() -> None:
    party = Party(latency_s=0.05)
    client = party.client(0)
    began = party.now
    client.create("AB3DE", 2, b"", began)
    assert party.run_until(lambda: client.state is State.READY)
    assert party.now - began == pytest.approx(6 * 0.05, abs=0.02)  # Retry, handshake, request
    assert client.rtt_s == pytest.approx(0.1, abs=0.03)


def test_signals_reach_whom_they_are_for_and_nobody_else() -> None:
    party = Party()
    host, anna, bert = party.host(), party.member(1), party.member(2)
    for client in (host, anna, bert):
        party.heard(client)
    anna.signal(node(bert), b"to bert")
    anna.signal(None, b"to all")
    anna.signal(NodeId(bytes(8)), b"to nobody")
    party.run(1)
    assert party.heard(bert) == [Signal(node(anna), b"to bert"), Signal(node(anna), b"to all")]
    assert party.heard(host) == [Signal(node(anna), b"to all")]
    assert party.heard(anna) == []


def test_sessions_do_not_hear_each_other() -> None:
    party = Party()
    party.host()
    other = party.client(1)
    other.create("ZZZZZ", 4, b"", party.now)
    party.settle(other)
    party.clients[0].signal(None, b"ours")
    party.clients[0].signal(node(other), b"theirs?")
    party.run(1)
    assert [type(event) for event in party.heard(other)] == [Joined]
    assert party.server.sessions == 2


@pytest.mark.parametrize(
    ("reason", "error"),
    [(Reason.UNKNOWN_SESSION, UnknownSession), (Reason.FULL, SessionFull), (Reason.LOCATOR_TAKEN, Exception)],
)
def test_refusals_say_why(reason: Reason, error: type[Exception]) -> None:
    party = Party()
    party.host(seats=2)
    party.member(1)
    if reason is Reason.LOCATOR_TAKEN:
        late = party.client(2)
        late.create("AB3DE", 2, b"", party.now)
        party.settle(late)
    else:
        late = party.member(2, "ZZZZZ" if reason is Reason.UNKNOWN_SESSION else "AB3DE")
    (refused,) = party.heard(late)
    assert refused == Refused(reason)
    assert late.state is State.OVER
    party.run(1)
    assert party.server.connections == 2  # the refused one has hung up
    with pytest.raises(error, match=r"\w"):
        raise as_error(refused, "example:7443")


def test_every_refusal_has_words() -> None:
    for reason in Reason:
        assert str(as_error(Refused(reason), "example:7443"))


def test_a_session_ends_with_its_last_member() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    party.heard(anna)
    host.leave(party.now)
    party.run(1)
    assert party.heard(anna) == [MemberLeft(node(host), Departure.LEFT)]
    assert party.server.sessions == 1
    anna.leave(party.now)
    party.run(1)
    assert party.server.sessions == 0
    assert party.server.connections == 0
    assert party.heard(party.member(2)) == [Refused(Reason.UNKNOWN_SESSION)]


def test_a_member_that_falls_silent_is_missed() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    party.heard(host)
    del party.machines[address_of(1)]
    party.clients.remove(anna)
    party.run(rendezvous.IDLE_TIMEOUT_S - 1)
    assert party.heard(host) == []
    party.run(2 + 18)
    assert party.heard(host) == [MemberLeft(node(anna), Departure.LOST)]


def test_the_host_evicts_and_nobody_else_does() -> None:
    party = Party()
    host, anna, bert = party.host(), party.member(1), party.member(2)
    for client in (host, anna, bert):
        party.heard(client)
    host.evict(node(anna))
    party.run(1)
    assert party.heard(anna) == [Refused(Reason.EVICTED)]
    assert party.heard(bert) == [MemberLeft(node(anna), Departure.EVICTED)]
    party.send(anna.relay(node(bert), b"\x40 datagram", party.now).data, address_of(1), SERVER)
    party.run(1)
    assert party.heard(bert) == []
    del party.machines[address_of(1)]
    assert party.heard(party.member(1)) == [Refused(Reason.EVICTED)]
    bert.evict(node(host))  # not the host: its connection is closed, and it comes back
    party.run(3)
    assert [type(event) for event in party.heard(bert)] == [Lost, Joined]


def test_an_idle_session_stays_for_hours() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    for client in (host, anna):
        party.heard(client)
    sent = len(party.traffic)
    party.run(3600)
    assert party.heard(host) == party.heard(anna) == []
    assert len(party.traffic) - sent < 2 * (3600 / 12) * 6  # a ping is a few packets every 12 to 18 s


def test_no_answer_is_reported_within_five_seconds() -> None:
    party = Party()
    del party.machines[SERVER]
    client = party.client(1)
    client.join("AB3DE", party.now)
    began = party.now
    assert party.run_until(lambda: bool(party.events[node(client)]))
    (unreachable,) = party.heard(client)
    assert isinstance(unreachable, Unreachable)
    assert party.now - began <= 5.01
    assert isinstance(as_error(unreachable, "example:7443"), RendezvousUnreachable)
    assert client.next_timer() is None


@pytest.mark.parametrize("relaying", [True, False])
@pytest.mark.parametrize("away_s", [0.0, 0.4, 30.0])
def test_after_a_restart_everybody_comes_back_by_itself(away_s: float, relaying: bool) -> None:
    party = Party()
    members = [party.host(), party.member(1), party.member(2)]
    for client in members:
        party.heard(client)

    def talk(seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            if relaying:
                party.send(members[1].relay(node(members[2]), b"\x40 data", party.now).data, address_of(1), SERVER)
                party.send(members[2].relay(node(members[1]), b"\x40 data", party.now).data, address_of(2), SERVER)
            party.run(0.1)

    talk(1)
    del party.machines[SERVER]
    talk(away_s)
    server = party.restart()
    for client in members:
        party.events[node(client)] = [event for event in party.heard(client) if not isinstance(event, Relayed)]
    talk(2.0)
    if relaying:
        assert Relayed(node(members[1]), b"\x40 data") in party.heard(members[2])
        assert Relayed(node(members[2]), b"\x40 data") in party.heard(members[1])
    talk(25)
    assert server.sessions == 1
    assert server.connections == 3
    for client in members:
        assert client.state is State.READY
    members[0].signal(None, b"still here")
    party.run(1)
    assert Signal(node(members[0]), b"still here") in party.heard(members[1])
    # Whoever restored the session, it is the host's again and takes the same number of members.
    late = party.member(3)
    (joined, *_) = party.heard(late)
    assert isinstance(joined, Joined)
    assert (joined.host, joined.seats, joined.greeting) == (node(members[0]), 4, b"sealed greeting")
    assert party.heard(party.member(4)) == [Refused(Reason.FULL)]


def test_the_host_posts_its_greeting_anew_and_its_seat_is_kept() -> None:
    party = Party()
    host, anna = party.host(seats=2), party.member(1)
    host_machine = party.machines.pop(address_of(0))
    party.restart()
    party.run(30)
    assert anna.state is State.READY
    assert party.heard(party.member(2)) == [Refused(Reason.FULL)]
    party.heard(anna)
    party.machines[address_of(0)] = host_machine
    party.run(20)
    assert host.state is State.READY
    assert party.heard(anna) == [MemberJoined(node(host))]


def test_what_is_signalled_during_a_loss_arrives_after_it() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    server = party.machines.pop(SERVER)
    anna.relay(node(host), b"\x40", party.now)
    party.run(5)
    assert anna.state is not State.READY
    party.heard(host)
    anna.signal(node(host), b"patience")
    for _ in range(8):
        anna.signal(node(host), bytes(60_000))
    assert anna.dropped == 4
    party.machines[SERVER] = server
    party.run(30)
    assert Signal(node(anna), b"patience") in party.heard(host)


def test_a_reconnection_replaces_the_old_connection_silently() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    party.heard(host)
    # The member restarts its connection from the same address; the server still holds the old one.
    anna._lose("as if silent", party.now)
    party.run(2)
    assert anna.state is State.READY
    assert party.heard(host) == []
    party.run(60)
    assert party.heard(host) == []
    assert party.server.connections == 2


def test_a_member_that_moves_is_followed_after_proof() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    for client in (host, anna):
        party.heard(client)
    elsewhere = Address("203.0.113.77", 50001)
    party.public[address_of(1)] = elsewhere
    party.run(25)
    assert party.heard(anna) == [Moved(elsewhere)]
    party.send(anna.relay(node(host), b"\x40 from there", party.now).data, elsewhere, SERVER)
    party.send(host.relay(node(anna), b"\x40 to there", party.now).data, address_of(0), SERVER)
    party.run(1)
    assert party.heard(host) == [Relayed(node(anna), b"\x40 from there")]
    assert party.heard(anna) == [Relayed(node(host), b"\x40 to there")]


def test_a_relaying_member_that_moves_is_back_within_a_second() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    party.send(anna.relay(node(host), b"\x40 one", party.now).data, address_of(1), SERVER)
    party.run(1)
    elsewhere = party.public[address_of(1)] = Address("203.0.113.77", 50001)
    party.heard(host)
    for _ in range(10):
        party.send(anna.relay(node(host), b"\x40 two", party.now).data, elsewhere, SERVER)
        party.run(0.1)
    assert Relayed(node(anna), b"\x40 two") in party.heard(host)


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


class _Liar:
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
    liar = _Liar(party, 1)
    liar.say(said)
    assert liar.quic.closed
    assert party.server.counters["protocol_errors"] == 1
    assert party.server.connections == 1
    assert host.state is State.READY


def test_bulk_and_oversized_messages_are_refused() -> None:
    party = Party()
    liar = _Liar(party, 1)
    liar.say(control.encode(control.Ping()), Stream.BULK)
    assert liar.quic.closed
    liar = _Liar(party, 2)
    liar.say(bytes(control.MAX_CONTROL_BYTES + 1))
    assert liar.quic.closed
    assert party.server.connections == 0


def test_one_connection_registers_once() -> None:
    party = Party()
    liar = _Liar(party, 1)
    liar.say(control.encode(control.Create("AB3DE", 2, b"")))
    assert party.server.sessions == 1
    liar.say(control.encode(control.Create("AB3DF", 2, b"")))
    assert liar.quic.closed
    assert party.server.sessions == 0


def test_another_version_is_told_so() -> None:
    party = Party()
    liar = _Liar(party, 1)
    liar.say(b"\x07\x01 whatever version 7 may say")
    answers = []
    while (event := liar.quic.next_event()) is not None:
        answers.append(event)
    assert any(getattr(event, "data", None) == control.encode(Refused(Reason.VERSION)) for event in answers)


def test_somebody_who_never_asks_is_hung_up_on() -> None:
    party = Party()
    liar = _Liar(party, 1)
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
        liar = _Liar(party, 1)
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


def test_closing_tells_everybody() -> None:
    party = Party()
    host = party.host()
    party.heard(host)
    party.server.close(party.now)
    party.run(0.1)
    assert party.heard(host) == [Lost("the rendezvous is closing")]


def test_one_client_enters_once_and_checks_its_arguments() -> None:
    client = RendezvousClient(IDENTITIES[0], SERVER, Random(0))
    with pytest.raises(ProtocolError):
        client.create("nope", 2, b"", 0.0)
    with pytest.raises(ProtocolError):
        client.create("AB3DE", 0, b"", 0.0)
    client.create("AB3DE", 2, b"", 0.0)
    with pytest.raises(ProtocolError):
        client.join("AB3DE", 0.0)
    with pytest.raises(ProtocolError):
        client.signal(None, bytes(control.MAX_SEALED_BYTES + 1))


# Strangers.

first_bytes = st.sampled_from([0x00, 0x40, 0x45, 0x80, 0x81, 0xBF, 0xC0, 0xC3, 0xD0, 0xE0, 0xF0, 0xFF])
noise = st.builds(lambda first, rest: bytes((first,)) + rest, first_bytes, st.binary(max_size=1500))


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


def test_forged_notices_cost_the_member_a_ping_now_and_then() -> None:
    party = Party()
    client = party.host()
    party.heard(client)
    sent = len(party.traffic)
    for _ in range(200):
        for forged in (notice.Unknown(), notice.Challenge(bytes(16))):
            client.receive(notice.encode_notice(forged), SERVER, party.now)
        client.receive(b"\x80" + bytes(8) + b"\x07 gibberish", SERVER, party.now)
        party.run(0.01)
    assert party.heard(client) == []
    assert client.state is State.READY
    from_client = [data for _, source, _, data in party.traffic[sent:] if source == address_of(0)]
    assert len(from_client) < 2 / rendezvous_client.HINT_SPACING_S * 2 * 3
