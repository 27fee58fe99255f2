"""Machines and people that are not as one would wish: junk interfaces, dead VPNs, lying routers, hostile members."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from kafila.nat.candidates import MAX_CANDIDATES, Candidate, CandidateKind
from kafila.nat.schedule import MAX_PROBES_PER_S
from kafila.reachability import Routers
from kafila.types import Address
from sims.filtering import Filtering
from sims.nat import Mapping
from sims.net import Machine
from sims.portmap_server import WRONG_HOST, Honesty, PortMapServer
from sims.ports import RandomPorts, Sequential
from sims.scenarios.common import CONNECTED, connect, direct, still_direct
from sims.scenarios.link import Link
from sims.scenarios.scenario import Body, Outcome, Scenario, Unmet, expect
from sims.scenarios.world import RENDEZVOUS_RTT_S, World
from sims.topology import Nat, VirtualNetwork
from sims.trace import Record, What
from sims.upnp_server import UpnpServer

JUNK = 32
VICTIMS = 64
WATCH_S = 30.0


def _junk(net: VirtualNetwork) -> tuple[Machine, Machine]:
    """Thirty-two dead interfaces at each end, and a VPN each that the other is not in."""
    machines = []
    for number, name in enumerate("ab"):
        machine = net.nat(f"{name}'s home").machine(name)
        vpn = net.private_lan(f"{name}'s VPN", f"100.9{number}.0.0/16")
        machine.attach(vpn.lan, [f"100.9{number}.0.7"])
        net.add_junk_interfaces(machine, JUNK)
        machines.append(machine)
    return machines[0], machines[1]


def _serves(home: Nat, service: PortMapServer | UpnpServer) -> Callable[[Machine], Routers]:
    """The home's router speaks PCP and NAT-PMP, or UPnP; how a machine there asks its gateways."""
    home.service = service

    def routers(machine: Machine) -> Routers:
        async def gateways() -> Sequence[str]:
            await trio.lowlevel.checkpoint()
            return [gateway.host for gateway in machine.gateways()]

        return Routers(gateways, service.streams(home) if isinstance(service, UpnpServer) else None)

    return routers


async def _false_answer(net: VirtualNetwork, service: PortMapServer | UpnpServer) -> Outcome:
    """The router says that a port is open, and it is not, or not there."""
    home = net.nat("a's home")
    asks = _serves(home, service)
    a, b = home.machine("a"), net.nat("b's home").machine("b")
    async with World(net).running() as world:
        link = await world.pair(a, b, routers=asks(a))
        await trio.sleep(1)
        figures = await connect(link)
        await trio.sleep(10)
        still_direct(link)
        expect(service.requests, "the router was never asked: the scenario shows nothing")
        sent_there = [to for to in link.b.tap.sent.values() if to.host == WRONG_HOST]
        expect(not sent_there, f"{len(sent_there)} datagrams went to the address that the router made up")
        return Outcome(figures)


def _lies(service: Callable[[Honesty], PortMapServer | UpnpServer], honesty: Honesty) -> Body:
    async def body(net: VirtualNetwork) -> Outcome:
        return await _false_answer(net, service(honesty))

    return body


def _opens(service: Callable[[], PortMapServer | UpnpServer]) -> Body:
    """Two carrier-like NATs that nobody can punch; one router opens a port when it is asked."""

    async def body(net: VirtualNetwork) -> Outcome:
        home = net.nat("a's home", mapping=Mapping.APDM)
        asks = _serves(home, service())
        a, b = home.machine("a"), net.nat("b's home", mapping=Mapping.APDM).machine("b")
        async with World(net).running() as world:
            link = await world.pair(a, b, routers=asks(a))
            await trio.sleep(1)
            figures = await connect(link)
            return Outcome(figures)

    return body


async def _sequential(net: VirtualNetwork) -> Outcome:
    """A port-dependent NAT that counts its ports up, five other flows a second through it; the peer keeps to ports."""
    home = net.nat("a's carrier", mapping=Mapping.APDM, ports=Sequential(1, cross_traffic_per_s=5.0))
    a, b = home.machine("a"), net.nat("b's home").machine("b")
    async with World(net).running() as world:
        link = await world.pair(a, b)
        link.open()
        first = await link.up()
        await trio.sleep(WATCH_S)
        link.lasted()
        after_s = [time_s for time_s in link.direct_after() if time_s is not None]
        return Outcome(
            {
                "first_byte_rtts": [min(first) / RENDEZVOUS_RTT_S],
                "directions_direct": [float(len(after_s))],
                "direct_ms": [time_s * 1e3 for time_s in after_s],
            }
        )


async def _hostile(net: VirtualNetwork) -> Outcome:
    """A member names sixty-four strangers, somebody's resolver, and addresses of nobody in particular as its own."""
    a, b = net.nat("a's home").machine("a"), net.nat("b's home", mapping=Mapping.APDM, ports=RandomPorts()).machine("b")
    victims = [net.machine(f"victim {number}") for number in range(VICTIMS)]
    hit: list[Record] = []
    named = {Address(victim.hosts()[0], 40_000) for victim in victims}

    def watch(record: Record) -> None:
        if record.what is What.SENT and record.where == "a" and record.packet and record.packet.to in never_or_named:
            hit.append(record)

    resolver = Address(victims[0].hosts()[0], 53)
    never = {resolver, Address("224.0.0.251", 5353), Address("255.255.255.255", 9999), Address("127.0.0.1", 40_000)}
    never_or_named = named | never
    net.fabric.sinks.append(watch)
    async with World(net).running() as world:
        link = await world.pair(a, b)
        extra = [Candidate(address, CandidateKind.HOST) for address in [*sorted(never), *sorted(named)]]
        link.open(extra_of_b=extra)
        await link.up()
        await trio.sleep(WATCH_S)
        _expect_capped(hit, never)
        per_victim = {address: sum(r.packet.to == address for r in hit if r.packet) for address in named}
        return Outcome(
            {
                "victims_reached": [float(sum(count > 0 for count in per_victim.values()))],
                "datagrams_at_one_victim": [float(max(per_victim.values()))],
                "datagrams_in_the_worst_second": [float(_worst_second(hit))],
            }
        )


def _expect_capped(hit: Sequence[Record], never: set[Address]) -> None:
    addresses = {record.packet.to for record in hit if record.packet}
    expect(not addresses & never, f"datagrams went to {', '.join(str(address.host) for address in addresses & never)}")
    expect(len(addresses) <= MAX_CANDIDATES, f"{len(addresses)} strangers were probed, to be at most {MAX_CANDIDATES}")
    worst = _worst_second(hit)
    expect(worst <= MAX_PROBES_PER_S, f"{worst} probes in a second, to be at most {MAX_PROBES_PER_S}")
    if not hit:
        raise Unmet("no stranger was probed: the scenario shows nothing")


def _worst_second(hit: Sequence[Record]) -> int:
    times = [record.time_s for record in hit]
    return max((sum(start <= time_s < start + 1 for time_s in times) for start in times), default=0)


def _unfiltered_is_ignored(_net: VirtualNetwork, link: Link) -> None:
    expect(link.a.endpoint.unknown_datagrams == 0, "a datagram of no kind came between two members")


def _behind_filter(net: VirtualNetwork) -> tuple[Machine, Machine]:
    return net.nat("a's home", filtering=Filtering.ADF).machine("a"), net.nat("b's home", timeout_s=30).machine("b")


SCENARIOS = [
    direct("vpn-and-junk", "32 junk interfaces and a VPN that leads elsewhere, at each end", _junk),
    direct(
        "two-homes",
        "two ordinary homes, and no datagram between members that is not theirs",
        _behind_filter,
        _unfiltered_is_ignored,
    ),
    Scenario(
        "portmap-does-nothing",
        "a router says it has opened a port, and has not",
        _lies(PortMapServer, Honesty.NO_MAPPING),
        CONNECTED,
    ),
    Scenario(
        "portmap-wrong-address",
        "a router opens a port, and names an address not its own",
        _lies(PortMapServer, Honesty.WRONG_ADDRESS),
        CONNECTED,
    ),
    Scenario(
        "portmap-opens",
        "a router that opens a port connects a pair that cannot be punched",
        _opens(PortMapServer),
        CONNECTED,
    ),
    Scenario(
        "upnp-does-nothing",
        "a router says over UPnP it has opened a port, and has not",
        _lies(UpnpServer, Honesty.NO_MAPPING),
        CONNECTED,
    ),
    Scenario(
        "upnp-wrong-address",
        "a router opens a port over UPnP, and names an address not its own",
        _lies(UpnpServer, Honesty.WRONG_ADDRESS),
        CONNECTED,
    ),
    Scenario(
        "upnp-opens",
        "a router that opens a port over UPnP connects a pair that cannot be punched",
        _opens(UpnpServer),
        CONNECTED,
    ),
    Scenario(
        "sequential-cross-traffic", "a sequential allocator with other traffic: the next port is a guess", _sequential
    ),
    Scenario(
        "hostile-candidates", "a member names strangers as its own addresses: probes are few and capped", _hostile
    ),
]
