"""Where a peer might be reached: what it advertised, what may be probed at all, and in which order.

A member is trusted with the model but not with our aim: it may name a victim's address as its own candidate, by
mistake or on purpose. So what we are willing to send a first, unasked-for datagram to is decided here, and how many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import islice

from kafila.types import Address

MAX_CANDIDATES = 32
"""Addresses kept for one peer, advertised and learned together (DESIGN section 5)."""
MAX_ADVERTISED = 256
"""How far into an advertised list we look at all; a machine has far fewer interfaces."""
LOWEST_PORT = 1024
"""Below lie other people's servers (RFC 6335 section 6, system ports); no member listens there."""

_PRIVATE_V4 = tuple(ip_network(net) for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))  # RFC 1918
_PRIVATE_V6 = ip_network("fc00::/7")  # RFC 4193


class CandidateKind(Enum):
    """How an address came to be a candidate."""

    HOST = "host"
    """One of the peer's own interfaces."""
    PREDICTED = "predicted"
    """A port that a sequential allocator is expected to give next."""
    MAPPED = "mapped"
    """A port that the peer's router opened for it on request (PCP, NAT-PMP, UPnP)."""
    REFLEXIVE = "reflexive"
    """The peer as the rendezvous or a STUN server sees it."""
    LEARNED = "learned"
    """The source of a sealed message from the peer (RFC 8445 calls it peer-reflexive)."""


class Scope(IntEnum):
    """How near an address is; nearer is preferred when paths are equally fast."""

    LOOPBACK = 0
    LAN = 1
    WIDE = 2


# A predicted port is tried before the reflexive one: the probe to the reflexive one would use the prediction up.
_TRY_ORDER = {
    CandidateKind.HOST: 0,
    CandidateKind.PREDICTED: 1,
    CandidateKind.MAPPED: 2,
    CandidateKind.REFLEXIVE: 3,
    CandidateKind.LEARNED: 4,
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One address at which a peer might be reached."""

    address: Address
    kind: CandidateKind


@lru_cache(maxsize=1024)  # as often as the next
def parse_host(host: str) -> IPv4Address | IPv6Address | None:
    """The IP literal, with IPv4-mapped IPv6 unwrapped; None for anything else, zones included."""
    try:
        ip = ip_address(host)
    except ValueError:
        return None
    if isinstance(ip, IPv6Address):
        if ip.scope_id is not None:
            return None
        return ip.ipv4_mapped or ip
    return ip


@lru_cache(maxsize=1024)  # asked for every datagram; more sources than a member has peers are strangers
def canonical(address: Address) -> Address | None:
    """One spelling per address, so that a path is found again whichever way its source was written."""
    ip = parse_host(address.host)
    return None if ip is None else Address(str(ip), address.port)


def scope_of(address: Address) -> Scope:
    """How near ``address`` is, by its range alone."""
    ip = parse_host(address.host)
    if ip is None:
        return Scope.WIDE
    if ip.is_loopback:
        return Scope.LOOPBACK
    if isinstance(ip, IPv6Address):
        return Scope.LAN if ip in _PRIVATE_V6 else Scope.WIDE
    return Scope.LAN if any(ip in net for net in _PRIVATE_V4) else Scope.WIDE


def may_probe(address: Address, *, same_machine: bool) -> bool:
    """Whether an unasked-for datagram may be sent to ``address``.

    Never multicast, broadcast, unspecified, reserved, or link-local (an :class:`Address` has no zone to send through),
    never a system port, and loopback only when the peer is known to be on this machine.
    """
    if not LOWEST_PORT <= address.port <= 65535:
        return False
    ip = parse_host(address.host)
    if ip is None or ip.is_multicast or ip.is_unspecified or ip.is_link_local:
        return False
    if ip.is_loopback:
        return same_machine
    if isinstance(ip, IPv4Address):
        if ip.is_reserved or int(ip) >> 24 == 0:  # 240/4 with 255.255.255.255, and "this network" 0/8
            return False
        # The directed broadcast address of the usual /24. A real host there (a wider net) is still reached by relay.
        return not (scope_of(address) is Scope.LAN and int(ip) & 0xFF == 0xFF)
    return True


def choose_candidates(advertised: Iterable[Candidate], *, same_machine: bool) -> list[Candidate]:
    """Those of a peer's advertised candidates that we will probe, each address once, most promising first."""
    chosen: dict[Address, Candidate] = {}
    for candidate in islice(advertised, MAX_ADVERTISED):
        address = canonical(candidate.address)
        if address is None or address in chosen or not may_probe(address, same_machine=same_machine):
            continue
        chosen[address] = Candidate(address, candidate.kind)
    ordered = sorted(chosen.values(), key=lambda c: (scope_of(c.address), _TRY_ORDER[c.kind]))
    return ordered[:MAX_CANDIDATES]
