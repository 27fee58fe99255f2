"""The STUN codec: the RFC's own vectors, round trips, every truncation, arbitrary bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kafila import wire
from kafila.nat.stun import (
    HEADER_BYTES,
    TRANSACTION_ID_BYTES,
    Attribute,
    Change,
    ErrorCode,
    MessageClass,
    StunMessage,
    decode,
    encode,
)
from kafila.types import Address

TRANSACTION = bytes.fromhex("b7e7a701bc34d686fa87dfae")  # RFC 5769 section 2

# RFC 5769 sections 2.2 and 2.3: sample IPv4 and IPv6 responses, less MESSAGE-INTEGRITY (which precedes FINGERPRINT and
# would change it), so: header, SOFTWARE "test vector", XOR-MAPPED-ADDRESS.
IPV4_RESPONSE = bytes.fromhex(
    "0101001c2112a442b7e7a701bc34d686fa87dfae8022000b7465737420766563746f7220002000080001a147e112a643"
)
IPV6_RESPONSE = bytes.fromhex(
    "010100282112a442b7e7a701bc34d686fa87dfae8022000b7465737420766563746f722000200014"
    "0002a1470113a9faa5d3f179bc25f4b5bed2b9d9"
)

addresses = st.builds(
    Address,
    st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str),
    st.integers(0, 65535),
)
maybe_addresses = st.none() | addresses
messages = st.builds(
    StunMessage,
    kind=st.sampled_from(MessageClass),
    transaction_id=st.binary(min_size=TRANSACTION_ID_BYTES, max_size=TRANSACTION_ID_BYTES),
    mapped_address=maybe_addresses,
    xor_mapped_address=maybe_addresses,
    response_origin=maybe_addresses,
    other_address=maybe_addresses,
    change=st.none() | st.builds(Change, address=st.booleans(), port=st.booleans()),
    error=st.none() | st.builds(ErrorCode, code=st.integers(300, 699), reason=st.text(max_size=40)),
    unknown_attributes=st.lists(st.integers(0, 0x7FFF), max_size=5).map(tuple),
    nonce=st.binary(max_size=40),
    software=st.text(max_size=30),
    padding_bytes=st.integers(0, 64),
)


def test_sample_responses_of_rfc_5769() -> None:
    v4, v6 = decode(IPV4_RESPONSE), decode(IPV6_RESPONSE)
    assert v4 is not None
    assert v6 is not None
    assert (v4.kind, v4.transaction_id, v4.software) == (MessageClass.SUCCESS, TRANSACTION, "test vector")
    assert v4.reflexive == Address("192.0.2.1", 32853)
    assert v6.reflexive == Address("2001:db8:1234:5678:11:2233:4455:6677", 32853)


@given(messages, st.integers(0, 400))
def test_round_trip_at_any_size(message: StunMessage, at_least: int) -> None:
    data = encode(message, at_least_bytes=at_least)
    decoded = decode(data)
    assert decoded is not None
    assert wire.classify(data) is wire.Kind.STUN
    if not message.software:
        decoded = replace(decoded, software="")
    assert decoded == message


@given(st.integers(HEADER_BYTES, 150))
def test_a_request_is_filled_to_the_size_asked(size: int) -> None:
    data = encode(StunMessage(MessageClass.REQUEST, TRANSACTION), at_least_bytes=size)
    assert len(data) >= size
    assert len(data) < max(size, 28) + 8


@given(messages)
def test_every_truncation_is_refused(message: StunMessage) -> None:
    data = encode(message)
    assert all(decode(data[:end]) is None for end in range(len(data)))


@given(messages, st.data())
def test_one_wrong_bit_is_never_taken_for_another_message(message: StunMessage, draw: st.DataObject) -> None:
    data = bytearray(encode(message))
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    data[bit // 8] ^= 1 << bit % 8
    decoded = decode(bytes(data))
    # Only a flip inside FINGERPRINT's type turns it into an attribute we skip; then nothing else has changed.
    assert decoded is None or (bit // 8 in (len(data) - 8, len(data) - 7) and decoded.kind is message.kind)


@given(st.binary(max_size=200))
@example(b"")
def test_arbitrary_bytes_are_refused_quietly(data: bytes) -> None:
    decode(data)


@given(
    st.sampled_from(MessageClass),
    st.lists(st.tuples(st.sampled_from(Attribute) | st.integers(0, 0xFFFF), st.binary(max_size=40)), max_size=6),
)
def test_arbitrary_attributes_never_raise(kind: MessageClass, attributes: list[tuple[int, bytes]]) -> None:
    body = b"".join(
        int(number).to_bytes(2, "big") + len(value).to_bytes(2, "big") + value + bytes(-len(value) % 4)
        for number, value in attributes
    )
    head = kind.value.to_bytes(2, "big") + len(body).to_bytes(2, "big") + wire.STUN_MAGIC_COOKIE + TRANSACTION
    decoded = decode(head + body)
    if decoded is not None:
        encode(replace(decoded, not_understood=()))


def test_unknown_attributes_are_listed_only_when_they_must_be_understood() -> None:
    body = bytes.fromhex("7777000400000000c0de000400000000")
    head = bytes.fromhex("0001") + len(body).to_bytes(2, "big") + wire.STUN_MAGIC_COOKIE + TRANSACTION
    decoded = decode(head + body)
    assert decoded is not None
    assert decoded.not_understood == (0x7777,)


def test_the_first_of_two_equal_attributes_counts() -> None:
    body = bytes.fromhex("00150001610000000015000162000000")
    head = bytes.fromhex("0001") + len(body).to_bytes(2, "big") + wire.STUN_MAGIC_COOKIE + TRANSACTION
    decoded = decode(head + body)
    assert decoded is not None
    assert decoded.nonce == b"a"


@pytest.mark.parametrize("kind", [0x0003, 0x0002, 0x0111 + 1])
def test_other_methods_are_refused(kind: int) -> None:
    head = kind.to_bytes(2, "big") + bytes(2) + wire.STUN_MAGIC_COOKIE + TRANSACTION
    assert decode(head) is None


def test_the_plain_address_serves_where_there_is_no_xored_one() -> None:
    plain = Address("192.0.2.7", 7)
    assert StunMessage(MessageClass.SUCCESS, TRANSACTION, mapped_address=plain).reflexive == plain
