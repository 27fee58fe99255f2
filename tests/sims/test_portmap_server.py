"""Gateways that answer NAT-PMP and PCP, asked byte by byte as the RFCs lay requests out."""

from __future__ import annotations

import struct
from ipaddress import ip_address

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kafila.types import Address
from sims.nat import Mapping
from sims.net import VirtualSocket
from sims.packet import Drop
from sims.portmap_server import MAX_LIFETIME_S, PORT, WRONG_HOST, Honesty, PortMapServer
from sims.topology import Nat, VirtualNetwork
from tests.sims.tools import at, mapped, reaches

NONCE = b"twelve bytes"
EXTERNAL_ADDRESS = b"\0\0"


def pmp_map(internal_port: int, wanted: int, lifetime_s: int) -> bytes:
    return struct.pack("!BBHHHI", 0, 1, 0, internal_port, wanted, lifetime_s)


def pcp_map(
    client: str, internal_port: int, lifetime_s: int, *, nonce: bytes = NONCE, protocol: int = 17, options: bytes = b""
) -> bytes:
    head = struct.pack("!BBHI", 2, 1, 0, lifetime_s) + as_v6(client)
    return head + nonce + struct.pack("!B3xHH", protocol, internal_port, 0) + as_v6("0.0.0.0") + options  # noqa: S104 - "any", in the RFC's words


def as_v6(host: str) -> bytes:
    return ip_address(f"::ffff:{host}").packed


class Bench:
    """A client behind a gateway with a server on it, and a stranger outside."""

    def __init__(self, honesty: Honesty = Honesty.HONEST, **kinds: bool) -> None:
        self.net = VirtualNetwork(seed=1)
        self.nat: Nat = self.net.nat("home", mapping=Mapping.APDM)
        self.server = self.nat.service = PortMapServer(honesty, **kinds)
        self.client = self.nat.machine("client")
        self.outside = self.net.machine("outside")
        self.inside: VirtualSocket
        self.stranger: VirtualSocket

    async def bind(self) -> None:
        self.inside, self.stranger = await self.client.bind(5000), await self.outside.bind()

    @property
    def own(self) -> str:
        return self.client.hosts()[0]

    async def ask(self, request: bytes, socket: VirtualSocket | None = None) -> bytes | None:
        socket = socket or self.inside
        (gateway,) = socket.machine.gateways()
        await socket.send(request, Address(gateway.host, PORT))
        with trio.move_on_after(1):
            reply, source = await socket.receive()
            assert source == Address(gateway.host, PORT)
            return reply
        return None


async def test_nat_pmp_external_address(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench()
    await b.bind()
    async with b.net.running():
        await trio.sleep(7)
        reply = await b.ask(EXTERNAL_ADDRESS)
        assert reply == struct.pack("!BBHI", 0, 128, 0, 7) + ip_address(b.nat.external_hosts[0]).packed


async def test_nat_pmp_maps_renews_and_unmaps(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench()
    await b.bind()
    async with b.net.running():
        external = Address(b.nat.external_hosts[0], 6000)
        assert await reaches(b.stranger, external, b.inside) is None
        assert await b.ask(pmp_map(5000, 6000, 100)) == struct.pack("!BBHIHHI", 0, 129, 0, 1, 5000, 6000, 100)
        assert await reaches(b.stranger, external, b.inside) == at(b.stranger)
        assert await mapped(b.inside, b.stranger) == external
        await trio.sleep(60)
        await b.ask(pmp_map(5000, 6000, 100))
        await trio.sleep(60)
        assert await reaches(b.stranger, external, b.inside)
        await b.ask(pmp_map(5000, 0, 0))
        assert await reaches(b.stranger, external, b.inside) is None


async def test_nat_pmp_unmaps_all_of_one_client_and_nobody_elses(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench()
    await b.bind()
    other = await b.nat.machine("other").bind(5000)
    async with b.net.running():
        await b.ask(pmp_map(5000, 6000, 100))
        await b.ask(pmp_map(5001, 6001, 100))
        await b.ask(pmp_map(5000, 6002, 100), other)
        assert await b.ask(pmp_map(0, 0, 0)) == struct.pack("!BBHIHHI", 0, 129, 0, 0, 0, 0, 0)
        assert b.nat.external_hosts
        assert await reaches(b.stranger, Address(b.nat.external_hosts[0], 6000), b.inside) is None
        assert await reaches(b.stranger, Address(b.nat.external_hosts[0], 6002), other)


async def test_a_taken_port_is_not_given_twice(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench()
    await b.bind()
    other = await b.nat.machine("other").bind(5000)
    async with b.net.running():
        await b.ask(pmp_map(5000, 6000, 100))
        reply = await b.ask(pmp_map(5000, 6000, 100), other)
        assert reply is not None
        (port,) = struct.unpack_from("!H", reply, 10)
        assert port != 6000
        assert await reaches(b.stranger, Address(b.nat.external_hosts[0], port), other)


async def test_pcp_maps_and_unmaps(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench()
    await b.bind()
    async with b.net.running():
        reply = await b.ask(pcp_map(b.own, 5000, 10**6))
        assert reply is not None
        assert reply[:24] == struct.pack("!BBBBII12x", 2, 129, 0, 0, MAX_LIFETIME_S, 0)
        assert reply[24:42] == NONCE + struct.pack("!B3xH", 17, 5000)
        external = Address(b.nat.external_hosts[0], int.from_bytes(reply[42:44]))
        assert reply[44:] == as_v6(external.host)
        assert await reaches(b.stranger, external, b.inside)
        stolen = await b.ask(pcp_map(b.own, 5000, 0, nonce=b"another nonc"))
        assert stolen is not None
        assert stolen[3] == 2  # NOT_AUTHORIZED
        assert await reaches(b.stranger, external, b.inside)
        gone = await b.ask(pcp_map(b.own, 5000, 0))
        assert gone is not None
        assert gone[:8] == struct.pack("!BBBBI", 2, 129, 0, 0, 0)
        assert await reaches(b.stranger, external, b.inside) is None
        reply = await b.ask(pcp_map(b.own, 5000, 60, nonce=b"another nonc"))
        assert reply is not None
        assert reply[3] == 0


@pytest.mark.parametrize(
    ("code", "request_"),
    [
        (12, pcp_map("192.168.1.99", 5000, 60)),
        (9, pcp_map("192.168.1.10", 5000, 60, protocol=6)),
        (5, pcp_map("192.168.1.10", 5000, 60, options=b"\x02\0\0\0")),
        (0, pcp_map("192.168.1.10", 5000, 60, options=b"\x80\0\0\x04abcd")),
        (0, struct.pack("!BBHI", 2, 0, 0, 0) + as_v6("192.168.1.10")),
        (4, struct.pack("!BBHI", 2, 9, 0, 0) + as_v6("192.168.1.10")),
        (3, pcp_map("192.168.1.10", 5000, 60)[:40]),
        (3, pcp_map("192.168.1.10", 5000, 60)[:13]),
        (3, pcp_map("192.168.1.10", 5000, 60, options=bytes(1200))),
    ],
)
async def test_pcp_result_codes(autojump_clock: trio.testing.MockClock, code: int, request_: bytes) -> None:
    b = Bench()
    await b.bind()
    async with b.net.running():
        reply = await b.ask(request_)
        assert reply is not None
        assert (reply[0], reply[1], reply[3]) == (2, request_[1] | 0x80, code)


async def test_each_protocol_names_the_version_it_speaks(autojump_clock: trio.testing.MockClock) -> None:
    """RFC 6887 section 9 and appendix A: how a client finds out which of the two to use."""
    only_pmp, only_pcp = Bench(pcp=False), Bench(nat_pmp=False)
    for b, request, expected in (
        (only_pmp, pcp_map(only_pmp.own, 5000, 60), struct.pack("!BBHI", 0, 129, 1, 0)),
        (only_pcp, EXTERNAL_ADDRESS, struct.pack("!BBBBII12x", 2, 128, 0, 1, 0, 0)),
    ):
        await b.bind()
        async with b.net.running():
            reply = await b.ask(request)
            assert reply is not None
            assert reply[:4] == expected[:4]
            assert len(reply) == len(expected)


async def test_a_reboot_restarts_the_epoch_and_forgets(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench()
    await b.bind()
    async with b.net.running():
        await b.ask(pmp_map(5000, 6000, 1000))
        await trio.sleep(50)
        b.nat.reboot()
        await trio.sleep(3)
        reply = await b.ask(EXTERNAL_ADDRESS)
        assert reply is not None
        assert int.from_bytes(reply[4:8]) == 3
        assert await reaches(b.stranger, Address(b.nat.external_hosts[0], 6000), b.inside) is None


async def test_it_says_yes_and_does_nothing(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench(Honesty.NO_MAPPING)
    await b.bind()
    async with b.net.running():
        assert await b.ask(pmp_map(5000, 6000, 100)) == struct.pack("!BBHIHHI", 0, 129, 0, 0, 5000, 6000, 100)
        assert await reaches(b.stranger, Address(b.nat.external_hosts[0], 6000), b.inside) is None


async def test_it_names_an_address_that_is_not_its_own(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench(Honesty.WRONG_ADDRESS)
    await b.bind()
    async with b.net.running():
        reply = await b.ask(pcp_map(b.own, 5000, 60))
        assert reply is not None
        assert reply[44:] == as_v6(WRONG_HOST)
        reply = await b.ask(EXTERNAL_ADDRESS)
        assert reply is not None
        assert reply[8:] == ip_address(WRONG_HOST).packed


async def test_it_refuses_or_keeps_silent(autojump_clock: trio.testing.MockClock) -> None:
    refuses, silent = Bench(Honesty.REFUSES), Bench(Honesty.SILENT)
    await refuses.bind()
    await silent.bind()
    async with refuses.net.running(), silent.net.running():
        for request, code_at in ((EXTERNAL_ADDRESS, 3), (pmp_map(1, 1, 1), 3), (pcp_map(refuses.own, 1, 1), 3)):
            reply = await refuses.ask(request)
            assert reply is not None
            assert reply[code_at] == 2  # NOT_AUTHORIZED in both protocols
        assert await silent.ask(EXTERNAL_ADDRESS) is None
        assert silent.server.requests == 1


async def test_the_gateway_answers_nothing_else(autojump_clock: trio.testing.MockClock) -> None:
    b = Bench()
    await b.bind()
    async with b.net.running():
        (gateway,) = b.client.gateways()
        await b.inside.send(b"", Address(gateway.host, 53))
        b.nat.service = None
        assert await b.ask(EXTERNAL_ADDRESS) is None
        assert b.net.drops[Drop.NO_SERVICE] == 2


async def test_behind_two_nats_the_inner_one_names_a_private_address(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    home = net.cgnat().nat("home")
    home.service = PortMapServer()
    reply = home.service.answer(EXTERNAL_ADDRESS, Address("192.168.1.10", 1), home, 0.0)
    assert reply is not None
    assert ip_address(reply[8:]) == ip_address(home.external_hosts[0])
    assert home.external_hosts[0].startswith("100.64.")


@given(st.binary(max_size=80), st.sampled_from([b"", b"\0\0", b"\0\1", b"\2\0", b"\2\1"]))
def test_arbitrary_requests_never_raise(tail: bytes, head: bytes) -> None:
    home = VirtualNetwork().nat("home")
    reply = PortMapServer().answer(head + tail, Address("192.168.1.10", 1), home, 0.0)
    assert reply is None or reply[1] & 0x80
