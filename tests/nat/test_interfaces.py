"""Host candidates from clean and from cluttered machines, and what counts as a new network epoch."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.candidates import may_probe
from kafila.nat.interfaces import MAX_HOSTS, SETTLE_S, EpochWatch, Surroundings, host_candidates
from kafila.types import Address
from sims.topology import VirtualNetwork

PORT = 40000
HOME = Surroundings.of([Address("192.168.1.5", 0)], ["192.168.1.1"], ["198.51.100.1"])
CAFE = Surroundings.of([Address("10.0.0.7", 0)], ["10.0.0.1"], ["203.0.113.1"])


def chosen(*hosts: str) -> list[str]:
    addresses = host_candidates([Address(host, 0) for host in hosts], PORT)
    assert all(address.port == PORT for address in addresses)
    return [address.host for address in addresses]


def test_a_plain_machine_offers_what_it_has_and_loopback_last() -> None:
    assert chosen("192.168.1.5", "2001:db8::5", "127.0.0.1", "::1") == ["192.168.1.5", "2001:db8::5", "127.0.0.1"]


def test_what_no_peer_can_send_to_is_left_out() -> None:
    assert chosen("169.254.3.4", "fe80::1", "fe80::2%eth0", "0.0.0.0", "::", "224.0.0.1", "240.0.0.1", "x") == []  # noqa: S104  - not bound
    assert chosen("::ffff:0:0", "::ffff:169.254.3.4", "::ffff:224.0.0.1") == []


def test_bridges_and_overlays_come_after_networks() -> None:
    hosts = ("192.168.1.5", "172.17.0.1", "100.64.3.4", "192.168.122.1", "10.8.0.2", "fd00::1", "fd12::44")
    assert chosen(*hosts) == [
        "192.168.1.5",
        "10.8.0.2",
        "fd00::1",  # the only IPv6 way out, so not taken for a bridge
        "100.64.3.4",
        "fd12::44",
        "172.17.0.1",
        "192.168.122.1",
    ]


def test_the_way_out_goes_first_even_if_it_looks_like_a_bridge() -> None:
    assert chosen("192.168.1.1", "10.0.0.2", "127.0.0.1")[0] == "192.168.1.1"


def test_of_one_ipv6_prefix_two_addresses_are_enough() -> None:
    temporaries = [f"2001:db8::{number:x}" for number in range(1, 9)]
    assert chosen(*temporaries, "2001:db8:0:1::1") == ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"]


def test_a_mapped_address_is_not_taken_for_ipv6() -> None:
    assert chosen("::ffff:192.168.1.5") == ["::ffff:192.168.1.5"]


def test_junk_does_not_crowd_out_the_network() -> None:
    net = VirtualNetwork(seed=1)
    member = net.nat("home", ipv6=True).machine("member")
    real = member.hosts()
    net.add_junk_interfaces(member, 40)
    hosts = [address.host for address in host_candidates(member.interface_addresses(), PORT)]
    assert len(hosts) <= MAX_HOSTS
    assert set(hosts[:2]) == set(real)
    assert ip_address(hosts[-1]).is_loopback


@given(st.lists(st.ip_addresses().map(str) | st.text(max_size=5), max_size=60))
def test_any_interfaces_give_few_distinct_addresses_that_peers_may_probe(hosts: list[str]) -> None:
    offered = host_candidates([Address(host, 0) for host in hosts], PORT)
    assert len(offered) == len(set(offered)) <= MAX_HOSTS
    assert {address.host for address in offered} <= set(hosts)
    for address in offered:
        broadcast = address.host.endswith(".255")  # the path layer is stricter about these
        assert broadcast or may_probe(address, same_machine=True)


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_another_network_is_a_new_epoch_once_it_has_settled() -> None:
    watch = EpochWatch(HOME)
    assert not watch.look(CAFE, 10.0)
    assert not watch.look(CAFE, 10.0 + SETTLE_S / 2)
    assert watch.look(CAFE, 10.0 + SETTLE_S)
    assert watch.current == CAFE
    assert not watch.look(CAFE, 20.0)


@pytest.mark.parametrize("between", [Surroundings.of([]), HOME])
def test_a_flap_is_not_a_new_epoch(between: Surroundings) -> None:
    watch = EpochWatch(HOME)
    assert not watch.look(CAFE, 10.0)
    assert not watch.look(between, 10.5)
    assert not watch.look(CAFE, 10.6)
    assert not watch.look(CAFE, 10.6 + SETTLE_S / 2)
    assert watch.look(CAFE, 10.6 + SETTLE_S)


def test_no_network_at_all_waits_for_one() -> None:
    watch = EpochWatch(HOME)
    assert not any(watch.look(Surroundings.of([Address("127.0.0.1", 0)]), float(now)) for now in range(10))
    assert not watch.look(HOME, 11.0)


def test_a_new_gateway_or_public_address_counts_and_a_temporary_address_does_not() -> None:
    home = [Address("192.168.1.5", 0), Address("2001:db8::5", 0), Address("127.0.0.1", 0)]
    epoch = Surroundings.of(home, ["192.168.1.1"], ["198.51.100.1"])
    rotated = [Address("192.168.1.5", 0), Address("2001:db8::77", 0), Address("172.17.0.1", 0)]
    assert Surroundings.of(rotated, ["192.168.1.1"], ["198.51.100.1"]) == epoch
    assert Surroundings.of(home, ["192.168.1.254"], ["198.51.100.1"]) != epoch
    assert Surroundings.of(home, ["192.168.1.1"], ["198.51.100.2"]) != epoch
