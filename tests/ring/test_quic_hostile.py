"""Frames nobody would send, under keys that hold: whoever they come from, nothing raises."""

from __future__ import annotations

import struct

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicProtocolVersion
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring.quic import QuicConnection, Stream
from tests.ring.wire import ALPN, CLIENT, IDENTITIES, SERVER, START_S, established_wire, fresh_wire

# Frame types of RFC 9000 section 19 and RFC 9221, their neighbours, and numbers of every size after them.
numbers = st.one_of(st.integers(0, 70), st.sampled_from([2**6, 2**14 - 1, 2**30, 2**32, 2**60, 2**62 - 1]))
kinds = st.one_of(st.integers(0, 0x40), st.just(2**30))
frames = st.builds(
    lambda kind, fields, tail: encode_uint_var(kind) + b"".join(map(encode_uint_var, fields)) + tail,
    kinds,
    st.lists(numbers, max_size=8),
    st.binary(max_size=60),
)
payloads = st.one_of(st.binary(max_size=200), st.lists(frames, max_size=4).map(b"".join))


@given(st.lists(payloads, min_size=1, max_size=6), st.sampled_from([CLIENT, SERVER]))
def test_arbitrary_frames_of_an_authenticated_peer_never_raise(hostile: list[bytes], victim: int) -> None:
    wire = established_wire()
    peer = wire.ends[1 - victim]._core
    assert peer is not None
    seal = peer._sealer()
    wire.ends[victim].send(Stream.BULK, bytes(5000))
    for payload in hostile:
        wire.deliver(victim, [seal(peer._packet_number, payload.ljust(4, b"\0"))])
        peer._packet_number += 1
        wire.flying[1 - victim].clear()
    for _ in range(3):
        wire.wait(1.0)
        wire.flying[1 - victim].clear()


def initial(payload: bytes, destination: bytes, number: int) -> bytes:
    """An Initial packet that anyone can make: its keys follow from the connection id (RFC 9001 section 5.2)."""
    keys = CryptoPair()
    keys.setup_initial(cid=destination, is_client=True, version=QuicProtocolVersion.VERSION_1)
    payload = payload.ljust(1150, b"\0")
    header = (
        struct.pack(">BI", 0xC1, QuicProtocolVersion.VERSION_1)
        + bytes((len(destination),))
        + destination
        + b"\x08attacker"
        + b"\0"
        + (0x4000 | (len(payload) + 2 + 16)).to_bytes(2, "big")
        + number.to_bytes(2, "big")
    )
    return keys.encrypt_packet(header, payload, number)


@given(st.lists(payloads, min_size=1, max_size=4))
def test_arbitrary_frames_before_the_handshake_never_raise(hostile: list[bytes]) -> None:
    server = QuicConnection.server(IDENTITIES[SERVER], None, START_S, alpn=ALPN)
    for number, payload in enumerate(hostile):
        server.receive([initial(payload, b"8 bytes.", number)], START_S)
        server.datagrams_to_send(START_S)
    while (due := server.next_timer()) is not None:
        server.handle_timer(due)
        server.datagrams_to_send(due)


@given(st.binary(max_size=600), st.integers(0, 300))
def test_an_arbitrary_client_hello_never_raises(hello: bytes, cut: int) -> None:
    client = QuicConnection.client(IDENTITIES[CLIENT], None, START_S, alpn=ALPN)
    core = client._core
    assert core is not None
    real = bytes(core._crypto_streams[next(iter(core._crypto_streams))].sender._buffer)
    mixed = real[:cut] + hello
    framed = b"\x06\0" + encode_uint_var(len(mixed)) + mixed
    server = QuicConnection.server(IDENTITIES[SERVER], None, START_S, alpn=ALPN)
    server.receive([initial(framed, b"8 bytes.", 0)], START_S)
    server.datagrams_to_send(START_S)


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")  # of serial numbers
@given(st.binary(max_size=1000), st.integers(0, 1000))
def test_arbitrary_handshake_messages_never_raise(junk: bytes, cut: int) -> None:
    """A peer with handshake keys that has proved nothing yet."""
    wire = fresh_wire()
    wire.flush()
    wire.deliver(SERVER, wire.flying[SERVER])
    server = wire.ends[SERVER]._core
    assert server is not None
    for stream in server._crypto_streams.values():
        sender = stream.sender
        sender._buffer[cut : cut + len(junk)] = junk[: max(0, len(sender._buffer) - cut)]
    wire.ends[SERVER].handle_timer(wire.now + 1)
    wire.now += 1
    wire.flying[CLIENT].clear()
    wire.flush()
    wire.settle(3.0)
