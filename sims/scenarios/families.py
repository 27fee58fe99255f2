"""IPv4 and IPv6: who has which, and what stands in front of it."""

from __future__ import annotations

from sims.nat import Mapping
from sims.net import Machine
from sims.packet import is_v6
from sims.scenarios.common import address_used, direct, relayed
from sims.scenarios.link import Link
from sims.scenarios.scenario import expect
from sims.topology import VirtualNetwork


def _v6_only(net: VirtualNetwork) -> tuple[Machine, Machine]:
    return net.nat("dual-stack home", ipv6=True).machine("a"), net.nat("new provider", ipv6=True).machine("b", v4=False)


def _firewalls(net: VirtualNetwork) -> tuple[Machine, Machine]:
    """IPv4 cannot be punched, and IPv6 stands behind a stateful firewall at both ends."""
    homes = [net.nat(f"{name}'s home", ipv6=True, mapping=Mapping.APDM) for name in "ab"]
    return homes[0].machine("a"), homes[1].machine("b")


def _no_common(net: VirtualNetwork) -> tuple[Machine, Machine]:
    return net.nat("old provider").machine("a"), net.nat("new provider", ipv6=True).machine("b", v4=False)


def _uses_v6(_net: VirtualNetwork, link: Link) -> None:
    used = address_used(link)
    expect(all(is_v6(address.host) for address in used), f"IPv6 is to be used, not {used[0].host} and {used[1].host}")


SCENARIOS = [
    direct("ipv6-only-peer", "a peer without IPv4 is reached over IPv6", _v6_only, _uses_v6),
    direct("ipv6-firewalls", "stateful IPv6 firewalls at both ends let a punch through", _firewalls, _uses_v6),
    relayed("no-common-family", "IPv4 alone to IPv6 alone: a rendezvous on both relays", _no_common),
]
