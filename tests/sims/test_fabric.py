"""Order, repeatability, and the price of an idle network."""

from __future__ import annotations

import hashlib

import trio
from trio.testing import MockClock

from kafila.types import Address
from sims.clock import run_virtual
from sims.fabric import Fabric
from sims.filtering import Filtering
from sims.link import Bursts, Quality
from sims.nat import Mapping
from sims.net import Machine, VirtualSocket
from sims.ports import RandomPorts
from sims.topology import VirtualNetwork

ROUGH = Quality(jitter_s=0.01, loss=0.05, bursts=Bursts.of(0.05, 4), duplicate=0.05, reorder=0.1)


async def answer(socket: VirtualSocket) -> None:
    while True:
        for data, source in await socket.receive_batch(8):
            await socket.send(data[::-1], source)


async def chat(machine: Machine, servers: list[Address]) -> None:
    socket = await machine.bind()
    for round_ in range(20):
        for server in servers:
            await socket.send(f"{machine.name} {round_}".encode(), server)
        with trio.move_on_after(0.1):
            while True:
                await socket.receive()


async def busy_scenario(seed: int, tasks_a_machine: int = 1) -> list[str]:
    """Eight clients that send at the very same instants, through rough links; its whole trace."""
    net = VirtualNetwork(seed)
    trace = net.trace()
    servers = [net.machine(f"server {n}") for n in range(2)]
    for n in range(8):
        nat = net.nat(mapping=Mapping.APDM, filtering=Filtering.EIF, ports=RandomPorts(), up=ROUGH, down=ROUGH)
        nat.machine(f"client {n}")
    async with net.running(), trio.open_nursery() as answering:
        for server in servers:
            answering.start_soon(answer, await server.bind(1))
        async with trio.open_nursery() as nursery:
            for name, machine in net.machines.items():
                for _ in range(tasks_a_machine if name.startswith("client") else 0):
                    nursery.start_soon(chat, machine, [Address(s.hosts()[0], 1) for s in servers])
        answering.cancel_scope.cancel()
    return trace.lines()


async def test_same_seed_same_trace(autojump_clock: MockClock) -> None:
    """Although Trio steps simultaneous tasks in an order of its own choosing.

    Times count from each run's start, so runs are compared by what happened, in order.
    """
    runs = {seed: [await busy_scenario(seed) for _ in range(4)] for seed in (1, 2)}
    bare = {seed: [[line[14:] for line in lines] for lines in several] for seed, several in runs.items()}
    assert len(bare[1][0]) > 1000
    for several in bare.values():
        assert all(lines == several[0] for lines in several)
    assert bare[1][0] != bare[2][0]


def test_run_virtual_repeats_even_what_tasks_of_one_machine_race_for() -> None:
    def digest(seed: int) -> str:
        return hashlib.sha256("\n".join(run_virtual(busy_scenario, 1, 3, seed=seed)).encode()).hexdigest()

    assert len({digest(5) for _ in range(3)}) == 1
    assert digest(5) != digest(6)


async def test_simultaneous_events_run_by_rank_then_in_order(autojump_clock: MockClock) -> None:
    fabric = Fabric(0)
    ran: list[str] = []
    first, second = fabric.new_rank(), fabric.new_rank()
    fabric.push(5.0, second, 1, lambda _now: ran.append("second link"))
    fabric.push(5.0, first, 2, lambda _now: ran.append("first link, later packet"))
    fabric.push(5.0, first, 1, lambda _now: ran.append("first link"))
    fabric.at(5.0, ran.append, "control")
    fabric.push(4.0, second, 2, lambda now: ran.append(f"earlier, at {now}"))
    async with fabric.running():
        await trio.sleep(6)
    assert ran == ["earlier, at 4.0", "control", "first link", "first link, later packet", "second link"]


async def test_who_sends_late_in_an_instant_is_not_overtaken_for_it(autojump_clock: MockClock) -> None:
    """The first machine takes the most steps before it sends; its packet still arrives first."""
    net = VirtualNetwork()
    machines = [net.machine(f"m{n}") for n in range(5)]
    server = await net.machine("server").bind(1)

    async def send(machine: Machine, steps: int) -> None:
        socket = await machine.bind()
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        await socket.send(machine.name.encode(), Address(server.machine.hosts()[0], 1))

    async with net.running(), trio.open_nursery() as nursery:
        for number, machine in enumerate(machines):
            nursery.start_soon(send, machine, 5 * (len(machines) - number))
        arrived = [(await server.receive())[0].decode() for _ in machines]
    assert arrived == ["m0", "m1", "m2", "m3", "m4"]


async def test_ten_idle_minutes_cost_nothing(autojump_clock: MockClock) -> None:
    """The network wakes for its two packets and for nothing else."""
    net = VirtualNetwork()
    a, b = net.nat().machine("a"), net.machine("b")
    one, other = await a.bind(), await b.bind(1)
    async with net.running():
        for _ in range(2):
            await one.send(b"keepalive", Address(b.hosts()[0], 1))
            await other.receive()
            await trio.sleep(300)
        assert trio.current_time() > 600
        assert net.fabric.instants <= 8


async def test_what_a_scenario_does_in_an_event_happens_in_that_event(autojump_clock: MockClock) -> None:
    fabric = Fabric(0)
    seen: list[float] = []

    def chain() -> None:
        seen.append(fabric.now)
        if len(seen) < 3:
            fabric.at(fabric.now + 1.5, chain)

    fabric.at(1.0, chain)
    async with fabric.running():
        await trio.sleep(10)
    assert seen == [1.0, 2.5, 4.0]
