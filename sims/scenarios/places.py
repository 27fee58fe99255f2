"""Where two members may sit: the open Internet, one LAN, behind one NAT, behind several."""

from __future__ import annotations

import trio

from kafila.types import Address
from sims.filtering import Filtering
from sims.nat import Hairpin
from sims.net import Machine
from sims.packet import Drop
from sims.scenarios.common import CONNECTED, Place, address_used, connect, direct, relayed, still_direct
from sims.scenarios.link import Link
from sims.scenarios.scenario import Outcome, Scenario, expect
from sims.scenarios.world import World
from sims.topology import VirtualNetwork

PORT = 40_000
"""Where a scenario needs a port that is known beforehand."""


def _public(net: VirtualNetwork) -> tuple[Machine, Machine]:
    return net.machine("a"), net.machine("b")


def _clouds(net: VirtualNetwork) -> tuple[Machine, Machine]:
    filtered = net.one_to_one("filtered cloud", filtering=Filtering.APDF)
    return net.one_to_one("open cloud").machine("a"), filtered.machine("b")


def _same_lan(net: VirtualNetwork) -> tuple[Machine, Machine]:
    home = net.nat("home")
    return home.machine("a"), home.machine("b")


def _uses_the_lan(_net: VirtualNetwork, link: Link) -> None:
    hosts = {me.machine.hosts()[0] for me, _ in link.ends}
    used = {address.host for address in address_used(link)}
    expect(used == hosts, f"two members of one LAN reach each other at {', '.join(sorted(used))}")


def _vlans(hairpin: Hairpin) -> Place:
    def place(net: VirtualNetwork) -> tuple[Machine, Machine]:
        office = net.nat("office", hairpin=hairpin)
        return office.machine("a"), office.vlan("guests").machine("b")

    return place


def _double_nat(net: VirtualNetwork) -> tuple[Machine, Machine]:
    return net.nat("modem").nat("router").machine("a"), net.nat("home").machine("b")


def _one_cgnat(hairpin: Hairpin) -> Place:
    def place(net: VirtualNetwork) -> tuple[Machine, Machine]:
        carrier = net.cgnat("carrier", hairpin=hairpin)
        return carrier.nat("flat one").machine("a"), carrier.nat("flat two").machine("b")

    return place


async def _decoy(net: VirtualNetwork) -> Outcome:
    """A stranger in ``a``'s LAN has ``b``'s private address and port, and answers everything with what it got."""
    here, there = (net.nat(f"{name}'s home", lan="192.168.1.0/24") for name in "ab")
    a, b = here.machine("a", host="192.168.1.20"), there.machine("b", host="192.168.1.30")
    stranger = here.machine("stranger", host="192.168.1.30")
    async with World(net).running() as world:
        link = await world.pair(a, b)
        socket = await stranger.bind(link.b.socket.address.port)
        echoed = 0

        async def echo() -> None:
            nonlocal echoed
            while True:
                data, source = await socket.receive()
                await socket.send(data, source)
                echoed += 1

        world.nursery.start_soon(echo)
        figures = await connect(link)
        await trio.sleep(10)
        still_direct(link)
        used = address_used(link)[0]
        expect(used.host == there.external_hosts[0], f"a sends to {used.host}, a stranger's address")
        expect(echoed, "the stranger was never asked: the scenario shows nothing")
        return Outcome({**figures, "datagrams_to_the_stranger": [echoed]})


async def _quota(net: VirtualNetwork) -> Outcome:
    """The household's other machines hold all but eight of its ports."""
    carrier = net.cgnat("carrier")
    home = carrier.nat("home")
    a, other, b = home.machine("a"), home.machine("games console"), net.nat("elsewhere").machine("b")
    async with World(net).running() as world:
        sink = Address(world.server.hosts()[0], 9)
        for _ in range(504):
            await (await other.bind()).send(b"hello", sink)
        await trio.sleep(1)
        link = await world.pair(a, b)
        figures = await connect(link)
        await trio.sleep(10)
        still_direct(link)
        expect(not net.drops[Drop.QUOTA], f"{net.drops[Drop.QUOTA]} datagrams found no port left")
        return Outcome(figures)


async def _collision(net: VirtualNetwork) -> Outcome:
    """Two members behind one port-preserving NAT use the same local port; the later one gets another outside."""
    home = net.nat("home")
    early, a, b = home.machine("early"), home.machine("a"), net.nat("elsewhere").machine("b")
    async with World(net).running() as world:
        host = await world.member(early, port=PORT)
        await world.register(host)
        link = await world.pair(a, b, port=PORT)
        observed = link.a.observed
        expect(observed and observed.port != PORT, "the ports did not collide: the scenario shows nothing")
        figures = await connect(link)
        return Outcome(figures)


SCENARIOS = [
    direct("public-hosts", "two machines on public addresses", _public),
    direct("one-to-one", "clouds that give each machine an address, one of them behind a security group", _clouds),
    direct("same-lan", "two members of one LAN meet on it", _same_lan, _uses_the_lan),
    direct(
        "vlans-hairpin", "two VLANs that do not route, behind one NAT that hairpins", _vlans(Hairpin.EXTERNAL_SOURCE)
    ),
    relayed("vlans-no-hairpin", "two VLANs behind one NAT that does not hairpin", _vlans(Hairpin.OFF)),
    Scenario(
        "identical-subnets-decoy", "the same private subnet at both ends, a stranger at the peer's", _decoy, CONNECTED
    ),
    direct("double-nat", "a router behind the provider's modem that translates too", _double_nat),
    Scenario("cgnat-quota", "a carrier's block of 512 ports of which eight are left", _quota, CONNECTED),
    direct("one-cgnat", "two subscribers of one carrier, by hairpin", _one_cgnat(Hairpin.EXTERNAL_SOURCE)),
    relayed("one-cgnat-no-hairpin", "two subscribers of one carrier that does not hairpin", _one_cgnat(Hairpin.OFF)),
    Scenario("port-collision", "a port-preserving NAT whose port somebody else has", _collision, CONNECTED),
]
