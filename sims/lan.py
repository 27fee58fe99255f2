"""Networks that things attach to: a LAN with perhaps a gateway, and the Internet, where every pair has its own path."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Protocol

from sims.fabric import Fabric
from sims.link import PERFECT, Link, Quality
from sims.packet import Drop, Packet, is_v6

_FIRST_CLIENT = 10
"""Clients are numbered from .10, leaving room for gateways, as home routers do."""

_ROUTE_CACHE_ENTRIES = 65_536


class Receiver(Protocol):
    """A machine or a gateway: what packets come down a cable to."""

    name: str

    def arrive(self, packet: Packet, now: float, through: Attachment) -> None:
        """A packet for one of the attachment's addresses, or for a network behind it."""
        ...


class Router(Protocol):
    """What a LAN sends packets for strangers to."""

    outside: Attachment
    """Its cable to the network above."""

    def from_inside(self, packet: Packet, now: float, lan: Lan) -> None:
        """A packet from ``lan`` for somewhere else, or for the router itself."""
        ...

    def joined(self, host: str) -> None:
        """An address has appeared on one of the router's LANs."""
        ...

    def route_behind(self, network: IPv6Network) -> None:
        """``network`` has appeared somewhere behind the router."""
        ...

    def inside_hosts(self, lan: Lan) -> list[str]:
        """The router's own addresses on ``lan``."""
        ...


class Attachment:
    """A cable between an owner and a LAN: two links and the addresses at the owner's end."""

    def __init__(self, fabric: Fabric, owner: Receiver, lan: Lan, *, up: Quality, down: Quality) -> None:
        self.owner = owner
        self.lan = lan
        self.hosts: list[str] = []
        self.is_attached = True
        name = f"{owner.name}@{lan.name}"
        self.up = Link(fabric, f"{name} up", up)
        self.down = Link(fabric, f"{name} down", down)
        self._fabric = fabric

    def host_for(self, host: str) -> str | None:
        """The owner's address here of the same family as ``host``."""
        return next((own for own in self.hosts if is_v6(own) == is_v6(host)), None)

    def send(self, packet: Packet, now: float) -> None:
        """The owner sends."""
        self.up.carry(packet, now, self._at_lan)

    def deliver(self, packet: Packet, now: float) -> None:
        """The LAN sends to the owner."""
        self.down.carry(packet, now, self._at_owner)

    def _at_lan(self, packet: Packet, now: float) -> None:
        self.lan.forward(packet, now, self)

    def _at_owner(self, packet: Packet, now: float) -> None:
        if self.is_attached:
            self.owner.arrive(packet, now, self)
        else:
            self._fabric.drop(self.lan.name, Drop.GONE, packet, now)


class Lan:
    """A broadcast domain: its hosts reach one another, and the rest of the world through its router."""

    def __init__(
        self, fabric: Fabric, name: str, networks: list[str], router: Router | None = None, *, isolated: bool = False
    ) -> None:
        """``networks``: prefixes that are on-link, at most one a family. ``isolated``: clients reach the router only
        (guest Wi-Fi, a carrier's access network)."""
        self.name = name
        self.networks = [ip_network(network) for network in networks]
        self.first_hosts = [str(network.network_address + 1) for network in self.networks]
        """The first address of each prefix."""
        self.router = router
        self.isolated = isolated
        self._fabric = fabric
        self._hosts: dict[str, Attachment] = {}
        self._behind: dict[IPv6Network, Attachment] = {}
        self._cache: dict[str, Attachment | None] = {}
        self._next = {4: _FIRST_CLIENT, 6: _FIRST_CLIENT}

    def specificity(self, host: IPv4Address | IPv6Address) -> int | None:
        """How good a way this network is to ``host``: the length of the matching prefix, 0 by default route."""
        lengths = [network.prefixlen for network in self.networks if host in network]
        return max(lengths, default=None if self.router is None else 0)

    def new_host(self, version: int) -> str | None:
        """The next unused address of IP version 4 or 6, or None where the LAN has no such network."""
        for network in self.networks:
            if network.version == version:
                number = self._next[version]
                self._next[version] += 1
                return _nth(network, number)
        return None

    def attach(
        self, owner: Receiver, hosts: list[str], *, up: Quality = PERFECT, down: Quality = PERFECT
    ) -> Attachment:
        """Plug ``owner`` in with these addresses. Raises ValueError where one is taken."""
        attachment = Attachment(self._fabric, owner, self, up=up, down=down)
        for host in hosts:
            self.add_host(attachment, host)
        return attachment

    def add_host(self, attachment: Attachment, host: str) -> None:
        """Give an attachment one more address. Raises ValueError where it is taken."""
        if host in self._hosts:
            raise ValueError(f"{host} is taken on {self.name} by {self._hosts[host].owner.name}")
        self._hosts[host] = attachment
        self._cache.clear()
        attachment.hosts.append(host)
        if self.router is not None:
            self.router.joined(host)

    def remove_host(self, attachment: Attachment, host: str) -> None:
        """Take one address away from an attachment."""
        attachment.hosts.remove(host)
        del self._hosts[host]
        self._cache.clear()

    def detach(self, attachment: Attachment) -> None:
        """Unplug; packets on their way to it are lost."""
        for host in list(attachment.hosts):
            self.remove_host(attachment, host)
        attachment.is_attached = False

    def route_behind(self, network: IPv6Network, attachment: Attachment) -> None:
        """Send packets for ``network`` to ``attachment``'s owner, and have everything above do so too."""
        self._behind[network] = attachment
        self._cache.clear()
        if self.router is not None:
            self.router.route_behind(network)

    def find(self, host: str) -> Attachment | None:
        """Where packets for ``host`` go on this network, its router apart."""
        if host in self._hosts or not self._behind:
            return self._hosts.get(host)
        if host not in self._cache:
            if len(self._cache) >= _ROUTE_CACHE_ENTRIES:
                self._cache.clear()
            parsed = ip_address(host)
            self._cache[host] = next((a for network, a in self._behind.items() if parsed in network), None)
        return self._cache[host]

    def forward(self, packet: Packet, now: float, sender: Attachment | None) -> None:
        """Pass a packet on; ``sender`` is None for the router's own."""
        receiver = self.find(packet.to.host)
        if receiver is None and self.router is not None and sender is not None:
            self.router.from_inside(packet, now, self)
        elif receiver is None:
            self._fabric.drop(self.name, Drop.NO_ROUTE, packet, now)
        elif self.isolated and sender is not None:
            self._fabric.drop(self.name, Drop.ISOLATED, packet, now)
        else:
            receiver.deliver(packet, now)


class Internet(Lan):
    """The public network: no router, but a path of its own between each two attachments."""

    def __init__(self, fabric: Fabric, one_way: Quality) -> None:
        """``one_way``: the quality of a path nothing else is said about."""
        super().__init__(fabric, "internet", [_PUBLIC_V4, _PUBLIC_V6])
        self._one_way = one_way
        self._paths: dict[tuple[str, str], Link] = {}
        self._sites = 0

    def specificity(self, host: IPv4Address | IPv6Address) -> int | None:  # noqa: ARG002 - the same for all
        """Zero: whatever else a machine is attached to is nearer."""
        return 0

    def new_host(self, version: int) -> str | None:
        """A public address; for IPv6 each has a /64 of its own, as sites do."""
        return super().new_host(4) if version == 4 else _nth(self.new_prefix(), 1)

    def new_prefix(self) -> IPv6Network:
        """An unused public /64."""
        self._sites += 1
        return IPv6Network((int(IPv6Network(_PUBLIC_V6).network_address) + (self._sites << 64), 64))

    def path(self, source: str, to: str) -> Link:
        """The one-way path between two sites by name."""
        link = self._paths.get((source, to))
        if link is None:
            link = self._paths[source, to] = Link(self._fabric, f"{source} to {to}", self._one_way)
        return link

    def forward(self, packet: Packet, now: float, sender: Attachment | None) -> None:
        receiver = self.find(packet.to.host)
        if receiver is None or sender is None:
            self._fabric.drop(self.name, Drop.NO_ROUTE, packet, now)
        else:
            self.path(sender.owner.name, receiver.owner.name).carry(packet, now, receiver.deliver)


# Nothing here leaves the process, so the ranges only have to look public to code that tells public from private:
# Python's `ipaddress` calls the documentation and benchmarking ranges private. 11/8 is never announced.
_PUBLIC_V4 = "11.0.0.0/8"
_PUBLIC_V6 = "2a10::/16"


def _nth(network: IPv4Network | IPv6Network, number: int) -> str:
    if number >= network.num_addresses - 1:
        raise ValueError(f"{network} has no address left")
    return str(network.network_address + number)
