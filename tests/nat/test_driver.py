"""The classifier as deployed, over sockets of the virtual network: it reports what each NAT was configured to do."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import trio

from kafila.nat.driver import classify_network
from kafila.nat.report import Allocator, Filtering, FilterScope, Mapping, NatReport
from kafila.nat.stun_server import Local, StunServer
from kafila.net import DatagramSocket
from kafila.types import Address
from kafila.udp import TrioNetwork
from sims import filtering as sims_filtering
from sims import nat as sims_nat
from sims.clock import run_virtual
from sims.net import Machine
from sims.ports import PortPolicy, Preserving, RandomPorts, Sequential
from tests.nat.stun_world import StunWorld

POLICIES: dict[Allocator, PortPolicy] = {
    Allocator.PRESERVING: Preserving(),
    Allocator.SEQUENTIAL: Sequential(step=2),
    Allocator.RANDOM: RandomPorts(),
}
GRID = list(product(Mapping, Filtering, FilterScope, POLICIES))
HAIRPINS = (sims_nat.Hairpin.OFF, sims_nat.Hairpin.EXTERNAL_SOURCE)


def behind(
    world: StunWorld,
    mapping: Mapping,
    filtering: Filtering,
    scope: FilterScope,
    allocator: Allocator,
    *,
    hairpin: sims_nat.Hairpin = sims_nat.Hairpin.OFF,
    ipv6: bool = False,
) -> Machine:
    home = world.net.nat(
        "home",
        mapping=sims_nat.Mapping[str(mapping.name)],
        filtering=sims_filtering.Filtering[str(filtering.name)],
        scope=sims_nat.FilterScope[str(scope.name)],
        ports=POLICIES[allocator],
        hairpin=hairpin,
        ipv6=ipv6,
    )
    return home.machine("member")


def classified(world: StunWorld, member: Machine, seed: int = 1) -> tuple[NatReport, float]:
    """The report, and how long it took in virtual seconds."""

    async def main() -> tuple[NatReport, float]:
        async with world.running():
            report = await classify_network(member, world.addresses, random_bytes=Random(seed).randbytes)
            return report, trio.current_time()

    return run_virtual(main)


@pytest.mark.parametrize(("mapping", "filtering", "scope", "allocator"), GRID)
@pytest.mark.parametrize("hairpin", HAIRPINS)
def test_two_hosts_tell_exactly_what_was_configured(
    mapping: Mapping, filtering: Filtering, scope: FilterScope, allocator: Allocator, hairpin: sims_nat.Hairpin
) -> None:
    world = StunWorld(3, hosts=2)
    member = behind(world, mapping, filtering, scope, allocator, hairpin=hairpin)
    report, took_s = classified(world, member)
    assert (report.mapping, report.filtering, report.allocator) == (mapping, filtering, allocator)
    assert report.port_step == (2 if allocator is Allocator.SEQUENTIAL else 0)
    meaningful = mapping is not Mapping.EIM and filtering is not Filtering.EIF
    assert report.scope == (scope if meaningful else FilterScope.UNKNOWN)
    if mapping is Mapping.EIM or filtering is Filtering.EIF:
        assert report.hairpin is (hairpin is not sims_nat.Hairpin.OFF)
    assert report.reflexive_v4 is not None
    assert report.reflexive_v6 is None
    assert took_s < 0.5  # 40 ms round trips


@pytest.mark.parametrize(("mapping", "filtering", "scope", "allocator"), GRID)
def test_one_host_says_unknown_where_it_cannot_know(
    mapping: Mapping, filtering: Filtering, scope: FilterScope, allocator: Allocator
) -> None:
    world = StunWorld(3, hosts=1)
    report, _ = classified(world, behind(world, mapping, filtering, scope, allocator))
    assert report.mapping == (Mapping.APDM if mapping is Mapping.APDM else Mapping.EIM | Mapping.ADM)
    assert report.filtering == (Filtering.APDF if filtering is Filtering.APDF else Filtering.EIF | Filtering.ADF)
    tells_scope = mapping is Mapping.APDM and filtering is Filtering.APDF
    assert report.scope == (scope if tells_scope else FilterScope.UNKNOWN)
    assert report.allocator is allocator


def test_both_families_in_one_report() -> None:
    world = StunWorld(3, hosts=2, v6=True)
    symmetric = (Mapping.APDM, Filtering.APDF, FilterScope.MAPPING, Allocator.RANDOM)
    member = behind(world, *symmetric, ipv6=True)
    report, _ = classified(world, member)
    assert (report.mapping, report.filtering) == (Mapping.APDM, Filtering.APDF)
    assert report.reflexive_v6 is not None
    assert report.reflexive_v6.host in member.hosts()


def test_ipv6_alone_is_classified_by_its_firewall() -> None:
    world = StunWorld(3, hosts=2, v6=True)
    home = world.net.nat("home", ipv6=True)
    report, _ = classified(world, home.machine("member", v4=False))
    assert (report.mapping, report.filtering) == (Mapping.EIM, Filtering.APDF)
    assert report.on_public_address
    assert report.reflexive_v4 is None
    assert report.reflexive_v6 is not None


def test_a_public_machine() -> None:
    world = StunWorld(3, hosts=2)
    report, _ = classified(world, world.net.machine("member"))
    assert report.on_public_address
    assert (report.mapping, report.filtering) == (Mapping.EIM, Filtering.EIF)


@pytest.mark.parametrize("filtering", list(Filtering))
def test_a_one_to_one_nat_is_told_by_its_filter(filtering: Filtering) -> None:
    world = StunWorld(3, hosts=2)
    cloud = world.net.one_to_one(filtering=sims_filtering.Filtering[str(filtering.name)])
    report, _ = classified(world, cloud.machine("member"))
    assert not report.on_public_address
    assert (report.mapping, report.filtering) == (Mapping.EIM, filtering)
    assert report.allocator is Allocator.PRESERVING


def test_the_worse_of_two_nats_in_a_row_shows() -> None:
    world = StunWorld(3, hosts=2)
    carrier = world.net.cgnat(mapping=sims_nat.Mapping.APDM, filtering=sims_filtering.Filtering.ADF)
    report, _ = classified(world, carrier.nat("home").machine("member"))
    assert (report.mapping, report.filtering) == (Mapping.APDM, Filtering.APDF)


def test_blocked_udp_is_found_in_about_a_second() -> None:
    world = StunWorld(3, hosts=2)
    home = world.net.nat("home")
    home.udp_blocked = True
    report, took_s = classified(world, home.machine("member"))
    assert report == NatReport(udp_blocked=True)
    assert took_s <= 1.0


def test_junk_interfaces_change_nothing() -> None:
    world = StunWorld(3, hosts=2)
    member = behind(world, Mapping.EIM, Filtering.ADF, FilterScope.MAPPING, Allocator.PRESERVING)
    world.net.add_junk_interfaces(member, 32)
    report, _ = classified(world, member)
    assert (report.mapping, report.filtering) == (Mapping.EIM, Filtering.ADF)


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_jitter_cost_time_not_truth(seed: int) -> None:
    world = StunWorld(seed, hosts=2)
    member = behind(world, Mapping.EIM, Filtering.APDF, FilterScope.MAPPING, Allocator.PRESERVING)
    for server in world.servers:
        world.net.path(member, server).set(loss=0.03, jitter_s=0.01)
        world.net.path(server, member).set(loss=0.03, jitter_s=0.01)
    report, took_s = classified(world, member, seed)
    assert (report.mapping, report.filtering) == (Mapping.EIM, Filtering.APDF)
    assert took_s < 3.0


def test_the_sockets_are_given_back() -> None:
    world = StunWorld(3, hosts=2)
    member = world.net.machine("member")
    classified(world, member)

    async def bind_all() -> None:
        for port in range(49_152, 49_200):
            (await member.bind(port)).close()

    run_virtual(bind_all)


async def test_the_same_over_the_real_loopback() -> None:
    network = TrioNetwork()
    sockets: list[DatagramSocket] = [await network.bind() for _ in range(2)]
    server = StunServer(("127.0.0.1",), (sockets[0].address.port, sockets[1].address.port), bytes(16))

    async def serve(port: int) -> None:
        while True:
            data, source = await sockets[port].receive()
            reply = server.respond(data, source, Local(0, port), trio.current_time())
            if reply is not None:
                await sockets[reply.local.port].send(reply.data, source)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, 0)
        nursery.start_soon(serve, 1)
        report = await classify_network(network, [Address("127.0.0.1", server.ports[0])])
        nursery.cancel_scope.cancel()
    for socket in sockets:
        socket.close()
    assert report.on_public_address
    assert (report.mapping, report.filtering) == (Mapping.EIM, Filtering.EIF | Filtering.ADF)


class _NoSockets:
    """A machine with two sockets left."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.bound: list[DatagramSocket] = []

    async def bind(self, port: int = 0) -> DatagramSocket:
        if len(self.bound) == 2:
            raise OSError("too many open files")
        self.bound.append(await self.machine.bind(port))
        return self.bound[-1]

    def interface_addresses(self) -> list[Address]:
        return self.machine.interface_addresses()


async def test_a_machine_without_sockets_to_spare_knows_nothing_and_keeps_none(
    autojump_clock: trio.testing.MockClock,
) -> None:
    member = StunWorld(3, hosts=1).net.machine("member")
    network = _NoSockets(member)
    assert await classify_network(network, [Address("192.0.2.1", 3478)]) == NatReport()
    for socket in network.bound:
        with pytest.raises(trio.ClosedResourceError):
            await socket.receive()
