"""Pings and acks: matched once, limited, never replayed."""

from __future__ import annotations

import random

from kafila.nat.exchange import MAX_OUTBOX, MAX_OUTSTANDING, Exchange, Outstanding
from kafila.nat.messages import MIN_MESSAGE_BYTES, Ack, Ping
from kafila.nat.schedule import MAX_PROBES_PER_S
from kafila.types import Address, NodeId

ALICE, BOB = NodeId(b"a" * 8), NodeId(b"b" * 8)
TO = Address("203.0.113.7", 4242)


def exchange(me: NodeId, peer: NodeId) -> Exchange:
    return Exchange(me, peer, bytes(32), 1000.0, random.Random(1))


def ping(now: float) -> Outstanding:
    return Outstanding(TO, now, 0.0, MIN_MESSAGE_BYTES, 0, 0)


def test_there_and_back() -> None:
    alice, bob = exchange(ALICE, BOB), exchange(BOB, ALICE)
    assert alice.ping(ping(1000.0), active=True)
    (probe,) = alice.take()
    assert probe.to == TO
    asked = bob.open(probe.data)
    assert isinstance(asked, Ping)
    assert asked.active
    assert bob.open(probe.data) is None, "once"
    bob.acknowledge(asked, TO, [(TO, 0), (None, 0)], 1000.0)
    first, second = bob.take()
    answer, again = alice.open(first.data), alice.open(second.data)
    assert isinstance(answer, Ack)
    assert isinstance(again, Ack)
    assert alice.match(answer) == ping(1000.0)
    assert alice.match(again) is None, "the second ack of a ping says nothing new"


def test_pings_and_acks_are_limited_each() -> None:
    alice = exchange(ALICE, BOB)
    sent = sum(alice.ping(ping(1000.0 + n / 1000)) for n in range(500))
    assert sent == MAX_PROBES_PER_S
    assert alice.may_ping_at() == 1001.0
    alice.take()
    for number in range(500):
        alice.acknowledge(Ping(number, None), TO, [(TO, 0)], 1000.0)
    assert len(alice.take()) == MAX_PROBES_PER_S


def test_bounded_memory() -> None:
    alice = exchange(ALICE, BOB)
    for number in range(2000):
        alice.ping(ping(1000.0 + number / 50))
    assert len(alice.take()) == MAX_OUTBOX
    assert len(alice._outstanding) == MAX_OUTSTANDING


def test_forgotten_pings_are_not_matched() -> None:
    alice, bob = exchange(ALICE, BOB), exchange(BOB, ALICE)
    alice.ping(ping(1000.0))
    asked = bob.open(alice.take()[0].data)
    assert isinstance(asked, Ping)
    alice.forget()
    assert alice.match(Ack(1, asked.sequence, TO)) is None
