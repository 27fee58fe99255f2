from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring.quic import QuicConnection, Stream
from kafila.ring.quic_retry import MIN_INITIAL_BYTES, TOKEN_LIFETIME_S, Accept, Drop, Reply, RetryGate
from kafila.types import Address
from tests.ring.wire import ALPN, IDENTITIES, START_S, Wire

SECRET = b"a secret of this process"
HERE = Address("192.0.2.7", 4711)


def knock() -> tuple[QuicConnection, bytes, Reply]:
    """A client's first datagram and what the gate answers."""
    client = QuicConnection.client(IDENTITIES[0], IDENTITIES[1].fingerprint, START_S, alpn=ALPN)
    (first,) = client.datagrams_to_send(START_S)
    reply = RetryGate(SECRET).check(first, HERE, START_S)
    assert isinstance(reply, Reply)
    assert len(reply.data) < len(first)
    client.receive([reply.data], START_S)
    (second,) = client.datagrams_to_send(START_S)
    return client, second, reply


def test_a_client_that_echoes_the_token_is_accepted_by_a_gate_that_kept_nothing() -> None:
    client, second, _ = knock()
    accepted = RetryGate(SECRET).check(second, HERE, START_S + 1)
    assert isinstance(accepted, Accept)
    server = QuicConnection.server(IDENTITIES[1], IDENTITIES[0].fingerprint, START_S, alpn=ALPN, accepted=accepted)
    wire = Wire((client, server))
    client.send(Stream.CONTROL, b"through the gate")
    wire.flying[1].append(second)
    wire.settle()
    assert [message.data for message in wire.messages(1)] == [b"through the gate"]


@pytest.mark.parametrize(
    ("secret", "source", "after_s"),
    [
        (b"another process's secret", HERE, 1.0),
        (SECRET, Address("192.0.2.8", HERE.port), 1.0),
        (SECRET, Address(HERE.host, HERE.port + 1), 1.0),
        (SECRET, HERE, TOKEN_LIFETIME_S + 1),
    ],
    ids=["secret", "host", "port", "age"],
)
def test_a_token_holds_for_its_gate_its_address_and_its_time(secret: bytes, source: Address, after_s: float) -> None:
    _, second, _ = knock()
    assert isinstance(RetryGate(secret).check(second, source, START_S + after_s), Drop)


def test_a_token_holds_for_the_connection_id_it_came_from() -> None:
    _, second, _ = knock()
    changed = bytearray(second)
    changed[6] ^= 1  # the destination connection id begins after flags, version and its length
    assert isinstance(RetryGate(SECRET).check(bytes(changed), HERE, START_S), Drop)


def test_a_first_datagram_that_is_too_small_is_dropped() -> None:
    client = QuicConnection.client(IDENTITIES[0], None, START_S, alpn=ALPN)
    (first,) = client.datagrams_to_send(START_S)
    assert isinstance(RetryGate(SECRET).check(first[: MIN_INITIAL_BYTES - 1], HERE, START_S), Drop)


@given(st.binary(max_size=1400), st.integers(0, 1400))
def test_arbitrary_bytes_are_answered_with_less_or_dropped(data: bytes, pad: int) -> None:
    for datagram in (data, b"\xc0\0\0\0\1" + data.ljust(pad, b"\0"), data.ljust(1300, b"\xc3")):
        verdict = RetryGate(SECRET).check(datagram, HERE, START_S)
        assert isinstance(verdict, Reply | Drop)
        assert not isinstance(verdict, Reply) or len(verdict.data) < len(datagram)


@given(st.data())
def test_a_damaged_token_is_dropped_without_a_word(data: st.DataObject) -> None:
    _, second, _ = knock()
    at = data.draw(st.integers(0, 120))
    changed = bytearray(second)
    changed[at] ^= data.draw(st.integers(1, 255))
    verdict = RetryGate(SECRET).check(bytes(changed), HERE, START_S)
    # The client's own connection id is no part of what the token vouches for, nor is the packet's length or number.
    assert isinstance(verdict, Drop | Reply) or verdict == RetryGate(SECRET).check(second, HERE, START_S)
