"""Deployed nodes find out how they are reached, and it shows: in the plan, on the links, when they roam."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kafila import entrance, extra_sockets
from kafila.errors import RendezvousUnreachable
from kafila.members import report_of
from kafila.nat.birthday import MAX_SOCKETS
from kafila.nat.candidates import CandidateKind
from kafila.nat.predict import Reach, predict
from kafila.nat.report import Allocator, NatReport, nat_class
from kafila.reachability import nearest_server
from kafila.rendezvous_service import Alternate, rendezvous
from kafila.ring.invite import HostPort
from kafila.types import Address, PathKind
from sims import net
from sims.filtering import Filtering
from sims.nat import Mapping
from sims.net import Machine
from sims.portmap_server import Honesty, PortMapServer
from sims.ports import Preserving, RandomPorts, Sequential
from sims.topology import Nat, VirtualNetwork
from sims.upnp_server import UpnpServer
from tests.nat.stun_world import PORTS as STUN_PORTS
from tests.nat.stun_world import StunWorld
from tests.party import Guest, Party, answer_of, solo
from tests.test_node import firsts

QUESTION = "a b c d"
PORT = 7443
NAME = "rendezvous.example"


class Names(trio.abc.HostnameResolver):
    """One name, for a host with addresses of both families."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts

    async def getaddrinfo(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        await trio.lowlevel.checkpoint()
        if not self._hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in each], socket.SOCK_DGRAM, 17, "", (each, port)) for each in self._hosts]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise OSError("no such thing here")


class World:
    """A virtual network with a rendezvous of one address or two, in both families."""

    def __init__(self, net: VirtualNetwork, server: Machine, party: Party) -> None:
        self.net, self.server, self.party = net, server, party

    def home(self, name: str, **habits: Any) -> Nat:
        return self.net.nat(f"home of {name}", **habits)

    def at_home(self, name: str, **habits: Any) -> Guest:
        return self.at(self.home(name, **habits), name)

    def at(self, nat: Nat, name: str) -> Guest:
        return self.party.member(name, nat.machine(name))

    async def form(self, guests: Sequence[Guest]) -> None:
        code = await self.party.host(guests[0], len(guests), rendezvous=HostPort(NAME, PORT))
        for guest in guests[1:]:
            self.party.join(guest, code)
        with trio.fail_after(10):
            for guest in guests:
                await guest.serving.wait()


@asynccontextmanager
async def world(*, hosts: int = 2, v6: bool = False) -> AsyncIterator[World]:
    net = VirtualNetwork(seed=1)
    server = net.machine("rendezvous", v6=v6)
    alternate = None
    if hosts == 2:
        other = net.machine("rendezvous' second address")
        alternate = Alternate(other, server.hosts()[0], other.hosts()[0])
    trio.socket.set_custom_hostname_resolver(Names(server.hosts()))
    async with net.running(), rendezvous(server, PORT, alternate), trio.open_nursery() as nursery:
        yield World(net, server, Party(nursery))
        nursery.cancel_scope.cancel()


def report(guest: Guest) -> NatReport:
    assert guest.node is not None
    found = guest.node.reach.sight.report
    assert found is not None
    return found


def planned_kinds(host: Guest) -> set[str]:
    (plan,) = {facts["plan"] for what, _, facts in host.facts.records if what == "plan"}
    return {edge["kind"] for edge in json.loads(plan)["edges"]}


def link_kinds(*guests: Guest) -> list[PathKind]:
    """Of each member's link to the next."""
    kinds = []
    for guest in guests:
        assert guest.node is not None
        ring = guest.node.ring()
        assert ring is not None
        assert ring.edges[ring.me].measured
        kinds.append(PathKind(ring.edges[ring.me].kind))
    return kinds


def kinds_told_by(guest: Guest) -> set[CandidateKind]:
    assert guest.node is not None
    return {candidate.kind for candidate in guest.node.reach.candidates}


@pytest.mark.parametrize(("mapping", "filtering"), list(product(Mapping, Filtering)))
async def test_a_node_behind_each_nat_reports_it_and_the_plan_foresees_what_the_link_becomes(
    mapping: Mapping, filtering: Filtering, autojump_clock: MockClock
) -> None:
    async with world() as w:
        guests = [w.at_home(name, mapping=mapping, filtering=filtering) for name in ("host", "friend")]
        await w.form(guests)
        for guest in guests:
            found = report(guest)
            assert (found.mapping.name, found.filtering.name) == (mapping.name, filtering.name)
            (line,) = [line for line in guest.screen.lines if line.startswith("network: ")]
            assert f"{nat_class(found).value} NAT" in line
        reach = predict(report(guests[0]), report(guests[1]))
        expected = PathKind.DIRECT if reach in {Reach.DIRECT, Reach.ASYMMETRIC} else PathKind.RELAYED
        assert planned_kinds(guests[0]) == {expected.value}
        await trio.sleep(3)
        assert link_kinds(*guests) == [expected] * 2


async def test_the_survey_delays_nothing(autojump_clock: MockClock) -> None:
    async with world() as w:
        guests = [w.at_home(name) for name in ("host", "friend")]
        began = trio.current_time()
        await w.form(guests)
        assert trio.current_time() - began < 0.8, "rendezvous round trips of 40 ms, no waiting for silence"


async def test_a_survey_that_takes_long_is_not_waited_for_and_told_afterwards(autojump_clock: MockClock) -> None:
    async with world(hosts=1) as w:
        guests = [w.at_home(name) for name in ("host", "friend")]
        for guest in guests:
            guest.stun = (HostPort("198.51.100.9", 3478),)  # never answers, but for the survey to find that out
        await w.form(guests)
        await trio.sleep(5)
        for guest in guests:
            assert guest.node is not None
            assert guest.node.reach.surveyed.is_set()
        assert await answer_of(guests[1], QUESTION) == solo(QUESTION, firsts(guests))


async def test_other_stun_servers_tell_what_a_rendezvous_with_one_address_cannot(autojump_clock: MockClock) -> None:
    async with world(hosts=1) as w:
        stun = StunWorld(2, hosts=2)
        stun.net = w.net
        stun.servers = [w.net.machine(f"stun {n}") for n in range(2)]
        async with stun.serving():
            alone, helped = w.at_home("alone"), w.at_home("helped")
            helped.stun = (HostPort(stun.servers[0].hosts()[0], STUN_PORTS[0]),)
            await w.form([alone, helped])
            assert report(alone).mapping.name != "EIM"
            assert report(helped).mapping.name == "EIM"


async def test_two_on_one_network_are_planned_direct_whatever_their_nat(autojump_clock: MockClock) -> None:
    async with world() as w:
        home = w.home("both", mapping=Mapping.APDM, filtering=Filtering.APDF)
        guests = [w.at(home, name) for name in ("host", "friend")]
        await w.form(guests)
        assert planned_kinds(guests[0]) == {"direct"}
        await trio.sleep(3)
        assert link_kinds(*guests) == [PathKind.DIRECT] * 2


@pytest.mark.parametrize("step", [1, 2, -1])
async def test_two_sequential_nats_meet_at_the_ports_they_foretold(step: int, autojump_clock: MockClock) -> None:
    async with world() as w:
        habits = {"mapping": Mapping.APDM, "filtering": Filtering.APDF, "ports": Sequential(step=step)}
        guests = [w.at_home(name, **habits) for name in ("host", "friend")]
        await w.form(guests)
        assert all(report(guest).allocator is Allocator.SEQUENTIAL for guest in guests)
        assert all(CandidateKind.PREDICTED in kinds_told_by(guest) for guest in guests)
        await trio.sleep(3)
        assert link_kinds(*guests) == [PathKind.DIRECT] * 2


async def test_a_host_that_waited_long_foretells_anew_when_somebody_comes(autojump_clock: MockClock) -> None:
    async with world() as w:
        habits = {"mapping": Mapping.APDM, "filtering": Filtering.APDF, "ports": Sequential(step=1)}
        home = w.home("host", **habits)
        guests = [w.at(home, "host"), w.at_home("friend", **habits)]
        code = await w.party.host(guests[0], 2, rendezvous=HostPort(NAME, PORT))
        await trio.sleep(5)
        other = await home.machine("somebody else at home").bind()
        for port in range(5000, 5100):
            await other.send(b"hello", Address(w.server.hosts()[0], port))
        await trio.sleep(5)
        w.party.join(guests[1], code)
        with trio.fail_after(10):
            await guests[1].serving.wait()
        await trio.sleep(3)
        assert link_kinds(*guests) == [PathKind.DIRECT] * 2


async def test_a_random_allocator_is_met_by_many_sockets_which_are_given_back(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance, "SystemRandom", lambda: Random(1))  # seven of eight attempts succeed: this one does
    async with world() as w:
        habits = {"mapping": Mapping.APDM, "filtering": Filtering.APDF, "ports": RandomPorts()}
        guests = [w.at_home("host", **habits), w.at_home("friend", filtering=Filtering.APDF)]
        guests[0].port_mapping = False  # it would hold one more socket
        await w.form(guests)
        assert planned_kinds(guests[0]) == {"relayed"}
        machine = guests[0].network
        assert isinstance(machine, Machine)
        await trio.sleep(6)
        assert len(machine._sockets) == 1 + MAX_SOCKETS
        await trio.sleep(30)
        assert link_kinds(*guests) == [PathKind.DIRECT] * 2
        assert len(machine._sockets) == 2, "the one that the path stands on"
        for guest in guests:
            assert await answer_of(guest, QUESTION) == solo(QUESTION, firsts(guests))
        guests[1].leaving.set()
        with trio.fail_after(10):
            await guests[0].ended.wait()
        assert not machine._sockets


async def test_no_sockets_to_spare_for_a_birthday_do_no_harm(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra_sockets, "MAX_SOCKETS", 100_000)  # more than a machine has ports
    monkeypatch.setattr(net, "_EPHEMERAL_PORTS", range(50_000, 50_020))
    async with world() as w:
        habits = {"mapping": Mapping.APDM, "filtering": Filtering.APDF, "ports": RandomPorts()}
        guests = [w.at_home("host", **habits), w.at_home("friend", filtering=Filtering.APDF)]
        guests[0].port_mapping = False  # it would hold one more socket
        await w.form(guests)
        await trio.sleep(30)
        machine = guests[0].network
        assert isinstance(machine, Machine)
        assert len(machine._sockets) <= 2
        assert await answer_of(guests[1], QUESTION) == solo(QUESTION, firsts(guests))


async def form_with_gateway(w: World, service: PortMapServer | UpnpServer, *, ask: bool = True) -> list[Guest]:
    habits = {"mapping": Mapping.APDM, "filtering": Filtering.APDF, "ports": Preserving()}
    homes = [w.home(name, **habits) for name in ("host", "friend")]
    homes[1].service = service
    guests = [w.at(home, name) for home, name in zip(homes, ("host", "friend"), strict=True)]
    guests[1].port_mapping = ask
    if isinstance(service, UpnpServer):
        guests[1].open_stream = service.streams(homes[1])
    await w.form(guests)
    await trio.sleep(5)
    return guests


@pytest.mark.parametrize("kind", [PortMapServer, UpnpServer])
async def test_a_port_that_the_gateway_opens_makes_a_hopeless_pair_direct(
    kind: type[PortMapServer | UpnpServer], autojump_clock: MockClock
) -> None:
    async with world() as w:
        guests = await form_with_gateway(w, kind(Honesty.HONEST))
        assert CandidateKind.MAPPED in kinds_told_by(guests[1])
        assert link_kinds(*guests) == [PathKind.DIRECT] * 2


@pytest.mark.parametrize("kind", [PortMapServer, UpnpServer])
@pytest.mark.parametrize("honesty", [each for each in Honesty if each is not Honesty.HONEST])
async def test_what_a_gateway_says_falsely_does_no_harm(
    kind: type[PortMapServer | UpnpServer], honesty: Honesty, autojump_clock: MockClock
) -> None:
    async with world() as w:
        guests = await form_with_gateway(w, kind(honesty))
        told = kinds_told_by(guests[1])
        assert CandidateKind.MAPPED not in told or honesty is Honesty.NO_MAPPING
        warned = any("the gateway says it opened a port at 11.254.254.254" in line for line in guests[1].screen.lines)
        assert warned is (honesty is Honesty.WRONG_ADDRESS)
        for guest in guests:
            assert await answer_of(guest, QUESTION) == solo(QUESTION, firsts(guests))


async def test_the_gateway_is_not_asked_where_the_owner_forbids_or_no_nat_is(autojump_clock: MockClock) -> None:
    async with world() as w:
        service = PortMapServer()
        await form_with_gateway(w, service, ask=False)
        assert service.requests == 0
    async with world() as w:
        home = w.home("shared")
        home.service = service = PortMapServer()
        guests = [w.at(home, name) for name in ("host", "friend")]
        code = await w.party.host(guests[0], 2)  # the rendezvous is inside this home
        w.party.join(guests[1], code)
        with trio.fail_after(10):
            await guests[1].serving.wait()
        await trio.sleep(5)
        assert service.requests == 0


@pytest.mark.parametrize("to_v6", [False, True])
async def test_a_roaming_member_keeps_its_session_and_finds_a_direct_path_again(
    to_v6: bool, autojump_clock: MockClock
) -> None:
    async with world(v6=True) as w:
        guests = [w.at_home(name, ipv6=to_v6) for name in ("host", "roamer")]
        cafe = w.home("cafe", ipv6=to_v6)
        await w.form(guests)
        await trio.sleep(5)
        assert link_kinds(*guests) == [PathKind.DIRECT] * 2
        machine = guests[1].network
        assert isinstance(machine, Machine)
        w.net.move(machine, cafe, v4=not to_v6)
        with trio.fail_after(15):
            assert await answer_of(guests[1], QUESTION) == solo(QUESTION, firsts(guests))
        await trio.sleep(5)
        assert link_kinds(*guests) == [PathKind.DIRECT] * 2
        assert [guest.error for guest in guests] == [None, None]
        traced = {what for what, _, _ in guests[1].facts.records}
        assert traced >= {"network", "reachable"}
        assert await answer_of(guests[0], QUESTION) == solo(QUESTION, firsts(guests))


async def test_a_member_whose_udp_is_blocked_fails_by_name(autojump_clock: MockClock) -> None:
    async with world() as w:
        host, walled = w.at_home("host"), w.home("walled")
        walled.udp_blocked = True
        guest = w.at(walled, "poor friend")
        code = await w.party.host(host, 2, rendezvous=HostPort(NAME, PORT))
        w.party.join(guest, code)
        with trio.fail_after(10):
            await guest.ended.wait()
        assert isinstance(guest.error, RendezvousUnreachable)
        assert "poor friend: no rendezvous answers" in str(guest.error)
        assert "let UDP through" in str(guest.error)
        assert host.error is None


async def test_a_rendezvous_that_is_away_is_told_from_a_network_that_blocks(autojump_clock: MockClock) -> None:
    async with world() as w:
        guest = w.at_home("guest")
        guest.stun = (HostPort(NAME, PORT),)
        with pytest.raises(RendezvousUnreachable, match="UDP works here"):
            await w.party.host(guest, 2, rendezvous=HostPort("198.51.100.9", PORT))


async def test_a_report_travels_as_it_was_made(autojump_clock: MockClock) -> None:
    async with world() as w:
        guests = [w.at_home(name) for name in ("host", "friend")]
        await w.form(guests)
        node = guests[0].node
        assert node is not None
        build = node._formation.build if node._formation is not None else None
        assert build is not None
        told = {info.name: report_of(info) for info in build.assignment.ring}
        assert told == {guest.name: report(guest) for guest in guests}
        rtts = [info.rendezvous_rtt_s for info in build.assignment.ring]
        assert all(rtt is not None and 0.039 < rtt < 0.045 for rtt in rtts), "the distance, not the busy start"


def test_the_rendezvous_is_reached_by_a_family_that_this_machine_has() -> None:
    v4, v6 = Address("11.0.0.1", PORT), Address("2a10::1", PORT)
    loopback, link_local = Address("127.0.0.1", 0), Address("fe80::1", 0)
    both = [Address("192.168.1.2", 0), Address("2a10:0:0:1::2", 0), loopback]
    assert nearest_server([v4, v6], v4, both) == v4
    assert nearest_server([v4, v6], v6, both) == v6
    assert nearest_server([v4, v6], v4, [both[1], loopback]) == v6
    assert nearest_server([v4, v6], v6, [both[0], link_local, loopback]) == v4
    assert nearest_server([v4], v4, [both[1]]) == v4
    assert nearest_server([v4, v6], v4, [loopback]) == v4


@pytest.mark.parametrize("name", ["x" * 64 + ".example", "no such name."])
async def test_a_name_that_means_nothing_is_told_in_words(name: str) -> None:
    trio.socket.set_custom_hostname_resolver(Names([]))
    with pytest.raises(RendezvousUnreachable, match="has no address"):
        await entrance.resolve(HostPort(name, PORT))
