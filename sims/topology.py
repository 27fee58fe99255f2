"""Builds virtual networks so that a scenario reads like a sentence.

    net = VirtualNetwork(seed=1)
    server = net.machine("rendezvous")
    home = net.nat("home", mapping=Mapping.EIM, filtering=Filtering.APDF)
    a = home.machine("a")
    b = net.cgnat("carrier").nat("flat").machine("b")
    net.rtt(a, b, 0.040)
    net.path(a, b).set(loss=0.05)
    net.at(60.0, home.reboot, new_address=True)
    async with net.running():
        socket = await a.bind()
        ...

Every machine is a ``kafila.net.Network``. Times are seconds of Trio's clock, which a mock clock starts at zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from ipaddress import ip_network
from typing import ParamSpec, TypedDict, Unpack

from sims.fabric import Fabric
from sims.filtering import Filtering, StatefulFirewall
from sims.freeze import Freezer
from sims.gateway import Gateway
from sims.lan import Attachment, Internet, Lan
from sims.link import PERFECT, Link, Quality
from sims.nat import FilterScope, Hairpin, Mapping, NatBehaviour, NatTable, Pooling, Refresh
from sims.net import Machine
from sims.packet import Drop
from sims.ports import PortPolicy
from sims.static_nat import OneToOneTable
from sims.trace import MemoryTrace, Sink

_P = ParamSpec("_P")

CGNAT_NETWORK = "100.64.0.0/10"
"""The address space shared by a carrier's subscribers (RFC 6598)."""

CGNAT_BLOCK_PORTS = 512
"""Carriers hand out blocks of some hundreds of ports a subscriber (RFC 7422 section 3 discusses the trade)."""

DEFAULT_RTT_S = 0.040
"""Between two sites nothing else is said about: a continent's typical round trip."""


class Habits(TypedDict, total=False):
    """The fields of :class:`NatBehaviour`, as keywords."""

    mapping: Mapping
    filtering: Filtering
    scope: FilterScope
    ports: PortPolicy
    timeout_s: float
    refresh: Refresh
    hairpin: Hairpin
    pooling: Pooling
    block_ports: int | None


class Place:
    """A network that machines and NATs can be put on."""

    def __init__(self, network: VirtualNetwork, lan: Lan) -> None:
        self.network = network
        self.lan = lan

    def machine(
        self,
        name: str,
        *,
        v4: bool = True,
        v6: bool | None = None,
        host: str | None = None,
        firewall: StatefulFirewall | None = None,
        up: Quality = PERFECT,
        down: Quality = PERFECT,
    ) -> Machine:
        """A computer here. ``v6`` None: where the place has IPv6; ``host``: this IPv4 address and no other.

        Raises ValueError where the name or the address is taken.
        """
        machine = Machine(self.network.fabric, self.network.claim(name), self.network.freezer)
        machine.firewall = firewall
        machine.attach(self.lan, self.new_hosts(v4=v4, v6=v6, host=host), up=up, down=down)
        self.network.machines[name] = machine
        return machine

    def nat(
        self,
        name: str | None = None,
        *,
        lan: str | None = None,
        ipv6: bool = False,
        isolated: bool = False,
        addresses: int = 1,
        up: Quality = PERFECT,
        down: Quality = PERFECT,
        **habits: Unpack[Habits],
    ) -> Nat:
        """A NAT here, with a LAN behind it.

        ``lan`` is the private prefix (each NAT has its own unless told otherwise), ``ipv6`` gives the LAN a public /64
        behind a stateful firewall, ``addresses`` is how many external ones it has, ``up`` and ``down`` are its uplink;
        the rest are the fields of :class:`NatBehaviour`.
        """
        name = self.network.claim(name or self.network.new_name("nat"))
        behaviour = NatBehaviour(**habits)
        hosts = [self._new_host(4) for _ in range(addresses)]
        table = NatTable(behaviour, list(hosts), self.network.fabric.random(f"nat/{name}"))
        nat = Nat(self, name, table, hosts, hairpin=behaviour.hairpin, up=up, down=down)
        nat.open_lan(lan or self.network.new_private_network(), ipv6=ipv6, isolated=isolated)
        return nat

    def cgnat(self, name: str | None = None, **habits: Unpack[Habits]) -> Nat:
        """A carrier's NAT. Unless told otherwise each subscriber gets one block of 512 ports, subscribers reach one
        another by hairpin only, and the rest is as everywhere (RFC 6888 REQ-1, REQ-4)."""
        habits = {"block_ports": CGNAT_BLOCK_PORTS, "hairpin": Hairpin.EXTERNAL_SOURCE, **habits}
        return self.nat(name or self.network.new_name("cgnat"), lan=CGNAT_NETWORK, isolated=True, **habits)

    def one_to_one(
        self, name: str | None = None, *, filtering: Filtering = Filtering.EIF, hairpin: Hairpin = Hairpin.OFF
    ) -> Nat:
        """A cloud's private network: every machine on it has a public address of its own, ports untouched."""
        name = self.network.claim(name or self.network.new_name("cloud"))
        nat = Nat(self, name, OneToOneTable(filtering), [], hairpin=hairpin)
        nat.open_lan(self.network.new_private_network())
        return nat

    def new_hosts(self, *, v4: bool, v6: bool | None, host: str | None) -> list[str]:
        """Addresses for a newcomer. Raises ValueError where it asks for what the place does not have."""
        hosts = [host] if host is not None else [self._new_host(4)] if v4 else []
        has_v6 = any(network.version == 6 for network in self.lan.networks) and self is not self.network
        if has_v6 if v6 is None else v6:
            hosts.append(self._new_host(6))
        return hosts

    def _new_host(self, version: int) -> str:
        host = self.lan.new_host(version)
        if host is None:
            raise ValueError(f"{self.lan.name} has no IPv{version} network")
        return host


class Nat(Gateway, Place):
    """A gateway that machines can be put behind; as a place it is its first LAN."""

    def __init__(
        self,
        outside: Place,
        name: str,
        table: NatTable | OneToOneTable,
        hosts: list[str],
        *,
        hairpin: Hairpin,
        up: Quality = PERFECT,
        down: Quality = PERFECT,
    ) -> None:
        Gateway.__init__(
            self, outside.network.fabric, name, outside.lan, table, hosts, hairpin=hairpin, up=up, down=down
        )
        self.network = outside.network

    def open_lan(self, private: str, *, ipv6: bool = False, isolated: bool = False) -> None:
        """Make the LAN that this NAT is as a place."""
        self.lan = self._new_lan(self.name, private, ipv6=ipv6, isolated=isolated)

    def vlan(self, name: str, *, lan: str | None = None, ipv6: bool = False, isolated: bool = False) -> Place:
        """One more LAN behind this NAT; LANs reach one another only where ``routes_between_lans`` is set."""
        private = lan or self.network.new_private_network()
        return Place(self.network, self._new_lan(f"{self.name}.{name}", private, ipv6=ipv6, isolated=isolated))

    def _new_lan(self, name: str, private: str, *, ipv6: bool, isolated: bool) -> Lan:
        prefixes = [private, *([str(self.network.internet.new_prefix())] if ipv6 else [])]
        return self.add_lan(name, prefixes, isolated=isolated)


class VirtualNetwork(Place):
    """A whole network; as a place it is the public Internet."""

    def __init__(self, seed: int = 0, *, rtt_s: float = DEFAULT_RTT_S) -> None:
        """``rtt_s``: between two sites (public machines, outermost NATs) nothing else is said about."""
        self.fabric = Fabric(seed)
        self.internet = Internet(self.fabric, Quality(latency_s=rtt_s / 2))
        self.machines: dict[str, Machine] = {}
        self.freezer = Freezer()
        self._names: set[str] = set()
        self._numbers: Counter[str] = Counter()
        super().__init__(self, self.internet)

    # -- running ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Deliver packets until cancelled: ``nursery.start_soon(net.run)``."""
        await self.fabric.run()

    def running(self) -> AbstractAsyncContextManager[None]:
        """``async with net.running():`` delivers packets within the block."""
        return self.fabric.running()

    def at(self, time_s: float, action: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Do something at a time: ``net.at(30, home.reboot, outage_s=20)``."""
        self.fabric.at(time_s, action, *args, **kwargs)

    def trace(self, sink: Sink | None = None) -> MemoryTrace:
        """Record from now on, into ``sink`` as well where one is given."""
        memory = MemoryTrace()
        self.fabric.sinks += [memory] if sink is None else [memory, sink]
        return memory

    @property
    def drops(self) -> Counter[Drop]:
        """How many packets went no further, by reason."""
        return self.fabric.drops

    # -- distances and faults --------------------------------------------------------------------------------------

    def path(self, source: Machine | Gateway, to: Machine | Gateway) -> Link:
        """The one-way path across the Internet between the sites of two machines or gateways.

        Raises ValueError where they share a site: set their own interfaces' links instead.
        """
        source_site, to_site = _site(source), _site(to)
        if source_site == to_site:
            raise ValueError(f"{source.name} and {to.name} are both at {to_site}; no path of the Internet joins them")
        return self.internet.path(source_site, to_site)

    def rtt(self, one: Machine | Gateway, other: Machine | Gateway, rtt_s: float) -> None:
        """Set the latency between two sites, half each way."""
        self.path(one, other).set(latency_s=rtt_s / 2)
        self.path(other, one).set(latency_s=rtt_s / 2)

    def partition(
        self,
        some: Iterable[Machine | Gateway],
        others: Iterable[Machine | Gateway],
        start_s: float,
        stop_s: float = float("inf"),
    ) -> None:
        """Between ``start_s`` and ``stop_s`` nothing passes between ``some`` and ``others``, either way."""
        others = list(others)
        for one in some:
            for other in others:
                self.path(one, other).cut(start_s, stop_s)
                self.path(other, one).cut(start_s, stop_s)

    def move(self, machine: Machine, to: Place, *, v4: bool = True, v6: bool | None = None) -> None:
        """A machine roams: off all its networks, onto another, sockets still open."""
        for attachment in list(machine.attachments):
            machine.detach(attachment)
        machine.attach(to.lan, to.new_hosts(v4=v4, v6=v6, host=None))
        self.fabric.note(machine.name, f"moves to {to.lan.name} as {', '.join(machine.hosts())}")

    # -- odds and ends ---------------------------------------------------------------------------------------------

    def private_lan(self, name: str, network: str) -> Place:
        """A network with no way out: a VPN between friends, a lab."""
        return Place(self, Lan(self.fabric, self.claim(name), [network]))

    def add_junk_interfaces(self, machine: Machine, count: int) -> None:
        """Interfaces that lead nowhere, as containers, virtual machines and dead VPNs leave behind."""
        for number in range(count):
            address, prefix = _JUNK[number % len(_JUNK)]
            host = address.format(number)
            network = ip_network(f"{host}/{prefix}", strict=False)
            machine.attach(Lan(self.fabric, f"junk {number} of {machine.name}", [str(network)]), [host])

    def claim(self, name: str) -> str:
        """Reserve a name. Raises ValueError where it is taken."""
        if name in self._names:
            raise ValueError(f"two things on the network are called {name}")
        self._names.add(name)
        return name

    def new_name(self, kind: str) -> str:
        """``nat-1``, ``nat-2`` ..."""
        self._numbers[kind] += 1
        return f"{kind}-{self._numbers[kind]}"

    def new_private_network(self) -> str:
        """192.168.1.0/24, 192.168.2.0/24 ... and 10/8 when those run out."""
        self._numbers["private"] += 1
        number = self._numbers["private"]
        return f"192.168.{number}.0/24" if number < 255 else f"10.{number // 256}.{number % 256}.0/24"


_JUNK = (
    ("172.17.{0}.1", 24),  # container bridges
    ("169.254.{0}.7", 16),  # link-local: no DHCP answer
    ("fe80::{0:x}", 64),
    ("10.211.{0}.2", 24),  # host-only networks of virtual machines
    ("fd00:{0:x}::1", 64),  # unique local
)


def _site(thing: Machine | Gateway) -> str:
    """The name of what is attached to the Internet where ``thing`` is."""
    attachment: Attachment = thing.attachments[0] if isinstance(thing, Machine) else thing.outside
    while not isinstance(attachment.lan, Internet):
        if attachment.lan.router is None:
            raise ValueError(f"{thing.name} is on {attachment.lan.name}, which has no way to the Internet")
        attachment = attachment.lan.router.outside
    return attachment.owner.name
