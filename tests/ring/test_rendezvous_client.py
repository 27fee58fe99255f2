"""A member's side of the rendezvous: losses, restarts, pings, notices."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafila.errors import ProtocolError, RendezvousUnreachable
from kafila.ring import control, notice, rendezvous_client
from kafila.ring.control import MemberJoined, Reason, Refused, Signal
from kafila.ring.refusals import as_error
from kafila.ring.registry import Delivery, Registry
from kafila.ring.rendezvous_client import Joined, Lost, Relayed, RendezvousClient, State, Unreachable
from kafila.types import Address
from tests.ring.world import IDENTITIES, SERVER, Party, address_of, honest, node


def test_every_refusal_has_words() -> None:
    for reason in Reason:
        assert str(as_error(Refused(reason), "example:7443"))


def test_an_idle_session_stays() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    for client in (host, anna):
        party.heard(client)
    sent = len(party.traffic)
    party.run(1800)
    assert party.heard(host) == party.heard(anna) == []
    assert len(party.traffic) - sent < 2 * (1800 / 12) * 6  # a ping is a few packets every 12 to 18 s


def test_a_change_of_network_is_asked_about_at_once() -> None:
    party = Party()
    host = party.host()
    party.heard(host)
    party.run(1)
    assert (host.minimum_rtt_s or 9.0) <= (host.rtt_s or 0.0) + 1e-9
    sent = len(party.traffic)
    host.network_changed(party.now)
    host.network_changed(party.now)  # asked already
    party.run(0.5)
    assert 0 < len(party.traffic) - sent < 8
    assert host.state is State.READY


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


def quic_sent(party: Party, number: int, seconds: float, relayed: bytes) -> int:
    """How many QUIC datagrams a member sends while it relays ``relayed`` ten times a second."""
    client, sent = party.clients[number], len(party.traffic)
    for _ in range(int(10 * seconds)):
        data, _to = client.relay(node(party.clients[0]), relayed, party.now)
        party.send(data, address_of(number), SERVER)
        party.run(0.1)
    return sum(1 for _, source, _, data in party.traffic[sent:] if source == address_of(number) and data[0] & 0x40)


def test_pings_are_frequent_while_the_relay_carries_a_link_and_only_then() -> None:
    party = Party()
    party.host()
    party.member(1)
    assert quic_sent(party, 1, 30, b"\x81 a probe") <= 8
    assert 28 <= quic_sent(party, 1, 30, b"\x40 a link's datagram") <= 100
    party.run(30)
    assert quic_sent(party, 1, 30, b"\x81 a probe") <= 8


def test_a_probe_into_a_restarted_rendezvous_brings_the_member_back() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    party.restart()
    data, _ = anna.relay(node(host), b"\x81 a probe", party.now)
    party.send(data, address_of(1), SERVER)
    party.run(2)
    assert party.server.sessions == 1
    assert [type(event) for event in party.heard(anna)][-2:] == [Lost, Joined]


def test_only_the_rendezvous_is_listened_to() -> None:
    party = Party()
    client = party.host()
    client.receive(notice.encode_notice(notice.Unknown()), Address("203.0.113.66", 6666), party.now)
    assert client.datagrams_to_send(party.now) == []
    client.receive(notice.encode_notice(notice.Unknown()), SERVER, party.now)
    assert client.datagrams_to_send(party.now) != []


def test_a_rendezvous_too_busy_to_take_a_member_back_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party()
    client = party.host()
    party.heard(client)
    with monkeypatch.context() as busy:
        refused = [Refused(Reason.BUSY)]
        busy.setattr(Registry, "register", lambda _, caller, __: [Delivery(caller.connection, refused[0])])
        party.restart()
        party.run(30)
        assert [type(event) for event in party.heard(client)] == [Lost]
    party.run(30)
    assert client.state is State.READY


def test_too_busy_at_first_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party()
    busy = Refused(Reason.BUSY)
    monkeypatch.setattr(Registry, "register", lambda _, caller, __: [Delivery(caller.connection, busy)])
    client = party.member(1)
    assert party.heard(client) == [busy]
    assert client.state is State.OVER


def test_a_slow_path_gets_the_time_it_needs_to_come_back() -> None:
    party = Party(latency_s=0.4)
    client = party.host()
    party.restart()
    party.run(40)
    assert client.state is State.READY
    assert party.server.sessions == 1


def test_every_loss_has_the_whole_room_for_what_waits() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    for _ in range(2):
        anna._lose("as if silent", party.now)
        for _ in range(4):
            anna.signal(node(host), bytes(60_000))
        party.run(5)
    assert anna.dropped == 0
    assert len([event for event in party.heard(host) if isinstance(event, Signal)]) == 8


def test_events_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_client, "MAX_EVENTS", 5)
    client = RendezvousClient(IDENTITIES[0], SERVER, Random(0))
    client.create("AB3DE", 2, b"", 0.0)
    for _ in range(8):
        client.receive(b"\x80" + bytes(range(1, 9)) + b"\x40 datagram", SERVER, 0.0)
    assert client.dropped == 3
    assert len(list(iter(client.next_event, None))) == 5


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["signal", "relay", "restart", "leave", "blackout", "move"]), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.integers(0, 200)),
    ),
    max_size=12,
)


@settings(max_examples=max(settings().max_examples // 4, 5))  # each is minutes of virtual time
@given(steps, st.integers(0, 2**32))
def test_whatever_happens_members_end_up_registered_or_gone(steps: list[tuple[str, int]], seed: int) -> None:
    """Losses, moves and restarts in any order; afterwards the network is kind, and everybody who stayed is back."""
    random = Random(seed)
    party = Party()
    party.host()
    party.member(1)
    party.member(2)
    left: set[int] = set()
    for what, number in steps:
        client = party.clients[number % 3]
        if what == "wait":
            party.run(number / 10)
        elif what == "signal":
            client.signal(None, random.randbytes(200))
        elif what == "relay":
            data, _ = client.relay(node(party.clients[0]), b"\x40 datagram", party.now)
            party.send(data, party.public.get(address_of(number), address_of(number)), SERVER)
        elif what == "restart":
            party.restart()
        elif what == "leave":
            client.leave(party.now)
            left.add(number)
        elif what == "blackout":
            party.travel = lambda data, source, destination: ()
            party.run(random.random() * 60)
            party.travel = lambda data, source, destination: () if random.random() < 0.2 else (data,)
        elif what == "move":
            party.public[address_of(number)] = Address(f"203.0.113.{random.randrange(1, 255)}", 50000 + number)
    party.travel = honest
    party.run(90)
    staying = [client for number, client in enumerate(party.clients) if number not in left]
    assert all(client.state is State.READY for client in staying)
    assert party.server.sessions == bool(staying)
    assert party.server.connections == len(staying)
    for client in staying:
        party.heard(client)
    for client in staying:
        client.signal(None, b"still here")
    party.run(2)
    for client in staying:
        others = {node(other) for other in staying if other is not client}
        assert {event.sender for event in party.heard(client) if isinstance(event, Signal)} == others


@given(st.lists(st.tuples(st.sampled_from([0x40, 0x80, 0xC0, 0xFF]), st.binary(max_size=100)), max_size=20))
def test_no_datagram_upsets_a_client(noise: list[tuple[int, bytes]]) -> None:
    party = Party()
    client = party.host()
    party.heard(client)
    for first, rest in noise:
        client.receive(bytes((first,)) + rest, SERVER, party.now)
    client.receive(b"", SERVER, party.now)
    party.run(1)
    assert client.state is State.READY
    assert all(isinstance(event, Relayed) for event in party.heard(client))
