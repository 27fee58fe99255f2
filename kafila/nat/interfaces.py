"""Which of a machine's own addresses to offer to peers, and when its surroundings have changed enough to probe anew.

A laptop with containers, virtual machines and a VPN has dozens of addresses, of which one or two reach anybody. An
address alone says enough to put them in order; the cap then loses only the hopeless ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from kafila.types import Address

MAX_HOSTS = 16
"""Half of what a peer keeps (:data:`kafila.nat.candidates.MAX_CANDIDATES`): the rest is for what servers saw."""
_MAX_PER_V6_PREFIX = 2
"""Temporary addresses (RFC 8981) pile up in one /64; the one in use and one other are enough."""
SETTLE_S = 1.0
"""A change must last this long: an interface that comes up has no address, then a link-local one, then its own."""

_V4_PRIVATE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))  # RFC 1918
_V4_SHARED = ip_network("100.64.0.0/10")  # RFC 6598: carriers, and overlay VPNs that borrowed the range
_V6_UNIQUE_LOCAL = ip_network("fc00::/7")  # RFC 4193

_NEAR, _OVERLAY, _BRIDGE, _LOOPBACK = range(4)


def host_candidates(interfaces: Sequence[Address], port: int) -> list[Address]:
    """The addresses to offer for a socket on ``port``, best first, at most :data:`MAX_HOSTS`.

    ``interfaces`` come as :meth:`kafila.net.Network.interface_addresses` gives them: those with the way out first. Left
    out: unspecified, multicast, reserved and link-local ones, which no peer can send to. One loopback address stays,
    the last, for members on the same machine.
    """
    parsed = {host: ip for interface in interfaces if (ip := _usable(host := interface.host)) is not None}
    way_out = {
        version: next((host for host, ip in parsed.items() if ip.version == version), None) for version in (4, 6)
    }
    ranks = {
        host: _NEAR if host == way_out[ip.version] and not ip.is_loopback else _rank(ip) for host, ip in parsed.items()
    }
    ordered = sorted(_thinned(parsed), key=lambda host: ranks[host])
    loopback = [host for host in ordered if ranks[host] == _LOOPBACK][:1]
    others = [host for host in ordered if ranks[host] != _LOOPBACK][: MAX_HOSTS - len(loopback)]
    return [Address(host, port) for host in others + loopback]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a classification depends on. Two that are equal are one network epoch."""

    networks: frozenset[str]
    """Own IPv4 addresses, and the /64 prefixes of own IPv6 ones (within which addresses come and go by themselves)."""
    gateways: frozenset[str]
    public_hosts: frozenset[str]
    """The hosts by which servers see the member."""

    @classmethod
    def of(
        cls, interfaces: Iterable[Address], gateways: Iterable[str] = (), public_hosts: Iterable[str] = ()
    ) -> Surroundings:
        """Bridges of containers and virtual machines, which come and go, and what no peer can reach do not count."""
        networks = set()
        for interface in interfaces:
            ip = _usable(interface.host)
            if ip is not None and _rank(ip) < _BRIDGE:
                networks.add(_prefix(ip) if isinstance(ip, IPv6Address) else str(ip))
        return cls(frozenset(networks), frozenset(gateways), frozenset(public_hosts))


class EpochWatch:
    """Says when a new network epoch has begun. Ask it whenever surroundings were looked at."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.current = surroundings
        self._candidate: tuple[Surroundings, float] | None = None

    def look(self, surroundings: Surroundings, now: float) -> bool:
        """Whether ``surroundings``, seen at ``now`` (seconds), differ from the epoch's and have for :data:`SETTLE_S`.

        Having no network at all is no new epoch: there is nothing to probe until one is back.
        """
        if surroundings == self.current or not surroundings.networks:
            self._candidate = None
            return False
        if self._candidate is None or self._candidate[0] != surroundings:
            self._candidate = (surroundings, now)
        if now - self._candidate[1] < SETTLE_S:
            return False
        self.current, self._candidate = surroundings, None
        return True


def _usable(host: str) -> IPv4Address | IPv6Address | None:
    try:
        ip = ip_address(host)
    except ValueError:
        return None
    if isinstance(ip, IPv6Address):
        if ip.scope_id is not None or ip.is_site_local:
            return None
        ip = ip.ipv4_mapped or ip  # judged as what it stands for
    if ip.is_unspecified or ip.is_multicast or ip.is_link_local:
        return None
    return None if isinstance(ip, IPv4Address) and (ip.is_reserved or int(ip) >> 24 == 0) else ip


def _rank(ip: IPv4Address | IPv6Address) -> int:
    """How likely a peer is on the other side, by the address alone."""
    if ip.is_loopback:
        return _LOOPBACK
    if isinstance(ip, IPv6Address):
        # The first address of a unique-local /64 is a router's, as below.
        if ip not in _V6_UNIQUE_LOCAL:
            return _NEAR
        return _BRIDGE if int(ip) & (2**64 - 1) == 1 else _OVERLAY
    if ip in _V4_SHARED:
        return _OVERLAY
    # Who has the first address of a private network is its router: here, the host side of a bridge to containers or
    # virtual machines (172.17.0.1, 192.168.122.1 ...). A real router of a real LAN is merely asked later.
    is_first = int(ip) & 0xFF == 1 and any(ip in network for network in _V4_PRIVATE)
    return _BRIDGE if is_first else _NEAR


def _thinned(parsed: dict[str, IPv4Address | IPv6Address]) -> list[str]:
    """All of them, but of each IPv6 /64 only the first few."""
    seen: Counter[str] = Counter()
    kept = []
    for host, ip in parsed.items():
        if isinstance(ip, IPv6Address):
            seen[_prefix(ip)] += 1
            if seen[_prefix(ip)] > _MAX_PER_V6_PREFIX:
                continue
        kept.append(host)
    return kept


def _prefix(ip: IPv6Address) -> str:
    return str(ip_network((int(ip) >> 64 << 64, 64)))
