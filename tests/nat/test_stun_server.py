"""The STUN responder: answers from the right socket, never to a forged source, never with more than it was sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.stun import Change, MessageClass, StunMessage, decode, encode
from kafila.nat.stun_server import Local, Reply, StunServer
from kafila.types import Address
from tests.nat.test_stun import addresses, messages

PRIMARY = Local(0, 0)
OPPOSITE = Local(1, 1)
FOUR_SOCKETS = StunServer(("192.0.2.1", "192.0.2.2"), (3478, 3479), bytes(16))
TWO_PORTS = StunServer(("0.0.0.0",), (3478, 3479), bytes(16))  # noqa: S104  - advertised, not bound
ONE_SOCKET = StunServer(("0.0.0.0",), (3478,), bytes(16))  # noqa: S104  - advertised, not bound
CLIENT = Address("198.51.100.9", 40000)
REQUEST = StunMessage(MessageClass.REQUEST, bytes(range(12)))
ROOM_FOR_ALL = 120  # the largest response, IPv6 in all its addresses


def answer(
    server: StunServer, request: StunMessage, *, to: Local = PRIMARY, source: Address = CLIENT, now: float = 0.0
) -> tuple[StunMessage, Local]:
    reply = server.respond(encode(request, at_least_bytes=ROOM_FOR_ALL), source, to, now)
    assert reply is not None
    message = decode(reply.data)
    assert message is not None
    return message, reply.local


@pytest.mark.parametrize("to", [Local(host, port) for host in (0, 1) for port in (0, 1)])
def test_a_plain_request_is_answered_from_where_it_went(to: Local) -> None:
    message, local = answer(FOUR_SOCKETS, REQUEST, to=to)
    assert local == to
    assert message.kind is MessageClass.SUCCESS
    assert message.transaction_id == REQUEST.transaction_id
    assert message.reflexive == CLIENT
    assert message.response_origin == Address(FOUR_SOCKETS.hosts[to.host], FOUR_SOCKETS.ports[to.port])
    assert message.other_address == Address(FOUR_SOCKETS.hosts[1 - to.host], FOUR_SOCKETS.ports[1 - to.port])


@pytest.mark.parametrize("to", [Local(host, port) for host in (0, 1) for port in (0, 1)])
@pytest.mark.parametrize("address", [False, True])
@pytest.mark.parametrize("port", [False, True])
def test_a_change_is_honoured_with_the_cookie(to: Local, address: bool, port: bool) -> None:
    nonce = answer(FOUR_SOCKETS, REQUEST, to=to)[0].nonce
    wanted = Local(to.host ^ address, to.port ^ port)
    message, local = answer(FOUR_SOCKETS, replace(REQUEST, change=Change(address, port), nonce=nonce), to=to)
    assert local == wanted
    assert message.response_origin == Address(FOUR_SOCKETS.hosts[wanted.host], FOUR_SOCKETS.ports[wanted.port])


def test_without_the_cookie_the_refusal_comes_from_the_socket_asked_and_brings_one() -> None:
    message, local = answer(FOUR_SOCKETS, replace(REQUEST, change=Change(True, True)))
    assert local == PRIMARY
    assert message.error is not None
    assert message.error.code == 438
    retried = replace(REQUEST, change=Change(True, True), nonce=message.nonce)
    assert answer(FOUR_SOCKETS, retried)[1] == OPPOSITE


@pytest.mark.parametrize(
    ("source", "later_s"),
    [(Address("198.51.100.9", 40001), 0.0), (Address("198.51.100.10", 40000), 0.0), (CLIENT, 121.0)],
)
def test_a_cookie_is_of_no_use_to_another_source_or_later(source: Address, later_s: float) -> None:
    nonce = answer(FOUR_SOCKETS, REQUEST)[0].nonce
    request = replace(REQUEST, change=Change(True, True), nonce=nonce)
    message, local = answer(FOUR_SOCKETS, request, source=source, now=later_s)
    assert (message.kind, local) == (MessageClass.ERROR, PRIMARY)


def test_a_cookie_outlives_the_turn_of_its_period() -> None:
    nonce = answer(FOUR_SOCKETS, REQUEST, now=59.9)[0].nonce
    request = replace(REQUEST, change=Change(True, True), nonce=nonce)
    assert answer(FOUR_SOCKETS, request, now=60.1)[1] == OPPOSITE


@pytest.mark.parametrize(
    ("server", "change"),
    [(TWO_PORTS, Change(True, True)), (ONE_SOCKET, Change(False, True)), (ONE_SOCKET, Change(True, False))],
)
def test_a_change_to_a_socket_that_is_not_there_is_refused(server: StunServer, change: Change) -> None:
    nonce = server.cookie(CLIENT, 0.0)
    message, local = answer(server, replace(REQUEST, change=change, nonce=nonce))
    assert (message.error.code if message.error else 0, local) == (420, PRIMARY)
    assert message.unknown_attributes == (0x0003,)


def test_a_server_with_one_address_advertises_the_other_port_on_the_host_asked() -> None:
    assert answer(TWO_PORTS, REQUEST)[0].other_address == Address("0.0.0.0", 3479)  # noqa: S104  - advertised
    assert answer(ONE_SOCKET, REQUEST)[0].other_address is None


def test_unknown_required_attributes_are_named() -> None:
    data = bytearray(encode(REQUEST, at_least_bytes=ROOM_FOR_ALL))
    data[20:22] = (0x7777).to_bytes(2, "big")  # SOFTWARE becomes something nobody knows
    del data[-8:]
    data[2:4] = (len(data) - 20).to_bytes(2, "big")
    reply = FOUR_SOCKETS.respond(bytes(data), CLIENT, PRIMARY, 0.0)
    assert reply is not None
    message = decode(reply.data)
    assert message is not None
    assert message.error is not None
    assert (message.error.code, message.unknown_attributes) == (420, (0x7777,))


def test_what_is_no_request_gets_no_answer() -> None:
    for kind in (MessageClass.INDICATION, MessageClass.SUCCESS, MessageClass.ERROR):
        assert FOUR_SOCKETS.respond(encode(replace(REQUEST, kind=kind)), CLIENT, PRIMARY, 0.0) is None


def test_a_reply_shrinks_to_the_request_and_keeps_the_reflexive_address_longest() -> None:
    sizes = {}
    for size in range(28, ROOM_FOR_ALL + 4, 4):
        data = encode(REQUEST, at_least_bytes=size)
        reply = FOUR_SOCKETS.respond(data, CLIENT, PRIMARY, 0.0)
        sizes[len(data)] = len(reply.data) if reply else 0
        if reply:
            message = decode(reply.data)
            assert message is not None
            assert message.reflexive == CLIENT
    assert sizes[28] == 0
    assert sizes[40] == 40
    assert all(reply <= request for request, reply in sizes.items())


@given(messages, addresses, st.booleans(), st.integers(0, 200))
def test_no_reply_is_larger_than_its_request(
    message: StunMessage, source: Address, with_cookie: bool, at_least: int
) -> None:
    nonce = FOUR_SOCKETS.cookie(source, 0.0) if with_cookie else message.nonce
    data = encode(replace(message, kind=MessageClass.REQUEST, nonce=nonce), at_least_bytes=at_least)
    reply = FOUR_SOCKETS.respond(data, source, PRIMARY, 0.0)
    assert reply is None or len(reply.data) <= len(data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise(data: bytes) -> None:
    reply: Reply | None = FOUR_SOCKETS.respond(data, CLIENT, PRIMARY, 0.0)
    assert reply is None or len(reply.data) <= len(data)
