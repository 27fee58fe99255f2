"""The builder: distances, partitions, names, IPv6 through two gateways."""

from __future__ import annotations

import pytest
import trio

from kafila.types import Address
from sims.link import Quality
from sims.packet import Drop
from sims.topology import VirtualNetwork
from tests.sims.tools import at, mapped, reaches


async def test_round_trip_times_are_what_was_said(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(rtt_s=0.060)
    server, a = net.machine("server"), net.nat().machine("a")
    b = net.cgnat().nat().machine("b")
    net.rtt(a, b, 0.040)
    net.path(b, server).set(latency_s=0.1)
    sockets = {m.name: await m.bind(5000) for m in (server, a, b)}
    async with net.running():
        for sender, expected in (("a", 0.030), ("b", 0.100)):
            start = trio.current_time()
            await mapped(sockets[sender], sockets["server"])
            assert trio.current_time() - start == pytest.approx(expected)
    assert net.path(a, b).quality.latency_s == 0.020
    assert net.path(b, a).quality.latency_s == 0.020


async def test_access_links(autojump_clock: trio.testing.MockClock) -> None:
    """A home's uplink and a machine's own cable add up."""
    net = VirtualNetwork(rtt_s=0.0)
    home = net.nat(up=Quality(latency_s=0.01), down=Quality(latency_s=0.02))
    a = await home.machine("a", up=Quality(latency_s=0.1), down=Quality(latency_s=0.2)).bind()
    server = await net.machine("server").bind()
    async with net.running():
        source = await mapped(a, server)
        assert trio.current_time() == pytest.approx(0.11)
        await server.send(b"", source)
        await a.receive()
        assert trio.current_time() == pytest.approx(0.33)


async def test_a_partition_on_a_schedule(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    names = ("a", "b", "c")
    a, b, c = [await net.machine(name).bind() for name in names]
    net.partition([a.machine], [b.machine, c.machine], 10, 20)
    async with net.running():
        for time, joined in ((5, True), (12, False), (25, True)):
            await trio.sleep_until(time)
            for one, other in ((a, b), (b, a), (a, c), (c, a)):
                assert (await reaches(one, at(other), other) is not None) == joined
            assert await reaches(b, at(c), c)


async def test_a_one_way_black_hole(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    a, b = await net.machine("a").bind(), await net.machine("b").bind()
    net.path(a.machine, b.machine).up = False
    async with net.running():
        assert await reaches(a, at(b), b) is None
        assert await reaches(b, at(a), a)


async def test_ipv6_behind_two_gateways(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    home = net.nat("outer", ipv6=True).nat("inner", ipv6=True)
    a = await home.machine("a").bind()
    b = await net.nat(ipv6=True).machine("b", v4=False).bind()
    async with net.running():
        assert len(b.machine.hosts()) == 1
        assert await reaches(a, at(b), b) is None
        assert await reaches(b, at(a, host=1), a) == at(b)
        assert await reaches(a, at(b), b) == at(a, host=1)
        unused = at(b).host.rsplit(":", 1)[0] + ":7777"
        assert await reaches(a, Address(unused, 1), b) is None
        assert net.drops[Drop.FIREWALL] == 2


def test_names_and_addresses_are_unique() -> None:
    net = VirtualNetwork()
    home = net.nat("home", lan="192.168.1.0/24")
    home.machine("a", host="192.168.1.50")
    with pytest.raises(ValueError, match="two things on the network are called a"):
        net.machine("a")
    with pytest.raises(ValueError, match=r"192\.168\.1\.50 is taken on home by a"):
        home.machine("b", host="192.168.1.50")
    with pytest.raises(ValueError, match="home has no IPv6 network"):
        home.machine("c", v6=True)
    assert net.machines["a"].hosts() == ["192.168.1.50"]


def test_there_is_no_path_within_a_site_nor_from_nowhere() -> None:
    net = VirtualNetwork()
    home = net.nat("home")
    a, b, lost = home.machine("a"), home.nat("inner").machine("b"), net.private_lan("lab", "10.1.0.0/16").machine("c")
    with pytest.raises(ValueError, match="a and b are both at home"):
        net.path(a, b)
    with pytest.raises(ValueError, match="c is on lab, which has no way to the Internet"):
        net.path(a, lost)


def test_private_networks_do_not_run_out() -> None:
    net = VirtualNetwork()
    hosts = {net.nat().machine(f"m{n}").hosts()[0] for n in range(600)}
    assert len(hosts) == 600


def test_a_lan_can_be_full() -> None:
    home = VirtualNetwork().nat(lan="192.168.1.0/28")
    for number in range(10, 15):
        home.machine(f"m{number}")
    with pytest.raises(ValueError, match=r"192\.168\.1\.0/28 has no address left"):
        home.machine("one too many")
