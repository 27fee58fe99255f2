"""The scenario that most are: put two members somewhere, link them, and look."""

from __future__ import annotations

from collections.abc import Callable

import trio

from kafila.types import Address, PathKind
from sims.net import Machine
from sims.scenarios.grid import DIRECT_MS, FIRST_BYTE_RTTS
from sims.scenarios.link import Flow, Link, expect_whole
from sims.scenarios.scenario import Figures, Outcome, Scenario, Unmet, expect
from sims.scenarios.world import RENDEZVOUS_RTT_S, World
from sims.topology import VirtualNetwork

Place = Callable[[VirtualNetwork], tuple[Machine, Machine]]
Look = Callable[[VirtualNetwork, Link], None]
"""Raises Unmet where the link is not as it should be."""

CONNECTED = {"first_byte_rtts": FIRST_BYTE_RTTS, "direct_ms": DIRECT_MS}
"""The targets of a pair that is predicted direct."""
WATCH_S = 20.0
"""A pair that only the relay connects gets so long to prove it: two rounds of punching."""
DRAIN_S = 5.0
"""For what is under way when a load ends."""


def nothing_more(_net: VirtualNetwork, _link: Link) -> None:
    """Nothing else to look at."""


async def connect(link: Link) -> Figures:
    """Open a link that has to become direct; its first byte and how long that took. Raises Unmet."""
    link.open()
    first = await link.up()
    direct_s = await link.direct()
    return {"first_byte_rtts": [min(first) / RENDEZVOUS_RTT_S], "direct_ms": [direct_s * 1e3]}


def direct(name: str, sentence: str, place: Place, look: Look = nothing_more) -> Scenario:
    """Two members that must reach each other directly, and as fast as promised."""

    async def body(net: VirtualNetwork) -> Outcome:
        one, other = place(net)
        async with World(net, v6=True).running() as world:
            link = await world.pair(one, other)
            figures = await connect(link)
            await trio.sleep(DRAIN_S)
            still_direct(link)
            look(net, link)
            return Outcome(figures)

    return Scenario(name, sentence, body, CONNECTED)


def relayed(name: str, sentence: str, place: Place, look: Look = nothing_more) -> Scenario:
    """Two members that only the relay can connect, which it must."""

    async def body(net: VirtualNetwork) -> Outcome:
        one, other = place(net)
        async with World(net, v6=True).running() as world:
            link = await world.pair(one, other)
            link.open()
            first = await link.up()
            await trio.sleep(WATCH_S)
            expect(link.reach() == "none", f"the link was to be relayed, and is {link.kinds()}")
            link.lasted()
            look(net, link)
            return Outcome({"first_byte_rtts": [min(first) / RENDEZVOUS_RTT_S]})

    return Scenario(name, sentence, body, {"first_byte_rtts": FIRST_BYTE_RTTS})


def still_direct(link: Link) -> None:
    """Raise Unmet where the link is down or has gone back to the relay."""
    link.lasted()
    for me, peer in link.ends:
        expect(me.kind_to(peer) is PathKind.DIRECT, f"the link did not stay direct: {link.kinds()}")


def address_used(link: Link) -> tuple[Address, Address]:
    """Where each end sends to. Raises Unmet where one uses the relay."""
    used = []
    for me, peer in link.ends:
        changes = me.changes_to(peer)
        address = changes[-1][1].address if changes else None
        if address is None:
            raise Unmet(f"{me.machine.name} uses the relay")
        used.append(address)
    return used[0], used[1]


async def settle(*flows: Flow) -> None:
    """Stop the load of these flows and let what is under way arrive, whole. Raises Unmet."""
    for flow in flows:
        flow.is_open = False
    await trio.sleep(DRAIN_S)
    expect_whole(*flows)


def latest_rtts(flow: Flow, since_s: float, until_s: float) -> float:
    """The longest delay of the frames sent in a span, in round trips to the rendezvous."""
    return max(flow.delays(since_s, until_s), default=float("inf")) / RENDEZVOUS_RTT_S
