"""Members whose ring is not formed yet, and who or what they wait for goes."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from kafila.errors import SessionError
from kafila.rendezvous_service import rendezvous
from kafila.ring.invite import HostPort
from sims.topology import VirtualNetwork
from tests.party import Party


async def test_a_host_that_dies_with_its_rendezvous_before_the_plan_is_missed_by_all(
    autojump_clock: MockClock,
) -> None:
    net = VirtualNetwork(seed=3)
    async with net.running(), trio.open_nursery() as nursery:
        party = Party(nursery)
        machines = {name: net.machine(name) for name in ("host", "friend", "guest")}
        host, friend, guest = (party.member(name, machine) for name, machine in machines.items())
        code = await party.host(host, 3)
        party.join(friend, code)
        party.join(guest, code, visiting=True)
        await trio.sleep(5)
        machines["host"].unplug()
        with trio.fail_after(60):
            for left in (friend, guest):
                await left.ended.wait()
                assert isinstance(left.error, SessionError)
                assert "ask the host" in str(left.error)
                assert not any("direct links go on" in line for line in left.screen.lines)
        nursery.cancel_scope.cancel()


async def test_a_rendezvous_that_comes_back_in_time_costs_those_who_wait_nothing(autojump_clock: MockClock) -> None:
    net = VirtualNetwork(seed=4)
    server = net.machine("rendezvous")
    async with net.running(), trio.open_nursery() as nursery:
        party = Party(nursery)
        host, friend, late = (party.member(name, net.machine(name)) for name in ("host", "friend", "late"))
        async with rendezvous(server, port=7443) as running:
            where = HostPort(server.hosts()[0], running.address.port)
            code = await party.host(host, 3, rendezvous=where)
            party.join(friend, code)
            await trio.sleep(5)
        await trio.sleep(10)
        async with rendezvous(server, port=7443):
            await trio.sleep(40)
            assert not friend.ended.is_set()
            party.join(late, code)
            with trio.fail_after(20):
                await friend.serving.wait()
            nursery.cancel_scope.cancel()


async def test_who_leaves_before_the_plan_is_named_and_the_others_go_on_waiting(autojump_clock: MockClock) -> None:
    net = VirtualNetwork(seed=5)
    server = net.machine("rendezvous")
    async with net.running(), rendezvous(server) as running, trio.open_nursery() as nursery:
        party = Party(nursery)
        host, friend, other = (party.member(name, net.machine(name)) for name in ("host", "friend", "other"))
        code = await party.host(host, 4, rendezvous=HostPort(server.hosts()[0], running.address.port))
        for member in (friend, other):
            party.join(member, code)
            await trio.sleep(5)
        net.machines["friend"].unplug()
        await trio.sleep(60)
        for left in (host, other):
            assert not left.ended.is_set()
            assert left.screen.lines[-2:] == [
                "friend left before the ring was formed",
                "2 of 4 here: host, other",
            ]
        nursery.cancel_scope.cancel()
