"""Whole sessions: deployed nodes with stand-in shards, whose every answer depends on all that went before."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from kafila.errors import KafilaError
from kafila.question import conversation
from kafila.ring.invite import HostPort, SessionCode
from kafila.types import Question
from sims.net import Machine
from sims.packet import is_v6
from sims.scenarios.scenario import Figures, Outcome, Scenario, Target, Unmet, expect
from sims.scenarios.world import PORT, World
from sims.standin_party import BLOCKS, Guest, Party, solo
from sims.topology import Nat, Place, VirtualNetwork

NAME = "rendezvous.example"
Sockaddr = tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, int] | tuple[int, bytes]

FORMED_WITHIN_S = 30.0
QUESTIONS = ("a b c d", "e f", "g h i", "b", "k j", "c c", "d e f g", "h a", "j i", "f")


class Session:
    """Members in homes of their own, and the rendezvous."""

    def __init__(self, world: World, nursery: trio.Nursery, *, blocks: int = BLOCKS) -> None:
        self.blocks = blocks
        self.world = world
        self.net = world.net
        self.party = Party(nursery)
        self.homes: dict[str, Place] = {}
        self.machines: dict[str, Machine] = {}
        self.guests: list[Guest] = []

    @property
    def where(self) -> HostPort:
        """The rendezvous as a code names it: by a name that leads to all its addresses."""
        return HostPort(NAME, PORT)

    def member(self, name: str, home: Place | None = None) -> Guest:
        """One more, not yet started; in a home of its own unless told where."""
        home = home or self.net.nat(f"home of {name}")
        machine = home.machine(name)
        self.world.near(machine)
        self.homes[name], self.machines[name] = home, machine
        guest = self.party.member(name, machine, blocks=self.blocks)
        self.guests.append(guest)
        return guest

    async def form(self) -> float:
        """Open the session with all members made so far; seconds until everybody serves. Raises Unmet."""
        began = trio.current_time()
        code = await self.open()
        for guest in self.guests[1:]:
            self.party.join(guest, code)
        await self.until_serving(*self.guests)
        return trio.current_time() - began

    async def open(self) -> SessionCode:
        """The first member opens the session for all made so far."""
        return await self.party.host(self.guests[0], len(self.guests), rendezvous=self.where)

    async def until_serving(self, *guests: Guest) -> None:
        """Raises Unmet that names whoever does not serve in time, with its last words."""
        with trio.move_on_after(FORMED_WITHIN_S):
            for guest in guests:
                await guest.serving.wait()
        for guest in guests:
            why = guest.error or (guest.screen.lines[-1] if guest.screen.lines else "it said nothing")
            expect(guest.serving.is_set(), f"{guest.name} does not serve after {FORMED_WITHIN_S:.0f} s: {why}")

    def right_answer(self, question: str) -> str:
        """What the ring must answer."""
        plans = [facts["plan"] for what, _, facts in self.guests[0].facts.records if what == "plan"]
        return solo(question, [stage["blocks"]["first"] for stage in json.loads(plans[-1])["stages"]])

    async def ask(self, guest: Guest, question: str) -> float:
        """Ask, and have the right answer; the longest wait for a part of it, seconds. Raises Unmet."""
        expect(guest.node is not None and not guest.ended.is_set(), f"{guest.name} has ended: {guest.error}")
        text, heard, longest = "", trio.current_time(), 0.0
        if guest.node is not None:
            async with guest.node.answer(Question(conversation(("user", question)))) as parts:
                async for part in parts:
                    now = trio.current_time()
                    text, heard, longest = text + part.delta, now, max(longest, now - heard)
        right = self.right_answer(question)
        expect(text == right, f"{guest.name} asked {question!r} and got {text!r}, which should be {right!r}")
        return longest

    async def ask_for(self, duration_s: float) -> float:
        """Everybody asks in turn, one question after another; the longest wait for a part of an answer."""
        until, longest, asked = trio.current_time() + duration_s, 0.0, 0
        while trio.current_time() < until:
            guest = self.guests[asked % len(self.guests)]
            longest = max(longest, await self.ask(guest, QUESTIONS[asked % len(QUESTIONS)]))
            asked += 1
        return longest


class _Names(trio.abc.HostnameResolver):
    """The one name of the virtual network."""

    def __init__(self, server: Machine) -> None:
        self._server = server

    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,  # noqa: A002  - the resolver's signature
        proto: int = 0,
        flags: int = 0,  # noqa: ARG002  - as above
    ) -> Any:
        """Every address of the rendezvous, as ``socket.getaddrinfo`` has it. Raises OSError for any other name."""
        await trio.lowlevel.checkpoint()
        if host is None or host.decode() != NAME or not isinstance(port, int):
            raise socket.gaierror(socket.EAI_NONAME, "no such name in the virtual network")
        families = {host: socket.AF_INET6 if is_v6(host) else socket.AF_INET for host in self._server.hosts()}
        return [
            (own, socket.SocketKind(type), proto, "", (address, port))
            for address, own in families.items()
            if family in {0, own}
        ]

    async def getnameinfo(self, sockaddr: Sockaddr, flags: int) -> tuple[str, str]:  # noqa: ARG002  - as above
        """Nobody asks."""
        raise socket.gaierror(socket.EAI_NONAME, f"{sockaddr[0]} has no name in the virtual network")


@asynccontextmanager
async def session(net: VirtualNetwork, *, v6: bool = False) -> AsyncIterator[Session]:
    """The stage; members are still to be made."""
    async with World(net, v6=v6).running() as world, trio.open_nursery() as nursery:
        trio.socket.set_custom_hostname_resolver(_Names(world.server))
        yield Session(world, nursery)
        nursery.cancel_scope.cancel()


async def _answers(net: VirtualNetwork) -> Outcome:
    async with session(net) as s:
        for name in ("ann", "ben", "cat"):
            s.member(name)
        formed_s = await s.form()
        longest = await s.ask_for(5)
        return Outcome({"formed_s": [formed_s], "longest_wait_ms": [longest * 1e3]})


async def _udp_blocked_for_one(net: VirtualNetwork) -> Outcome:
    """The third member's network lets no UDP through. It is told so by name, and its seat stays for somebody else."""
    async with session(net) as s:
        for name in ("ann", "ben", "cat"):
            s.member(name)
        s.machines["cat"].udp_blocked = True
        code = await s.open()
        *_, cat = s.guests
        began = trio.current_time()
        for guest in s.guests[1:]:
            s.party.join(guest, code)
        told_s = await _declined(cat, began)
        dan = s.member("dan")
        s.party.join(dan, code)
        s.guests.remove(cat)
        await s.until_serving(*s.guests)
        await s.ask_for(2)
        return Outcome({"told_s": [told_s]})


async def _udp_blocked_for_all(net: VirtualNetwork) -> Outcome:
    """No member's network lets UDP through: the host hears it at once, and there is no code to give away."""
    async with session(net) as s:
        ann = s.member("ann")
        s.machines["ann"].udp_blocked = True
        began = trio.current_time()
        try:
            await s.open()
        except KafilaError:
            return Outcome({"told_s": [await _declined(ann, began)]})
        raise Unmet("a session was opened without a way to the rendezvous")


async def _declined(guest: Guest, began_s: float) -> float:
    """Until a guest is told, by name, that UDP does not get through; seconds. Raises Unmet."""
    with trio.move_on_after(10):
        await guest.ended.wait()
    words = str(guest.error)
    expect(guest.error is not None, f"{guest.name} was told nothing in ten seconds")
    expect(guest.name in words and "UDP" in words, f"the words do not name the member and UDP: {words!r}")
    return trio.current_time() - began_s


async def _asked_through(net: VirtualNetwork, happens: str) -> Outcome:
    """Three members ask on and on while something happens in the third second."""
    async with session(net) as s:
        for name in ("ann", "ben", "cat"):
            s.member(name)
        await s.form()
        began = trio.current_time()
        world = s.world

        async def restart() -> None:
            await world.stop_rendezvous()
            await trio.sleep(4)
            await world.start_rendezvous()

        async def later() -> None:
            await trio.sleep_until(began + 2)
            home = s.homes["ben"]
            if happens == "reboot" and isinstance(home, Nat):
                home.reboot(outage_s=2, new_address=True)
            elif happens == "move":
                net.move(s.machines["ben"], net.nat("cafe", ipv6=True))
                world.near(s.machines["ben"])
            else:
                await restart()

        world.nursery.start_soon(later)
        longest = await s.ask_for(15)
        _expect_alive(s)
        await s.ask_for(1)
        ring = s.guests[1].node.ring() if s.guests[1].node else None
        direct = sum(edge.measured and edge.kind == "direct" for edge in ring.edges) if ring else 0
        return Outcome({"longest_wait_ms": [longest * 1e3], "direct_edges_after": [float(direct)]})


def _expect_alive(s: Session) -> None:
    for guest in s.guests:
        expect(not guest.ended.is_set(), f"{guest.name}'s session has ended: {guest.error}")


async def _reboot(net: VirtualNetwork) -> Outcome:
    return await _asked_through(net, "reboot")


async def _restart(net: VirtualNetwork) -> Outcome:
    return await _asked_through(net, "restart")


async def _moves(net: VirtualNetwork) -> Outcome:
    return await _asked_through(net, "move")


async def _roam(net: VirtualNetwork) -> Outcome:
    """A member walks from an IPv4 home to a network with IPv6 alone, sockets open, in the middle of answers."""
    async with session(net, v6=True) as s:
        for name in ("ann", "ben"):
            s.member(name, net.nat(f"home of {name}", ipv6=True))
        old_home = s.member("dan", net.nat("home of dan"))
        await s.form()
        began = trio.current_time()

        async def later() -> None:
            await trio.sleep_until(began + 3)
            net.move(s.machines[old_home.name], net.nat("new provider", ipv6=True), v4=False)
            s.world.near(s.machines[old_home.name])

        s.world.nursery.start_soon(later)
        longest = await s.ask_for(15)
        _expect_alive(s)
        return Outcome({"longest_wait_ms": [longest * 1e3]})


async def _sleep(net: VirtualNetwork) -> Outcome:
    """A lid is closed for ten minutes. The others hear within seconds who is gone; the sleeper, on waking, that it is
    over; and a new session forms at once."""
    async with session(net) as s:
        for name in ("ann", "ben", "cat"):
            s.member(name)
        await s.form()
        await s.ask_for(2)
        ann, ben, cat = s.guests
        slept = trio.current_time()
        s.machines["ben"].sleep(600)
        with trio.move_on_after(60):
            await ann.ended.wait()
            await cat.ended.wait()
        for guest in (ann, cat):
            expect(guest.ended.is_set(), f"{guest.name} still waits for the sleeper after a minute")
            expect("ben" in str(guest.error), f"{guest.name} was not told who is gone: {guest.error}")
        told_s = trio.current_time() - slept
        await trio.sleep_until(slept + 600)
        with trio.move_on_after(60):
            await ben.ended.wait()
        expect(ben.ended.is_set(), "the sleeper has not noticed a minute after waking that the session is over")
        expect(ben.error is not None, "the sleeper was told nothing")
        woke_s = trio.current_time() - slept - 600
        return Outcome({"others_told_s": [told_s], "sleeper_told_s": [woke_s]}, [str(ben.error)])


SIZES = (2, 3, 4, 8, 16)


async def _packets(net: VirtualNetwork) -> Outcome:
    """Sessions of growing size, one after another at one rendezvous; what the busiest member sent until it served."""
    figures: Figures = {}
    async with World(net).running() as world:
        trio.socket.set_custom_hostname_resolver(_Names(world.server))
        for size in SIZES:
            async with trio.open_nursery() as nursery:
                s = Session(world, nursery, blocks=2 * size)
                for number in range(size):
                    s.member(f"member {number} of {size}")
                formed_s = await s.form()
                counts = [float(machine.sent) for machine in s.machines.values()]
                figures[f"packets_{size}_members"] = counts
                figures.setdefault("formed_s", []).append(formed_s)
                nursery.cancel_scope.cancel()
    mean = {size: sum(figures[f"packets_{size}_members"]) / size for size in SIZES}
    for size in SIZES:
        # With two members there is one neighbour to link with, with more there are two; the rest is signalling.
        line = mean[3] + (mean[16] - mean[3]) / 13 * (size - 3)
        expect(
            mean[size] <= 1.25 * line or size == 2, f"{mean[size]:.0f} packets a member of {size}, a line: {line:.0f}"
        )
    expect(mean[16] <= 8 * mean[2], "packets a member grow faster than members do")
    return Outcome(figures)


TOLD_S = Target(8, 8)
"""Before a person gives up and wonders."""

SCENARIOS = [
    Scenario("session-answers", "three members in three homes ask and are answered right", _answers),
    Scenario(
        "session-udp-blocked-one",
        "UDP is blocked for one member, who is told so",
        _udp_blocked_for_one,
        {"told_s": TOLD_S},
    ),
    Scenario(
        "session-udp-blocked-all",
        "UDP is blocked for the host, who is told so",
        _udp_blocked_for_all,
        {"told_s": TOLD_S},
    ),
    Scenario(
        "session-nat-reboot",
        "a member's router restarts with a new address in mid-answer",
        _reboot,
        {"longest_wait_ms": Target(5000, 7000)},
    ),
    Scenario(
        "session-rendezvous-restart",
        "the rendezvous restarts in mid-answer",
        _restart,
        {"longest_wait_ms": Target(1000, 2000)},
    ),
    Scenario(
        "session-moves",
        "a member walks to another network in mid-answer",
        _moves,
        {"longest_wait_ms": Target(5000, 7000)},
    ),
    Scenario(
        "session-roams-v4-v6",
        "a member walks from IPv4 to IPv6 alone in mid-answer",
        _roam,
        {"longest_wait_ms": Target(5000, 7000)},
    ),
    Scenario(
        "session-sleeps",
        "a member sleeps for ten minutes and wakes",
        _sleep,
        {"others_told_s": Target(10, 15), "sleeper_told_s": Target(10, 15)},
    ),
    Scenario("session-packets", "packets a member sends to form a session of 2 to 16", _packets, max_seeds=3),
]
