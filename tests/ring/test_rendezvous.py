"""The rendezvous: sessions, signals, refusals, and members that move."""

from __future__ import annotations

import pytest

from kafila.errors import SessionFull, UnknownSession
from kafila.ring import rendezvous
from kafila.ring.control import Departure, MemberJoined, MemberLeft, Reason, Refused, Signal
from kafila.ring.quic import QuicConnection
from kafila.ring.refusals import as_error
from kafila.ring.rendezvous_client import Joined, Lost, Moved, Relayed, State
from kafila.types import Address, NodeId
from tests.ring.world import SERVER, Party, address_of, node


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


def test_a_member_that_left_is_no_relay_and_leaves_nothing_behind() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    anna.leave(party.now)
    party.run(1)
    party.heard(host)
    party.send(anna.relay(node(host), b"\x40 late", party.now).data, address_of(1), SERVER)
    party.send(host.relay(node(anna), b"\x40 late", party.now).data, address_of(0), SERVER)
    party.run(1)
    assert party.heard(host) == []
    assert party.server.counters["relay_unknown_source"] == 1
    assert party.server.counters["relay_unknown_addressee"] == 1
    host.leave(party.now)
    party.run(1)
    assert [len(index) for index in (party.server._by_id, party.server._connections, party.server._timers)] == [0, 0, 0]


def test_a_member_that_moves_twice_before_it_can_answer_is_followed() -> None:
    party = Party()
    host, anna = party.host(), party.member(1)
    lost = Address("203.0.113.77", 50001)
    party.public[address_of(1)] = lost
    party.travel = lambda data, source, destination: () if destination == lost else (data,)
    anna.signal(None, b"from there")
    party.run(0.1)
    there = party.public[address_of(1)] = Address("203.0.113.78", 50002)
    party.run(40)
    assert anna.observed == there
    party.heard(anna)
    host.signal(node(anna), b"found")
    party.run(1)
    assert party.heard(anna) == [Signal(node(host), b"found")]


def test_a_move_makes_the_connection_forget_the_old_way(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(QuicConnection, "path_changed", lambda self, now, size: forgotten.append(size))
    party = Party()
    party.host()
    party.public[address_of(0)] = Address("203.0.113.77", 50001)
    party.run(25)
    assert forgotten == [1200]
