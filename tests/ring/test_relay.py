"""The relay passes members' datagrams, unread and unchanged, within quotas, and nobody else's."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring import relay
from kafila.ring.relay import Relay
from kafila.types import Address, NodeId, Transmit
from kafila.wire import unwrap_relay, wrap_relay

NAMES = ["anna", "bert", "carl", "dora"]
NODES = {name: NodeId(name.ljust(8).encode()) for name in NAMES}
ADDRESSES = {name: Address(f"198.51.100.{at}", 40000 + at) for at, name in enumerate(NAMES, 1)}
BULK = b"\x40" + bytes(1399)
PROBE = b"\x81" + bytes(79)
HANDSHAKE = b"\xc0" + bytes(1199)


def a_relay(*names: str, session: str = "AB3DE") -> tuple[Relay, Counter[str]]:
    counters: Counter[str] = Counter()
    made = Relay(counters)
    for name in names:
        made.admit(session, NODES[name], ADDRESSES[name], 0.0)
    return made, counters


def offer(to: Relay, sender: str, addressee: str, datagram: bytes = BULK, now: float = 0.0) -> bool:
    return to.receive(wrap_relay(NODES[addressee], datagram), ADDRESSES[sender], now)


@given(st.binary(min_size=1, max_size=2000))
def test_a_datagram_passes_unchanged_and_no_longer(datagram: bytes) -> None:
    passing, counters = a_relay("anna", "bert")
    assert offer(passing, "anna", "bert", datagram)
    ((envelope, to),) = passing.datagrams_to_send(0.0)
    assert (unwrap_relay(envelope), to) == ((NODES["anna"], datagram), ADDRESSES["bert"])
    assert len(envelope) == len(wrap_relay(NODES["bert"], datagram))
    assert counters == {"relayed_datagrams": 1, "relayed_bytes": len(envelope)}


def test_only_members_of_one_session_and_never_to_oneself() -> None:
    passing, counters = a_relay("anna")
    passing.admit("ZZZZZ", NODES["bert"], ADDRESSES["bert"], 0.0)
    assert offer(passing, "anna", "bert")
    assert offer(passing, "anna", "anna")
    assert offer(passing, "anna", "carl")
    assert not offer(passing, "carl", "anna")
    assert passing.datagrams_to_send(0.0) == []
    assert counters == {"relay_unknown_addressee": 3, "relay_unknown_source": 1}


def test_a_member_that_moved_is_known_by_its_new_address_alone() -> None:
    passing, _ = a_relay("anna", "bert")
    passing.admit("AB3DE", NODES["anna"], ADDRESSES["carl"], 0.0)
    assert not offer(passing, "anna", "bert")
    assert offer(passing, "carl", "bert")
    assert offer(passing, "bert", "anna")
    (to_bert, to_anna) = passing.datagrams_to_send(0.0)
    assert unwrap_relay(to_bert.data)[0] == NODES["anna"]
    assert to_anna.to == ADDRESSES["carl"]
    assert passing._ports["AB3DE", NODES["anna"]].network == ADDRESSES["carl"].host  # whose quota counts from now on


def test_a_member_that_left_sends_and_receives_nothing() -> None:
    passing, counters = a_relay("anna", "bert")
    offer(passing, "anna", "bert")
    passing.remove("AB3DE", NODES["anna"])
    passing.remove("AB3DE", NODES["anna"])
    assert not offer(passing, "anna", "bert")
    assert offer(passing, "bert", "anna")
    assert passing.datagrams_to_send(0.0) == []
    assert passing.next_timer() is None
    assert counters["relay_sender_left"] == 1


def test_an_address_taken_over_by_another_member_stays_with_it() -> None:
    passing, _ = a_relay("anna", "bert", "carl")
    passing.admit("AB3DE", NODES["bert"], ADDRESSES["anna"], 0.0)  # a NAT reassigned it
    passing.remove("AB3DE", NODES["anna"])
    assert offer(passing, "anna", "carl")
    assert unwrap_relay(passing.datagrams_to_send(0.0)[0].data)[0] == NODES["bert"]


def drain(passing: Relay, until: float) -> list[tuple[float, Transmit]]:
    """Everything that leaves until then, and when."""
    now, left = 0.0, []
    while now <= until:
        left += [(now, transmit) for transmit in passing.datagrams_to_send(now)]
        due = passing.next_timer()
        if due is None:
            break
        assert due > now
        now = due
    return left


def test_a_prefill_of_16_mib_passes_at_once() -> None:
    passing, counters = a_relay("anna", "bert")
    sent = 0
    while sent < 16 * 2**20:
        offer(passing, "anna", "bert")
        sent += len(passing.datagrams_to_send(0.0)) * len(BULK)
        assert passing.next_timer() is None
    assert set(counters) == {"relayed_datagrams", "relayed_bytes"}


def exhaust(passing: Relay, sender: str, addressee: str, now: float = 0.0) -> None:
    while passing.next_timer() is None:
        offer(passing, sender, addressee, now=now)
        passing.datagrams_to_send(now)


def test_beyond_the_burst_a_member_goes_at_its_rate_in_order() -> None:
    passing, counters = a_relay("anna", "bert")
    exhaust(passing, "anna", "bert")
    for number in range(300):
        offer(passing, "anna", "bert", b"\x40" + number.to_bytes(2, "big") + bytes(1397))
    left = drain(passing, 10.0)
    assert len(left) == 301
    took = left[-1][0]
    assert len({when for when, _ in left}) <= took / 0.005 + 2  # a dozen datagrams a timer
    assert 301 * 1409 / took == pytest.approx(relay.MEMBER_BYTES_PER_S, rel=0.1)
    numbers = [unwrap_relay(transmit.data)[1][1:3] for _, transmit in left[1:]]
    assert numbers == sorted(numbers)
    assert "relay_queue_full" not in counters


def test_the_queue_is_bounded_and_what_is_dropped_is_counted() -> None:
    passing, counters = a_relay("anna", "bert")
    exhaust(passing, "anna", "bert")
    for _ in range(1000):
        offer(passing, "anna", "bert")
    assert 1000 - counters["relay_queue_full"] == pytest.approx(relay.QUEUE_BYTES / 1409, abs=2)


def test_signalling_does_not_wait_behind_bulk() -> None:
    passing, _ = a_relay("anna", "bert")
    exhaust(passing, "anna", "bert")
    for _ in range(100):
        offer(passing, "anna", "bert")
    for datagram in (PROBE, HANDSHAKE):
        offer(passing, "anna", "bert", datagram)
    assert [unwrap_relay(envelope)[1] for envelope, _ in passing.datagrams_to_send(0.0)] == [PROBE, HANDSHAKE]


def test_signalling_is_no_way_round_the_quota() -> None:
    passing, counters = a_relay("anna", "bert")
    for _ in range(2000):
        offer(passing, "anna", "bert", HANDSHAKE)
    passed = sum(len(envelope) for envelope, _ in passing.datagrams_to_send(0.0))
    assert passed <= relay.SIGNALLING_BURST_BYTES
    assert counters["relay_signalling_over_quota"] > 1700


def test_members_take_turns_and_one_that_is_held_holds_nobody() -> None:
    passing, _ = a_relay("anna", "bert", "carl")
    exhaust(passing, "anna", "bert")
    for _ in range(3):
        offer(passing, "anna", "bert")
        offer(passing, "bert", "carl")
        offer(passing, "carl", "bert")
    senders = [unwrap_relay(envelope)[0] for envelope, _ in passing.datagrams_to_send(0.0)]
    assert senders == [NODES["bert"], NODES["carl"]] * 3


def test_a_session_and_a_network_share_quotas_that_reconnecting_does_not_refill() -> None:
    for same_session in (True, False):
        passing, _ = a_relay()
        names = [NodeId(bytes([number]) * 8) for number in range(12)]
        sent = 0
        for pair in range(6):  # six pairs of one session, or six sessions of one household
            session = "AB3DE" if same_session else f"AB3D{pair}"
            one, other = names[2 * pair], names[2 * pair + 1]
            network = f"198.51.{pair}.1" if same_session else "198.51.100.1"
            passing.admit(session, one, Address(network, 2 * pair + 1), 0.0)
            passing.admit(session, other, Address("203.0.113.9", 100 + pair), 0.0)
            left: list[Transmit] = []
            for _ in range(int(relay.MEMBER_BURST_BYTES / 60_000)):
                passing.receive(wrap_relay(other, b"\x40" + bytes(60_000)), Address(network, 2 * pair + 1), 0.0)
                left += passing.datagrams_to_send(0.0)
            sent += sum(len(envelope) for envelope, _ in left)
            passing.remove(session, one)
        assert relay.SHARED_BURST_BYTES * 0.99 < sent <= relay.SHARED_BURST_BYTES
