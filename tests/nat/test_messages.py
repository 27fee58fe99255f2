"""The path message codec: round trips, nothing else gets in, no answer larger than its request."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.candidates import canonical
from kafila.nat.messages import (
    MAX_MESSAGE_BYTES,
    MIN_MESSAGE_BYTES,
    Ack,
    Message,
    Ping,
    ReplayWindow,
    Sealer,
    first_sequence,
    sender_of,
)
from kafila.types import Address, NodeId
from kafila.wire import Kind, classify

ALICE, BOB, EVE = (NodeId(name * 8) for name in (b"a", b"b", b"e"))
KEY = bytes(range(32))

SEQUENCES = st.integers(0, 2**64 - 1)
ADDRESSES = st.none() | st.builds(Address, st.ip_addresses().map(str), st.integers(0, 65535)).map(canonical)
PINGS = st.builds(Ping, SEQUENCES, ADDRESSES, st.booleans(), st.booleans(), st.integers(MIN_MESSAGE_BYTES, 2000))
MESSAGES: st.SearchStrategy[Message] = PINGS | st.builds(Ack, SEQUENCES, SEQUENCES, ADDRESSES)


def sealer(me: NodeId, peer: NodeId, key: bytes = KEY) -> Sealer:
    return Sealer(key, me, peer, random.Random(1).randbytes)


@given(MESSAGES)
def test_round_trip(message: Message) -> None:
    data = sealer(ALICE, BOB).seal(message)
    assert sealer(BOB, ALICE).open(data) == message
    assert classify(data) is Kind.PATH
    assert sender_of(data) == ALICE
    assert len(data) == (message.size_bytes if isinstance(message, Ping) else MIN_MESSAGE_BYTES)


@given(MESSAGES)
def test_every_truncation_and_extension(message: Message) -> None:
    data = sealer(ALICE, BOB).seal(message)
    bob = sealer(BOB, ALICE)
    assert all(bob.open(data[:length]) is None for length in range(min(len(data), 300)))
    assert bob.open(data[:-1]) is None
    assert bob.open(data + b"\0") is None


@given(MESSAGES, st.data())
def test_every_altered_byte_is_noticed(message: Message, draw: st.DataObject) -> None:
    data = bytearray(sealer(ALICE, BOB).seal(message))
    where = draw.draw(st.integers(0, len(data) - 1))
    data[where] ^= draw.draw(st.integers(1, 255))
    assert sealer(BOB, ALICE).open(bytes(data)) is None


@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda tail: b"\x81" + ALICE + tail))
def test_arbitrary_bytes(data: bytes) -> None:
    assert sealer(BOB, ALICE).open(data) is None
    sender_of(data)


@given(st.binary(min_size=37, max_size=37))
def test_arbitrary_sealed_contents(plain: bytes) -> None:
    """A member's own nonsense is dropped as quietly as a stranger's."""
    alice = sealer(ALICE, BOB)
    nonce = bytes(12)
    data = alice._header + nonce + alice._out.encrypt(nonce, plain, alice._header)
    message = sealer(BOB, ALICE).open(data)
    assert message is None or isinstance(message, (Ping, Ack))


@given(MESSAGES)
def test_it_means_nothing_to_anybody_else(message: Message) -> None:
    data = sealer(ALICE, BOB).seal(message)
    assert sealer(EVE, ALICE).open(data) is None, "another member of the session"
    assert sealer(ALICE, BOB).open(data) is None, "reflected to its sender"
    assert sealer(BOB, ALICE, bytes(32)).open(data) is None, "another session"
    reflected = data[:1] + BOB + data[9:]
    assert sealer(ALICE, BOB).open(reflected) is None, "reflected under the peer's name"


def test_an_ack_is_no_larger_than_the_smallest_ping() -> None:
    ack = sealer(BOB, ALICE).seal(Ack(2**64 - 1, 2**64 - 1, Address("2001:db8::ffff:1", 65535)))
    assert len(ack) == MIN_MESSAGE_BYTES
    ping = Ping(0, None, size_bytes=MIN_MESSAGE_BYTES)
    assert len(sealer(ALICE, BOB).seal(ping)) >= len(ack)


@pytest.mark.parametrize("size", [MIN_MESSAGE_BYTES, 1200, 16336, MAX_MESSAGE_BYTES])
def test_sizes_of_mtu_probes(size: int) -> None:
    data = sealer(ALICE, BOB).seal(Ping(7, None, size_bytes=size))
    opened = sealer(BOB, ALICE).open(data)
    assert len(data) == size
    assert isinstance(opened, Ping)
    assert opened.size_bytes == size


@given(st.lists(st.integers(0, 3000), max_size=300))
def test_replay_window_accepts_once(sequences: list[int]) -> None:
    window, accepted, newest = ReplayWindow(), set[int](), -1
    for sequence in sequences:
        fresh = sequence not in accepted and sequence > newest - ReplayWindow.WIDTH
        assert window.accept(sequence) == fresh
        accepted.add(sequence)
        newest = max(newest, sequence)


def test_replay_window_over_huge_jumps() -> None:
    window = ReplayWindow()
    assert window.accept(2**64 - 1)
    assert not window.accept(2**64 - 1)
    assert not window.accept(0)
    assert window.accept(2**64 - ReplayWindow.WIDTH)
    assert not window.accept(2**64 - ReplayWindow.WIDTH - 1)


def test_a_machine_made_anew_is_not_taken_for_a_replay() -> None:
    assert first_sequence(2000.0) > first_sequence(1000.0) + 100 * 1000
    assert first_sequence(-5.0) == 0
    assert first_sequence(1e300) < 2**63
