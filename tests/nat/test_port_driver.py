"""Keeping a port open as deployed: PCP over the virtual network, UPnP over streams in memory."""

from __future__ import annotations

from random import Random

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from kafila.nat.driver import keep_port_open, system_gateways
from kafila.nat.portmap import PortMapEvent, PortMapped, PortNotMapped
from kafila.nat.report import PortMappingProtocol
from kafila.nat.upnp_messages import SSDP_PORT
from kafila.types import Address
from sims.filtering import Filtering
from sims.gateway import Gateway
from sims.nat import Mapping
from sims.net import Machine
from sims.portmap_server import Honesty, PortMapServer
from sims.topology import Nat, VirtualNetwork
from tests.nat.fake_igd import FakeIgd

STRANGER_PORT = 5000


class Home:
    """A member behind a symmetric NAT whose gateway may be asked for ports, and a stranger outside."""

    def __init__(self) -> None:
        self.net = VirtualNetwork(seed=1)
        self.nat: Nat = self.net.nat("home", mapping=Mapping.APDM, filtering=Filtering.APDF)
        self.member: Machine = self.nat.machine("member")
        self.stranger = self.net.machine("stranger")
        self.gateway = self.member.gateways()[0].host
        self.events: list[PortMapEvent] = []

    async def keep(self, port: int, open_stream: FakeTcp | None = None) -> None:
        await keep_port_open(
            self.member,
            self.gateway,
            port,
            self.events.append,
            open_stream=open_stream,
            random_bytes=Random(1).randbytes,
        )

    async def gets_through(self, external: Address, port: int) -> bool:
        """Whether a stranger's datagram to ``external`` reaches ``port`` of the member."""
        inside, outside = await self.member.bind(port), await self.stranger.bind(STRANGER_PORT)
        await outside.send(b"knock", external)
        arrived = False
        with trio.move_on_after(1.0):
            arrived = (await inside.receive())[0] == b"knock"
        inside.close()
        outside.close()
        return arrived


class FakeTcp:
    """Opens streams to a UPnP gateway in memory."""

    def __init__(self, igd: FakeIgd, nursery: trio.Nursery, *, answers: bool = True) -> None:
        self.igd, self._nursery, self._answers = igd, nursery, answers

    async def __call__(self, host: str, port: int) -> trio.abc.Stream:
        assert port == 5000
        near, far = memory_stream_pair()
        self._nursery.start_soon(self._serve, far)
        await trio.lowlevel.checkpoint()
        return near

    async def _serve(self, stream: trio.abc.Stream) -> None:
        data = await stream.receive_some(65_536)
        if self._answers:
            answer = self.igd.serve(bytes(data))
            await stream.send_all(answer[:50])
            await stream.send_all(answer[50:])
        else:
            await trio.sleep_forever()


class Ssdp:
    """The gateway's answers to searches, where the virtual gateway has its port-mapping server."""

    port = SSDP_PORT

    def __init__(self, igd: FakeIgd) -> None:
        self.igd = igd

    def answer(self, request: bytes, source: Address, gateway: Gateway, now: float) -> bytes | None:
        return self.igd.search(request)

    def reboot(self, now: float) -> None:
        self.igd.mappings.clear()


async def test_a_port_that_a_gateway_opens_lets_a_stranger_in_until_it_is_given_back(autojump_clock: MockClock) -> None:
    home = Home()
    home.nat.service = PortMapServer()
    async with home.net.running(), trio.open_nursery() as nursery:
        nursery.start_soon(home.keep, 40_000)
        await trio.sleep(0.3)
        (event,) = home.events
        assert isinstance(event, PortMapped)
        assert event.protocol is PortMappingProtocol.PCP
        assert await home.gets_through(event.external, 40_000)
        await trio.sleep(20_000)
        assert await home.gets_through(event.external, 40_000)
        assert len(home.events) == 1
        nursery.cancel_scope.cancel()
    async with home.net.running():
        await trio.sleep(0.1)
        assert not await home.gets_through(event.external, 40_000)


async def test_a_lie_is_reported_like_the_truth_and_lets_nobody_in(autojump_clock: MockClock) -> None:
    home = Home()
    home.nat.service = PortMapServer(Honesty.NO_MAPPING)
    async with home.net.running(), trio.open_nursery() as nursery:
        nursery.start_soon(home.keep, 40_000)
        await trio.sleep(0.3)
        (event,) = home.events
        assert isinstance(event, PortMapped)
        assert not await home.gets_through(event.external, 40_000)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("service", [None, PortMapServer(Honesty.SILENT), PortMapServer(Honesty.REFUSES)])
async def test_no_port_is_known_within_the_budget(service: PortMapServer | None, autojump_clock: MockClock) -> None:
    home = Home()
    home.nat.service = service
    async with home.net.running(), trio.open_nursery() as nursery:
        nursery.start_soon(home.keep, 40_000)
        await trio.sleep(0.3)
        (event,) = home.events
        assert isinstance(event, PortNotMapped)
        nursery.cancel_scope.cancel()


async def test_upnp_is_tried_where_nothing_better_answers_and_given_back(autojump_clock: MockClock) -> None:
    home, igd = Home(), FakeIgd()
    igd.location = igd.location.replace("192.168.1.1", home.gateway)
    home.nat.service = Ssdp(igd)
    async with home.net.running(), trio.open_nursery() as tcp:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(home.keep, 40_000, FakeTcp(igd, tcp))
            await trio.sleep(0.6)
            assert home.events == [PortMapped(Address("11.0.0.9", 40_000), PortMappingProtocol.UPNP)]
            assert igd.mappings[40_000]["NewInternalClient"] == home.member.hosts()[0]
            nursery.cancel_scope.cancel()
        tcp.cancel_scope.cancel()
    assert igd.mappings == {}


async def test_a_upnp_gateway_that_hangs_is_given_up(autojump_clock: MockClock) -> None:
    home, igd = Home(), FakeIgd()
    igd.location = igd.location.replace("192.168.1.1", home.gateway)
    home.nat.service = Ssdp(igd)
    async with home.net.running(), trio.open_nursery() as nursery:
        nursery.start_soon(home.keep, 40_000, FakeTcp(igd, nursery, answers=False))
        await trio.sleep(5.0)
        assert home.events == [PortNotMapped("the gateway describes no port mapping")]
        nursery.cancel_scope.cancel()


async def test_a_gateway_that_refuses_connections_is_given_up(autojump_clock: MockClock) -> None:
    home, igd = Home(), FakeIgd()
    igd.location = igd.location.replace("192.168.1.1", home.gateway)
    home.nat.service = Ssdp(igd)

    async def refuse(_host: str, _port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise ConnectionRefusedError("nobody listens")

    async with home.net.running(), trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: keep_port_open(home.member, home.gateway, 40_000, home.events.append, open_stream=refuse)
        )
        await trio.sleep(1.0)
        assert [type(event) for event in home.events] == [PortNotMapped]
        nursery.cancel_scope.cancel()


async def test_this_machine_says_what_its_gateways_are() -> None:
    assert all(gateway.count(".") == 3 for gateway in await system_gateways())
