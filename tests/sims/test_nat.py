"""The translation table alone: what holds for every behaviour, whatever is sent."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.types import Address
from sims.filtering import MAX_REMEMBERED, Filtering, Permissions, StatefulFirewall
from sims.nat import FilterScope, Mapping, NatBehaviour, NatTable, Pooling, Refresh
from sims.packet import Drop
from sims.ports import DYNAMIC_PORTS, PortPolicy, Preserving, RandomPorts, Sequential

OUTSIDE = "11.0.0.1"
POLICIES: list[PortPolicy] = [Preserving(), RandomPorts(), Sequential(), Sequential(2, cross_traffic_per_s=50.0)]

endpoints = st.builds(Address, st.sampled_from(["192.168.1.10", "192.168.1.11"]), st.integers(5000, 5003))
remotes = st.builds(Address, st.sampled_from(["11.0.0.8", "11.0.0.9"]), st.integers(1, 3))
behaviours = st.builds(
    NatBehaviour,
    mapping=st.sampled_from(Mapping),
    filtering=st.sampled_from(Filtering),
    scope=st.sampled_from(FilterScope),
    ports=st.sampled_from(POLICIES),
    timeout_s=st.just(100.0),
    refresh=st.sampled_from(Refresh),
    pooling=st.sampled_from(Pooling),
    block_ports=st.sampled_from([None, 16]),
)


def table(behaviour: NatBehaviour, hosts: int = 1) -> NatTable:
    return NatTable(behaviour, [f"11.0.0.{n + 1}" for n in range(hosts)], Random(1))


@given(behaviours, st.integers(1, 3), st.lists(st.tuples(endpoints, remotes, st.floats(0, 60)), max_size=40))
def test_what_went_out_can_be_answered_and_no_two_endpoints_share(
    behaviour: NatBehaviour, hosts: int, sent: list[tuple[Address, Address, float]]
) -> None:
    nat, now, owners = table(behaviour, hosts), 0.0, dict[Address, tuple[Address, float]]()
    for internal, remote, pause_s in sent:
        now += pause_s
        external = nat.outbound(internal, remote, now)
        if isinstance(external, Drop):
            assert external is Drop.QUOTA
            continue
        assert external.port in DYNAMIC_PORTS
        owner, until = owners.get(external, (internal, now))
        assert owner == internal or until <= now
        assert nat.inbound(remote, external, now) == internal
        owners[external] = (internal, now + behaviour.timeout_s)
    assert nat.mapping_count(now + 101) == 0


@given(behaviours, endpoints, endpoints, remotes, remotes)
def test_mapping_depends_on_what_the_enum_says(
    behaviour: NatBehaviour, one: Address, other: Address, here: Address, there: Address
) -> None:
    nat = table(behaviour)
    same = nat.outbound(one, here, 0.0) == nat.outbound(other, there, 0.0)
    expected = (
        one == other
        and {
            Mapping.EIM: True,
            Mapping.ADM: here.host == there.host,
            Mapping.APDM: here == there,
        }[behaviour.mapping]
    )
    assert same == expected


@given(st.sampled_from(POLICIES))
def test_an_allocator_gives_out_every_port_once(policy: PortPolicy) -> None:
    taken: set[int] = set()
    allocator = policy.allocator(range(2000, 2050), Random(1))
    for _ in range(50):
        port = allocator.allocate(2007, lambda port: port not in taken, 0.0)
        assert port is not None
        taken.add(port)
    assert taken == set(range(2000, 2050))
    assert allocator.allocate(2007, lambda port: port not in taken, 0.0) is None


@pytest.mark.parametrize("rate", [0.5, 20.0, 5000.0])
def test_cross_traffic_consumes_ports(rate: float) -> None:
    allocator = Sequential(cross_traffic_per_s=rate).allocator(DYNAMIC_PORTS, Random(7))
    ports = [allocator.allocate(0, lambda _port: True, float(second)) for second in range(400)]
    steps = [(b - a) % len(DYNAMIC_PORTS) for a, b in pairwise(ports) if a and b]
    assert sum(steps) / len(steps) - 1 == pytest.approx(rate, rel=0.2)
    assert len(set(steps)) > 1


def test_pooling() -> None:
    paired = table(NatBehaviour(mapping=Mapping.APDM), hosts=4)
    arbitrary = table(NatBehaviour(mapping=Mapping.APDM, pooling=Pooling.ARBITRARY), hosts=4)
    to = [Address("11.0.0.9", port) for port in range(1, 40)]
    for nat, hosts in ((paired, 1), (arbitrary, 4)):
        made = [nat.outbound(Address("192.168.1.10", 5000), remote, 0.0) for remote in to]
        assert len({external.host for external in made if isinstance(external, Address)}) == hosts
    used = {paired.outbound(Address(f"192.168.1.{n}", 1), to[0], 0.0) for n in range(10, 30)}
    assert len({external.host for external in used if isinstance(external, Address)}) == 4


def test_when_every_block_is_given_out_a_new_subscriber_gets_nothing() -> None:
    nat = table(NatBehaviour(block_ports=len(DYNAMIC_PORTS) // 2), hosts=2)
    made = [nat.outbound(Address(f"100.64.0.{n}", 1), Address("11.0.0.9", 1), 0.0) for n in range(5)]
    assert [m.host for m in made if isinstance(m, Address)] == ["11.0.0.1", "11.0.0.1", "11.0.0.2", "11.0.0.2"]
    assert made[4] is Drop.NO_PORT_LEFT


def test_an_explicit_port_is_open_to_anybody_until_it_ends() -> None:
    nat, internal, stranger = table(NatBehaviour(mapping=Mapping.APDM)), Address("192.168.1.10", 5000), OUTSIDE
    external = nat.open_port(internal, 6000, 60.0, 0.0)
    assert external == Address(OUTSIDE, 6000)
    assert nat.inbound(Address(stranger, 1), external, 59.0) == internal
    assert nat.outbound(internal, Address("11.0.0.9", 9), 59.0) == external
    assert nat.open_port(internal, 0, 60.0, 59.0) == external
    assert nat.inbound(Address(stranger, 1), external, 118.0) == internal
    assert nat.inbound(Address(stranger, 1), external, 119.0) is Drop.NO_MAPPING
    nat.open_port(internal, 6000, 60.0, 200.0)
    nat.close_port(internal)
    assert nat.inbound(Address(stranger, 1), external, 201.0) is Drop.NO_MAPPING
    nat.close_port(internal)


def test_an_endpoint_independent_mapping_becomes_the_explicit_one() -> None:
    nat, internal = table(NatBehaviour(ports=RandomPorts())), Address("192.168.1.10", 5000)
    external = nat.outbound(internal, Address("11.0.0.9", 9), 0.0)
    assert nat.open_port(internal, 6000, 1000.0, 1.0) == external
    assert isinstance(external, Address)
    assert nat.inbound(Address("11.0.0.8", 1), external, 500.0) == internal


def test_expired_mappings_are_swept_away() -> None:
    nat = table(NatBehaviour(timeout_s=10.0, scope=FilterScope.ENDPOINT))
    for now in range(5000):
        nat.outbound(Address("192.168.1.10", 1000 + now), Address("11.0.0.9", 9), float(now))
    assert len(nat._by_external) <= 1024
    assert len(nat._endpoint_permissions) <= 1024
    assert nat.mapping_count(5000.0) == 9


def test_memory_of_remotes_is_bounded_and_forgets_the_oldest() -> None:
    permissions = Permissions(Filtering.APDF, 10.0)
    for number in range(MAX_REMEMBERED + 1):
        permissions.grant(Address("11.0.0.9", number), 0.0)
    assert not permissions.allow(Address("11.0.0.9", 0), 1.0)
    assert permissions.allow(Address("11.0.0.9", 1), 1.0)
    permissions.grant(Address("11.0.0.9", 5), 2.0)
    assert permissions.allow(Address("11.0.0.9", 1), 3.0), "renewing one forgets no other"
    for number in range(6):
        permissions.grant(Address("11.0.0.9", MAX_REMEMBERED + 1 + number), 3.0)
    assert permissions.allow(Address("11.0.0.9", 5), 4.0), "the renewed one is no longer the oldest"
    firewall = StatefulFirewall(timeout_s=10.0)
    for now in range(5000):
        firewall.sent(Address("11.0.0.1", now), Address("11.0.0.9", 1), float(now))
    assert len(firewall._inside) <= 1024
