"""NATs as RFC 4787 defines them, by sending packets through them and looking at what arrives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio

from kafila.types import Address
from sims.filtering import Filtering
from sims.nat import FilterScope, Hairpin, Mapping, Refresh
from sims.net import Machine, VirtualSocket
from sims.packet import Drop
from sims.ports import Preserving, RandomPorts, Sequential
from sims.topology import Nat, VirtualNetwork
from tests.sims.tools import at, mapped, reaches


@dataclass
class Bench:
    """A client behind a NAT and two servers, the first with two ports."""

    net: VirtualNetwork
    nat: Nat
    client: Machine
    inside: VirtualSocket
    first: VirtualSocket
    first_other_port: VirtualSocket
    second: VirtualSocket

    @property
    def servers(self) -> list[VirtualSocket]:
        return [self.first, self.first_other_port, self.second]


async def bench(net: VirtualNetwork, nat: Nat) -> Bench:
    one, two, client = net.machine("one"), net.machine("two"), nat.machine("client")
    sockets = [await one.bind(1111), await one.bind(2222), await two.bind(1111)]
    return Bench(net, nat, client, await client.bind(5000), *sockets)


@pytest.mark.parametrize(
    ("mapping", "same_port_as_first"),
    [(Mapping.EIM, (True, True)), (Mapping.ADM, (True, False)), (Mapping.APDM, (False, False))],
)
async def test_mapping(
    autojump_clock: trio.testing.MockClock, mapping: Mapping, same_port_as_first: tuple[bool, bool]
) -> None:
    """RFC 4787 section 4.1, by RFC 5780 section 4.3's three probes."""
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(mapping=mapping))
        first, other_port, other_host = [await mapped(b.inside, server) for server in b.servers]
        assert (first == other_port, first == other_host) == same_port_as_first
        assert [await mapped(b.inside, server) for server in b.servers] == [first, other_port, other_host]


@pytest.mark.parametrize("mapping", Mapping)
@pytest.mark.parametrize(
    ("filtering", "passes"),
    [(Filtering.EIF, (True, True)), (Filtering.ADF, (True, False)), (Filtering.APDF, (False, False))],
)
async def test_filtering(
    autojump_clock: trio.testing.MockClock, mapping: Mapping, filtering: Filtering, passes: tuple[bool, bool]
) -> None:
    """RFC 4787 section 5: after sending to one port of one server, who may answer?"""
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(mapping=mapping, filtering=filtering))
        external = await mapped(b.inside, b.first)
        assert await reaches(b.first, external, b.inside) == at(b.first)
        answers = [await reaches(s, external, b.inside) for s in (b.first_other_port, b.second)]
        assert tuple(answer is not None for answer in answers) == passes


@pytest.mark.parametrize("mapping", [Mapping.ADM, Mapping.APDM])
@pytest.mark.parametrize("filtering", Filtering)
@pytest.mark.parametrize("scope", FilterScope)
async def test_filter_scope(
    autojump_clock: trio.testing.MockClock, mapping: Mapping, filtering: Filtering, scope: FilterScope
) -> None:
    """Two mappings of one endpoint: does having sent to the second server let it in at the first's mapping?"""
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(mapping=mapping, filtering=filtering, scope=scope))
        to_first, to_second = await mapped(b.inside, b.first), await mapped(b.inside, b.second)
        assert to_first != to_second
        crossed = await reaches(b.second, to_first, b.inside)
        assert (crossed is not None) == (filtering is Filtering.EIF or scope is FilterScope.ENDPOINT)
        other_endpoint = await b.client.bind(6000)
        assert await reaches(b.second, await mapped(other_endpoint, b.first), other_endpoint) is None or (
            filtering is Filtering.EIF
        )


@pytest.mark.parametrize(("refresh", "alive"), [(Refresh.BOTH, True), (Refresh.OUTBOUND, False)])
async def test_inbound_packets_refresh_or_not(
    autojump_clock: trio.testing.MockClock, refresh: Refresh, alive: bool
) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(timeout_s=30.0, refresh=refresh))
        external = await mapped(b.inside, b.first)
        await trio.sleep(20)
        assert await reaches(b.first, external, b.inside)
        await trio.sleep(20)
        assert (await reaches(b.first, external, b.inside) is not None) == alive


async def test_a_mapping_times_out_and_sending_keeps_it(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(timeout_s=30.0, ports=RandomPorts(), refresh=Refresh.OUTBOUND))
        external = await mapped(b.inside, b.first)
        for _ in range(4):
            await trio.sleep(25)
            assert await mapped(b.inside, b.first) == external
        await trio.sleep(31)
        assert await reaches(b.first, external, b.inside) is None
        assert net.drops[Drop.NO_MAPPING] == 1
        assert await mapped(b.inside, b.first) != external


async def test_a_permission_times_out_of_a_mapping_that_others_keep(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(timeout_s=30.0))
        external = await mapped(b.inside, b.first)
        for _ in range(2):
            await trio.sleep(20)
            await mapped(b.inside, b.second)
        assert await reaches(b.second, external, b.inside)
        assert await reaches(b.first, external, b.inside) is None
        assert net.drops[Drop.FILTERED] == 1


async def test_ports_are_preserved_until_they_collide(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(ports=Preserving()))
        rival = await b.nat.machine("rival").bind(5000)
        assert (await mapped(b.inside, b.first)).port == 5000
        assert (await mapped(rival, b.first)).port != 5000


@pytest.mark.parametrize("step", [1, 2, -1])
async def test_sequential_ports(autojump_clock: trio.testing.MockClock, step: int) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(mapping=Mapping.APDM, ports=Sequential(step)))
        ports = [(await mapped(b.inside, server)).port for server in b.servers]
        assert ports == [ports[0], ports[0] + step, ports[0] + 2 * step]


@pytest.mark.parametrize("hairpin", Hairpin)
async def test_hairpin(autojump_clock: trio.testing.MockClock, hairpin: Hairpin) -> None:
    """RFC 4787 section 6: two clients of one NAT, one sending to the other's external address."""
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(hairpin=hairpin, filtering=Filtering.EIF))
        neighbour = await b.nat.vlan("next door").machine("neighbour").bind(7000)
        external = await mapped(neighbour, b.first)
        expected = {
            Hairpin.OFF: None,
            Hairpin.EXTERNAL_SOURCE: await mapped(b.inside, b.first),
            Hairpin.INTERNAL_SOURCE: at(b.inside),
        }
        assert await reaches(b.inside, external, neighbour) == expected[hairpin]


async def test_hairpinned_packets_are_filtered_as_others_are(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(hairpin=Hairpin.EXTERNAL_SOURCE, filtering=Filtering.APDF))
        neighbour = await b.nat.machine("neighbour").bind(7000)
        external, neighbours = await mapped(b.inside, b.first), await mapped(neighbour, b.first)
        assert await reaches(b.inside, neighbours, neighbour) is None
        assert await reaches(neighbour, external, b.inside) == neighbours
        assert await reaches(b.inside, neighbours, neighbour) == external


async def test_vlans_are_apart_unless_the_gateway_routes_between_them(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat())
        guest = await b.nat.vlan("guest").machine("guest").bind(7000)
        assert await reaches(b.inside, at(guest), guest) is None
        assert net.drops[Drop.ISOLATED] == 1
        b.nat.routes_between_lans = True
        assert await reaches(b.inside, at(guest), guest) == at(b.inside)


async def test_clients_of_an_isolated_lan_reach_the_world_only(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat(isolated=True))
        neighbour = await b.nat.machine("neighbour").bind(7000)
        assert await reaches(b.inside, at(neighbour), neighbour) is None
        assert await mapped(b.inside, b.first)


async def test_reboot_forgets_and_may_change_the_address(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat("home", ports=RandomPorts(), filtering=Filtering.EIF))
        before = await mapped(b.inside, b.first)
        b.nat.reboot(outage_s=10.0, new_address=True)
        assert await reaches(b.inside, at(b.first), b.first) is None
        assert net.drops[Drop.REBOOTING] == 1
        await trio.sleep(10)
        assert await reaches(b.first, before, b.inside) is None
        assert net.drops[Drop.NO_ROUTE] == 1
        after = await mapped(b.inside, b.first)
        assert after.host != before.host
        assert after.port != before.port
        assert await reaches(b.first, after, b.inside) == at(b.first)


@pytest.mark.parametrize("keep_old", [True, False])
async def test_a_mapping_moves_and_its_old_half_may_live_on(
    autojump_clock: trio.testing.MockClock, keep_old: bool
) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat())
        before = await mapped(b.inside, b.first)
        b.nat.move_mappings(keep_old=keep_old)
        assert (await reaches(b.first, before, b.inside) is not None) == keep_old
        after = await mapped(b.inside, b.first)
        assert after != before
        assert await reaches(b.first, after, b.inside)


async def test_double_nat(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        outer = net.nat("outer")
        b = await bench(net, outer.nat("inner"))
        external = await mapped(b.inside, b.first)
        assert external.host in outer.external_hosts
        assert b.nat.external_hosts[0] not in outer.external_hosts
        assert await reaches(b.first, external, b.inside) == at(b.first)


async def test_a_carrier_gives_each_subscriber_its_own_block_and_no_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        carrier = net.cgnat("carrier", mapping=Mapping.APDM, block_ports=8, ports=RandomPorts())
        b = await bench(net, carrier.nat("home", mapping=Mapping.APDM))
        other = await carrier.nat("next door").machine("other").bind()
        server = net.machine("many ports")
        sockets = [await server.bind() for _ in range(9)]
        ports = {(await mapped(b.inside, socket)).port for socket in sockets[:8]}
        assert len(ports) == 8
        assert max(ports) - min(ports) == 7
        assert await reaches(b.inside, at(sockets[8]), sockets[8]) is None
        assert net.drops[Drop.QUOTA] == 1
        assert (await mapped(other, sockets[8])).port not in ports
        await trio.sleep(carrier_timeout_s := 121)
        assert (await mapped(b.inside, sockets[8])).port in ports, f"blocks are reused after {carrier_timeout_s} s"


async def test_subscribers_of_one_carrier_meet_by_hairpin(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        carrier = net.cgnat()
        b = await bench(net, carrier.nat("home"))
        other = await carrier.nat("next door").machine("other").bind()
        mine, theirs = await mapped(b.inside, b.first), await mapped(other, b.first)
        assert mine.host == theirs.host
        assert await reaches(b.inside, theirs, other) is None
        assert await reaches(other, mine, b.inside) == theirs
        assert await reaches(b.inside, theirs, other) == mine


async def test_one_to_one_keeps_ports_and_admits_strangers(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        cloud = net.one_to_one("cloud")
        b = await bench(net, cloud)
        external = Address(cloud.external_hosts[0], 5000)
        assert await reaches(b.second, external, b.inside) == at(b.second)
        assert await mapped(b.inside, b.first) == external
        second = await cloud.machine("second vm").bind(5000)
        assert await mapped(second, b.first) == Address(cloud.external_hosts[1], 5000)
        cloud.reboot(new_address=True)
        assert await mapped(b.inside, b.first) not in {external, Address(external.host, 5000)}


async def test_one_to_one_behind_a_security_group(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.one_to_one(filtering=Filtering.ADF))
        external = Address(b.nat.external_hosts[0], 5000)
        assert await reaches(b.first, external, b.inside) is None
        await mapped(b.inside, b.first)
        assert await reaches(b.first_other_port, external, b.inside)
        assert await reaches(b.second, external, b.inside) is None


async def test_ipv6_is_not_translated_but_guarded(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        one, home = net.machine("one", v6=True), net.nat("outer").nat("home", ipv6=True)
        client = home.machine("client")
        server, inside = await one.bind(1111), await client.bind(5000)
        own = at(inside, host=1)
        assert ":" in own.host
        assert await reaches(server, own, inside) is None
        assert net.drops[Drop.FIREWALL] == 1
        assert await reaches(inside, at(server, host=1), server) == own
        assert await reaches(server, own, inside) == at(server, host=1)
        home.reboot()
        assert await reaches(server, own, inside) is None
        await reaches(inside, at(server, host=1), server)
        assert await reaches(server, own, inside)
        await trio.sleep(121)
        assert await reaches(server, own, inside) is None


async def test_a_gateway_that_blocks_udp(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork(seed=1)
    async with net.running():
        b = await bench(net, net.nat())
        external = await mapped(b.inside, b.first)
        b.nat.udp_blocked = True
        assert await reaches(b.inside, at(b.first), b.first) is None
        assert await reaches(b.first, external, b.inside) is None
        assert net.drops[Drop.UDP_BLOCKED] == 2


async def test_the_same_private_subnet_twice_and_a_decoy(autojump_clock: trio.testing.MockClock) -> None:
    """A packet to a peer's private address goes to whoever has that address here."""
    net = VirtualNetwork(seed=1)
    async with net.running():
        here, there = net.nat(lan="192.168.1.0/24"), net.nat(lan="192.168.1.0/24")
        a = await here.machine("a", host="192.168.1.10").bind(5000)
        decoy = await here.machine("decoy", host="192.168.1.20").bind(5000)
        b = await there.machine("b", host="192.168.1.20").bind(5000)
        assert at(b) == at(decoy)
        assert await reaches(a, at(b), b) is None
        assert await reaches(a, at(b), decoy) == at(a)
