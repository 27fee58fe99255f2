"""Links that lose, burst, reorder, carry only small packets, or carry everything but data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from kafila.nat.events import PathNarrowed, PathSilent, PathTooNarrow
from kafila.types import PathKind
from sims.link import Bursts
from sims.link import Link as Wire
from sims.packet import Packet
from sims.scenarios.common import connect, latest_rtts, settle, still_direct
from sims.scenarios.link import DENSE, Link
from sims.scenarios.scenario import Outcome, Scenario, Target, expect
from sims.scenarios.world import World
from sims.topology import VirtualNetwork

LOAD_S = 10.0
PING_BYTES = 600
"""Between the path layer's small pings and its full-size ones: IP packets above this are data."""


def _homes(net: VirtualNetwork) -> tuple[Wire, Wire]:
    """The direct way there and back of two homes, ``a`` in one and ``b`` in the other."""
    here, there = net.nat("a's home"), net.nat("b's home")
    here.machine("a")
    there.machine("b")
    return net.path(here, there), net.path(there, here)


async def _loaded(net: VirtualNetwork, look: Callable[[Link], None]) -> Outcome:
    """A link that becomes direct over the wires as they are, then ten seconds of frames both ways."""
    async with World(net).running() as world:
        link = await world.pair(net.machines["a"], net.machines["b"])
        link.open()
        await link.up()
        direct_s = await link.direct()
        began = trio.current_time()
        flows = link.load(world.nursery)
        await trio.sleep(LOAD_S)
        await settle(*flows)
        link.lasted()
        look(link)
        late = [latest_rtts(flow, began, began + LOAD_S) for flow in flows]
        return Outcome({"direct_ms": [direct_s * 1e3], "latest_frame_rtts": late})


def _over(
    name: str,
    sentence: str,
    direct_ms: Target,
    spoil: Callable[[Wire, Wire], None],
) -> Scenario:
    async def body(net: VirtualNetwork) -> Outcome:
        spoil(*_homes(net))
        return await _loaded(net, still_direct)

    return Scenario(name, sentence, body, {"direct_ms": direct_ms})


def _both(**changes: Any) -> Callable[[Wire, Wire], None]:
    def spoil(there: Wire, back: Wire) -> None:
        there.set(**changes)
        back.set(**changes)

    return spoil


async def _mtu_one_way(net: VirtualNetwork) -> Outcome:
    there, _ = _homes(net)
    there.set(mtu_bytes=1280)
    return await _loaded(net, still_direct)


async def _too_narrow(net: VirtualNetwork) -> Outcome:
    """1124 bytes do not carry QUIC's 1200: pings pass, so the path looks alive."""
    for wire in _homes(net):
        wire.set(mtu_bytes=1124)
    async with World(net).running() as world:
        link = await world.pair(net.machines["a"], net.machines["b"])
        link.open()
        await link.up()
        began = trio.current_time()
        flows = link.load(world.nursery, DENSE)
        await trio.sleep(LOAD_S)
        await settle(*flows)
        link.lasted()
        for me, peer in link.ends:
            expect(me.kind_to(peer) is PathKind.RELAYED, f"a path of 1124 bytes is in use: {link.kinds()}")
            told = any(isinstance(event.news, PathTooNarrow) for _, event in me.news)
            expect(told, f"{me.machine.name} was not told that the direct path is too narrow")
        return Outcome({"latest_frame_rtts": [latest_rtts(flow, began, began + LOAD_S) for flow in flows]})


async def _data_dropped(net: VirtualNetwork) -> Outcome:
    """Small packets go on passing while everything larger vanishes, from the tenth second on."""
    wires = _homes(net)
    async with World(net).running() as world:
        link = await world.pair(net.machines["a"], net.machines["b"])
        await connect(link)
        await trio.sleep(8 - trio.current_time())
        flows = link.load(world.nursery, DENSE)
        await trio.sleep(2)
        for wire in wires:
            wire.censor = _is_data
        began = trio.current_time()
        await trio.sleep(LOAD_S)
        silences = [flow.longest_silence(began, began + LOAD_S) for flow in flows]
        await settle(*flows)
        link.lasted()
        told = any(isinstance(event.news, PathSilent | PathNarrowed) for _, event in link.a.news)
        expect(told, "nobody was told that the direct path carries no data")
        return Outcome({"longest_silence_ms": [silence * 1e3 for silence in silences]})


def _is_data(packet: Packet) -> bool:
    return packet.ip_bytes > PING_BYTES


SLOWER = Target(700, 1500)
"""Direct over a lossy path: one lost probe costs the next step of the schedule."""

SCENARIOS = [
    _over("loss-5", "5% of the direct path's packets are lost at random", SLOWER, _both(loss=0.05)),
    _over("loss-bursts", "5% are lost in bursts of eight", SLOWER, _both(bursts=Bursts.of(0.05, 8))),
    _over("reorder", "three packets in ten are overtaken by 10 ms of others", SLOWER, _both(reorder=0.3)),
    _over(
        "reorder-heavy",
        "three packets in ten are overtaken by 60 ms of others",
        SLOWER,
        _both(reorder=0.3, reorder_s=0.06),
    ),
    _over("duplicates", "one packet in five comes twice", Target(300, 700), _both(duplicate=0.2)),
    Scenario("mtu-1280-one-way", "1280 bytes at most there, 1500 back", _mtu_one_way, {"direct_ms": Target(300, 700)}),
    Scenario(
        "mtu-1124",
        "a direct path too narrow for QUIC is told and not used",
        _too_narrow,
    ),
    Scenario(
        "pings-pass-data-dropped",
        "a direct path starts to drop everything but small packets",
        _data_dropped,
        {"longest_silence_ms": Target(2000, 2500)},
    ),
]
