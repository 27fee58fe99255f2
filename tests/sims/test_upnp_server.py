"""The virtual gateway that speaks UPnP: what it opens is open, what it only claims is not, and it bears nonsense."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from kafila.nat.driver import keep_port_open
from kafila.nat.portmap import PortMapEvent, PortMapped, PortNotMapped
from kafila.types import Address
from sims.filtering import Filtering
from sims.nat import Mapping
from sims.portmap_server import WRONG_HOST, Honesty
from sims.topology import VirtualNetwork
from sims.upnp_server import HTTP_PORT, UpnpServer

PORT = 40_000


class Home:
    """A member behind a NAT that cannot be punched, and a stranger outside."""

    def __init__(self, honesty: Honesty) -> None:
        self.net = VirtualNetwork(seed=1)
        self.nat = self.net.nat("home", mapping=Mapping.APDM, filtering=Filtering.APDF)
        self.member = self.nat.machine("member")
        self.stranger = self.net.machine("stranger")
        self.nat.service = self.server = UpnpServer(honesty)
        self.events: list[PortMapEvent] = []

    @property
    def gateway(self) -> str:
        return self.member.gateways()[0].host

    async def keep(self) -> None:
        streams = self.server.streams(self.nat)
        await keep_port_open(self.member, self.gateway, PORT, self.events.append, open_stream=streams)

    async def gets_through(self) -> bool:
        """Whether a stranger's datagram to the gateway's port reaches the member."""
        inside, outside = await self.member.bind(PORT), await self.stranger.bind()
        await outside.send(b"knock", Address(self.nat.external_hosts[0], PORT))
        with trio.move_on_after(1.0):
            return (await inside.receive())[0] == b"knock"
        return False


async def after_asking(home: Home, then: Callable[[], Awaitable[object]]) -> None:
    async with home.net.running(), trio.open_nursery() as nursery:
        nursery.start_soon(home.keep)
        await trio.sleep(2.0)
        await then()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("honesty", "external", "is_open"),
    [
        (Honesty.HONEST, None, True),
        (Honesty.NO_MAPPING, None, False),
        (Honesty.WRONG_ADDRESS, WRONG_HOST, True),
    ],
)
async def test_what_is_claimed_and_what_is_so(
    honesty: Honesty, external: str | None, is_open: bool, autojump_clock: MockClock
) -> None:
    home = Home(honesty)

    async def look() -> None:
        (event,) = home.events
        assert isinstance(event, PortMapped)
        assert event.external == Address(external or home.nat.external_hosts[0], PORT)
        assert await home.gets_through() is is_open

    await after_asking(home, look)


@pytest.mark.parametrize("honesty", [Honesty.SILENT, Honesty.REFUSES])
async def test_a_router_that_will_not_is_believed(honesty: Honesty, autojump_clock: MockClock) -> None:
    home = Home(honesty)

    async def look() -> None:
        assert [type(event) for event in home.events] == [PortNotMapped]
        assert not await home.gets_through()

    await after_asking(home, look)


async def test_a_port_is_given_back(autojump_clock: MockClock) -> None:
    home = Home(Honesty.HONEST)

    async def look() -> None:
        assert home.nat.table.explicit_ports(home.member.hosts()[0], trio.current_time())  # type: ignore[union-attr]  # a NatTable

    await after_asking(home, look)
    assert not home.nat.table.explicit_ports(home.member.hosts()[0], 10.0)  # type: ignore[union-attr]  # as above


async def test_nobody_listens_elsewhere_and_nonsense_is_refused(autojump_clock: MockClock) -> None:
    home = Home(Honesty.HONEST)
    open_stream = home.server.streams(home.nat)
    for host, port in ((home.gateway, 80), ("192.168.77.1", HTTP_PORT)):
        with pytest.raises(ConnectionRefusedError, match="nobody listens"):
            await open_stream(host, port)
    stream = await open_stream(home.gateway, HTTP_PORT)
    await stream.send_all(b"POST /control HTTP/1.1\r\n\r\nnonsense")
    assert (await stream.receive_some()).startswith(b"HTTP/1.1 400")
    assert await stream.receive_some() == b""
