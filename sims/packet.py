"""What travels on the virtual network, and every reason it may fail to arrive."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from kafila.types import Address

UDP_HEADER_BYTES = 8  # RFC 768
IPV4_HEADER_BYTES = 20  # RFC 791, without options
IPV6_HEADER_BYTES = 40  # RFC 8200 section 3

MAX_UDP_PAYLOAD_BYTES = 65_507
"""65,535 less the IPv4 and UDP headers. IPv6 would allow 20 bytes more; no caller needs to see the difference."""


class Packet(NamedTuple):
    """One UDP datagram between two endpoints."""

    source: Address
    to: Address
    data: bytes

    @property
    def ip_bytes(self) -> int:
        """Length with the IP and UDP headers: what an MTU limits and a link's rate is spent on."""
        header = IPV6_HEADER_BYTES if is_v6(self.to.host) else IPV4_HEADER_BYTES
        return header + UDP_HEADER_BYTES + len(self.data)


class Drop(Enum):
    """Why a packet went no further; the value is the phrase a trace shows."""

    LOSS = "lost at random"
    BURST = "lost in a burst"
    QUEUE_FULL = "the link's queue is full"
    TOO_BIG = "larger than the link's MTU"
    LINK_DOWN = "the link is down"
    CENSORED = "the link drops this kind of packet"
    NO_ROUTE = "no route to the destination"
    ISOLATED = "the network keeps its clients apart"
    GONE = "the destination has left this network"
    NO_MAPPING = "the NAT has no mapping for the port"
    FILTERED = "the NAT's filter does not know the sender"
    NO_PORT_LEFT = "the NAT has no port left for a new mapping"
    QUOTA = "the subscriber's block of ports is used up"
    NO_HAIRPIN = "the NAT does not hairpin"
    REBOOTING = "the gateway is rebooting"
    FIREWALL = "a firewall saw no packet go the other way"
    UDP_BLOCKED = "UDP is blocked"
    NO_SERVICE = "the gateway does not answer on this port"
    NO_SOCKET = "no socket on the port"
    BUFFER_FULL = "the socket's receive buffer is full"
    ASLEEP = "the machine is asleep or unplugged"


@lru_cache(maxsize=65_536)
def is_v6(host: str) -> bool:
    """Whether an IP literal is IPv6."""
    return ":" in host


@lru_cache(maxsize=65_536)
def canonical(host: str) -> str | None:
    """The one spelling of an IP literal that the network's tables use, a v4-mapped address as IPv4.

    None where ``host`` is no IP literal.
    """
    try:
        parsed = ip_address(host)
    except ValueError:
        return None
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed)
