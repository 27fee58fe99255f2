"""The control codec: round trips, every truncation, arbitrary bytes, other versions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.ring import control
from kafila.ring.control import (
    MAX_GREETING_BYTES,
    MAX_MEMBERS,
    MAX_SEALED_BYTES,
    VERSION,
    Confirm,
    Create,
    Departure,
    Evict,
    Join,
    Joined,
    MemberJoined,
    MemberLeft,
    Message,
    OtherVersion,
    Ping,
    Pong,
    Reason,
    Refused,
    Restore,
    Send,
    Signal,
    decode,
    encode,
)
from kafila.ring.invite import ALPHABET
from kafila.types import Address, NodeId

locators = st.text(ALPHABET, min_size=5, max_size=5)
nodes = st.binary(min_size=8, max_size=8).map(NodeId)
seats = st.integers(1, MAX_MEMBERS)
greetings = st.binary(max_size=100)
hosts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
addresses = st.builds(Address, hosts, st.integers(0, 65535))
rosters = st.lists(nodes, max_size=MAX_MEMBERS).map(tuple)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Create, locators, seats, greetings),
    st.builds(Join, locators),
    st.builds(Restore, locators, nodes, seats, greetings),
    st.builds(Send, st.one_of(st.none(), nodes), greetings),
    st.builds(Evict, nodes),
    st.builds(Ping),
    st.builds(Confirm, st.binary(min_size=16, max_size=16)),
    st.builds(Joined, nodes, seats, greetings, rosters, addresses),
    st.builds(MemberJoined, nodes),
    st.builds(MemberLeft, nodes, st.sampled_from(Departure)),
    st.builds(Signal, nodes, greetings),
    st.builds(Pong, addresses),
    st.builds(Refused, st.sampled_from(Reason)),
)


@given(messages)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


@given(messages)
def test_every_truncation_and_extension_is_refused(message: Message) -> None:
    encoded = encode(message)
    for length in range(len(encoded)):
        with pytest.raises(ProtocolError):
            decode(encoded[:length])
    with pytest.raises(ProtocolError):
        decode(encoded + b"\0")


@given(st.binary(max_size=300), st.sampled_from(sorted(control._LAYOUT)))
def test_arbitrary_bytes_decode_to_what_encodes_alike_or_are_refused(body: bytes, kind: int) -> None:
    for data in (body, bytes((VERSION, kind)) + body):
        with suppress(ProtocolError):
            message = decode(data)
            # Refused is read whatever its version, and written in ours.
            assert isinstance(message, OtherVersion | Refused) or encode(message) == data


@given(st.integers(0, 255).filter(lambda version: version != VERSION), st.binary(max_size=50))
def test_other_versions_are_recognised_and_their_refusals_understood(version: int, body: bytes) -> None:
    assert decode(bytes((version, 1)) + body) == OtherVersion(version)
    assert decode(bytes((version, 127, Reason.VERSION))) == Refused(Reason.VERSION)


@pytest.mark.parametrize(
    "message",
    [
        Create("AB3D", 2, b""),
        Create("AB3DU", 2, b""),
        Create("ab3de", 2, b""),
        Create("AB3DE", 0, b""),
        Create("AB3DE", MAX_MEMBERS + 1, b""),
        Create("AB3DE", 2, bytes(MAX_GREETING_BYTES + 1)),
        Send(None, bytes(MAX_SEALED_BYTES + 1)),
        Evict(NodeId(bytes(7))),
        Confirm(bytes(15)),
        Joined(NodeId(bytes(8)), 2, b"", (NodeId(bytes(8)),) * (MAX_MEMBERS + 1), Address("192.0.2.1", 1)),
    ],
)
def test_fields_out_of_bounds_are_not_sent(message: Message) -> None:
    with pytest.raises(ProtocolError):
        encode(message)


def test_fields_out_of_bounds_are_not_believed() -> None:
    valid = encode(Create("AB3DE", 2, b""))
    assert valid[2:8] == b"AB3DE\x02"
    for at, wrong in ((2, b"a"), (2, b"\xff"), (7, b"\0"), (7, bytes((MAX_MEMBERS + 1,))), (8, b"\xff")):
        with pytest.raises(ProtocolError):
            decode(valid[:at] + wrong + valid[at + 1 :])


def test_the_largest_messages_fit_their_limit() -> None:
    node = NodeId(bytes(8))
    address = Address("2001:db8::1", 1)
    largest: list[Message] = [
        Send(node, bytes(MAX_SEALED_BYTES)),
        Signal(node, bytes(MAX_SEALED_BYTES)),
        Joined(node, MAX_MEMBERS, bytes(MAX_GREETING_BYTES), (node,) * MAX_MEMBERS, address),
    ]
    assert all(len(encode(message)) <= control.MAX_CONTROL_BYTES for message in largest)


def test_the_layout_names_every_field_of_every_message() -> None:
    for message, layout in control._LAYOUT.values():
        assert len(fields(message)) == len(layout)
