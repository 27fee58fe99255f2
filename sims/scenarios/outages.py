"""What goes away and comes back under a live link: the direct path, the rendezvous, a NAT, a mapping."""

from __future__ import annotations

from collections.abc import Callable

import trio

from kafila.nat.events import MappingMoved, PathSilent
from kafila.types import PathKind
from sims.nat import Mapping, Refresh
from sims.scenarios.common import connect, latest_rtts, settle, still_direct
from sims.scenarios.link import DENSE, Flow, Link, Pace
from sims.scenarios.scenario import Figures, Outcome, Scenario, Target, Unmet, expect
from sims.scenarios.world import World
from sims.topology import Nat, VirtualNetwork

SPARSE: Pace = {"every_s": 0.2, "frame_bytes": 4000}
"""Where a scenario lasts a minute."""
TWO_RTTS = Target(2, 2)
"""The latest frame while a link changes its path, in round trips to the rendezvous."""
TAKE_OVER_MS = Target(1000, 1000)
"""Data flows over the relay again so soon after a direct path died in silence."""
DIRECT_AGAIN_S = Target(10, 10)
"""After a dead direct path has returned."""
RESUMED_S = Target(2, 2)
"""After the rendezvous has returned, for a relayed link."""


def _homes(net: VirtualNetwork, **habits: object) -> tuple[Nat, Nat]:
    """Two homes, ``a`` in one and ``b`` in the other; ``habits`` are those of the first one's NAT."""
    here, there = net.nat("a's home", **habits), net.nat("b's home")  # type: ignore[arg-type]  # passed on as they are
    here.machine("a")
    there.machine("b")
    return here, there


async def _pair(world: World) -> Link:
    return await world.pair(world.net.machines["a"], world.net.machines["b"])


async def _until(holds: Callable[[], bool], within_s: float, otherwise: str) -> float:
    """Poll ten times a second; how long it took. Raises Unmet."""
    began = trio.current_time()
    while not holds():
        if trio.current_time() - began > within_s:
            raise Unmet(otherwise)
        await trio.sleep(0.1)
    return trio.current_time() - began


def _is_direct(link: Link) -> bool:
    return all(me.kind_to(peer) is PathKind.DIRECT for me, peer in link.ends)


async def _switch(net: VirtualNetwork) -> Outcome:
    """The direct way opens only in the fourth second, so the link goes from relay to direct with frames on it."""
    here, there = _homes(net)
    net.partition([here], [there], 0, 3)
    async with World(net).running() as world:
        link = await _pair(world)
        link.open()
        await link.up()
        flows = link.load(world.nursery, DENSE)
        began = trio.current_time()
        await link.direct(within_s=20)
        await trio.sleep(5)
        ended = trio.current_time()
        await settle(*flows)
        still_direct(link)
        return Outcome({"latest_frame_rtts": [latest_rtts(flow, began, ended) for flow in flows]})


async def _epoch(net: VirtualNetwork) -> Outcome:
    """A second interface comes up at one end of a loaded direct link, which proves everything anew over the relay."""
    _homes(net)
    async with World(net).running() as world:
        link = await _pair(world)
        await connect(link)
        flows = link.load(world.nursery, DENSE)
        await trio.sleep(2)
        began = trio.current_time()
        machine = link.a.machine
        machine.attach(net.private_lan("a's office", "10.77.0.0/16").lan, ["10.77.0.7"])
        went_back = await _until(
            lambda: link.a.kind_to(link.b) is PathKind.RELAYED, 20, "the new interface went unseen"
        )
        await _until(lambda: _is_direct(link), 10, f"10 s after the new interface: {link.kinds()}")
        await trio.sleep(3)
        ended = trio.current_time()
        await settle(*flows)
        still_direct(link)
        late = [latest_rtts(flow, began, ended) for flow in flows]
        return Outcome({"latest_frame_rtts": late, "noticed_s": [went_back]})


async def _dies(net: VirtualNetwork, *, both_ways: bool) -> Outcome:
    """A direct path under load goes black for ten seconds."""
    here, there = _homes(net)
    async with World(net).running() as world:
        link = await _pair(world)
        figures = await connect(link)
        flows = link.load(world.nursery, DENSE)
        await trio.sleep(2 + world.random.random())  # anywhere between two looks at the path
        dead_at, back_at = trio.current_time(), trio.current_time() + 10
        net.path(here, there).cut(dead_at, back_at)
        if both_ways:
            net.path(there, here).cut(dead_at, back_at)
        await trio.sleep_until(back_at)
        silences = [flow.longest_silence(dead_at, back_at) for flow in flows]
        told = any(isinstance(event.news, PathSilent) for me, _ in link.ends for _, event in me.news)
        expect(told, "nobody was told that the direct path went silent")
        again_s = await _until(lambda: _is_direct(link), 30, f"30 s after its return: {link.kinds()}")
        await settle(*flows)
        link.lasted()
        return Outcome(
            figures | {"relay_took_over_ms": [1e3 * s for s in silences], "direct_again_s": [again_s]},
        )


async def _dies_both(net: VirtualNetwork) -> Outcome:
    return await _dies(net, both_ways=True)


async def _dies_one_way(net: VirtualNetwork) -> Outcome:
    return await _dies(net, both_ways=False)


async def _restart_beside_direct(net: VirtualNetwork) -> Outcome:
    """Direct links do not notice that the rendezvous is away for five seconds; registration comes back by itself."""
    _homes(net)
    async with World(net).running() as world:
        link = await _pair(world)
        await connect(link)
        flows = link.load(world.nursery, SPARSE)
        await trio.sleep(3)
        began = trio.current_time()
        await world.stop_rendezvous()
        await trio.sleep(5)
        await world.start_rendezvous()
        returned = trio.current_time()
        await trio.sleep(40)  # an idle member pings every 15 s, and only then knows of the loss
        late = [latest_rtts(flow, began, trio.current_time() - 1) for flow in flows]
        still_direct(link)
        for me, _ in link.ends:
            expect(me.rejoined_at, f"{me.machine.name} did not register again within 40 s")
        await settle(*flows)
        again = [me.rejoined_at[-1] - returned for me, _ in link.ends]
        return Outcome({"latest_frame_rtts": late, "registered_again_s": again})


async def _restart_under_relay(net: VirtualNetwork) -> Outcome:
    """A relayed link stands still while the rendezvous is away, for 3, 6 and 9 seconds, and goes on when it is back."""
    net.nat("a's carrier", mapping=Mapping.APDM).machine("a")
    net.nat("b's carrier", mapping=Mapping.APDM).machine("b")
    async with World(net).running() as world:
        link = await _pair(world)
        link.open()
        await link.up()
        flows = link.load(world.nursery, SPARSE)
        resumed: list[float] = []
        for outage_s in (3, 6, 9):
            await trio.sleep(3)
            await world.stop_rendezvous()
            await trio.sleep(outage_s)
            await world.start_rendezvous()
            returned = trio.current_time()
            await trio.sleep(15)
            resumed += [_first_after(flow, returned) - returned for flow in flows]
        await settle(*flows)
        link.lasted()
        return Outcome({"resumed_s": resumed})


def _first_after(flow: Flow, since_s: float) -> float:
    return min((time_s for time_s in flow.arrived.values() if time_s >= since_s), default=float("inf"))


async def _signalling_lost(net: VirtualNetwork) -> Outcome:
    """The way to the rendezvous is cut for two minutes, and the direct link carries on, loaded and then idle."""
    here, there = _homes(net)
    async with World(net).running() as world:
        link = await _pair(world)
        await connect(link)
        cut = trio.current_time()
        net.partition([here, there], [world.server], cut, cut + 120)
        flows = link.load(world.nursery)
        await trio.sleep(10)
        await settle(*flows)
        await trio.sleep_until(cut + 119)
        link.lasted()
        still_direct(link)
        for me, _ in link.ends:
            expect(me.lost_at, f"{me.machine.name} did not notice that the rendezvous is away")
        return Outcome({"latest_frame_rtts": [latest_rtts(flow, cut, cut + 10) for flow in flows]})


async def _idle(net: VirtualNetwork, **habits: object) -> Outcome:
    """Two and a half idle minutes behind a NAT that forgets after thirty seconds; then a frame, which is on time."""
    _homes(net, timeout_s=30.0, **habits)
    async with World(net).running() as world:
        link = await _pair(world)
        figures: Figures = await connect(link)
        await trio.sleep(150)
        still_direct(link)
        began = trio.current_time()
        flows = link.load(world.nursery)
        await trio.sleep(2)
        await settle(*flows)
        still_direct(link)
        return Outcome(figures | {"latest_frame_rtts": [latest_rtts(flow, began, began + 2) for flow in flows]})


async def _idle_outbound(net: VirtualNetwork) -> Outcome:
    return await _idle(net, refresh=Refresh.OUTBOUND)


async def _mapping_moves(net: VirtualNetwork, *, keep_old: bool) -> Outcome:
    """A carrier gives the live mapping another port; ``keep_old``: the old one still lets packets in."""
    here, _ = _homes(net)
    async with World(net).running() as world:
        link = await _pair(world)
        figures = await connect(link)
        flows = link.load(world.nursery, DENSE)
        await trio.sleep(2)
        moved = trio.current_time()
        here.move_mappings(keep_old=keep_old)
        await trio.sleep(6)
        silences = [flow.longest_silence(moved, moved + 6) for flow in flows]
        await settle(*flows)
        still_direct(link)
        told = any(isinstance(event.news, MappingMoved | PathSilent) for me, _ in link.ends for _, event in me.news)
        expect(told, "nobody was told that a NAT moved a mapping")
        return Outcome(figures | {"longest_silence_ms": [1e3 * s for s in silences]})


async def _moves_half(net: VirtualNetwork) -> Outcome:
    return await _mapping_moves(net, keep_old=True)


async def _moves_whole(net: VirtualNetwork) -> Outcome:
    return await _mapping_moves(net, keep_old=False)


async def _reboot(net: VirtualNetwork) -> Outcome:
    """A home router restarts under load: two seconds of nothing, no mapping left, another public address."""
    here, _ = _homes(net)
    async with World(net).running() as world:
        link = await _pair(world)
        figures = await connect(link)
        flows = link.load(world.nursery)
        await trio.sleep(5)
        back_at = trio.current_time() + 2
        here.reboot(outage_s=2, new_address=True)
        await trio.sleep_until(back_at)
        await _until(
            lambda: all(_first_after(flow, back_at + 0.1) < float("inf") for flow in flows),
            20,
            "no frame arrived within 20 s of the router's return",
        )
        await _until(lambda: _is_direct(link), 30, f"30 s after the router's return: {link.kinds()}")
        again_s = trio.current_time() - back_at
        resumed_s = max(_first_after(flow, back_at + 0.1) for flow in flows) - back_at
        await trio.sleep(5)
        await settle(*flows)
        link.lasted()
        return Outcome(figures | {"frames_again_s": [resumed_s], "direct_again_s": [again_s]})


SCENARIOS = [
    Scenario(
        "switch-to-direct",
        "a loaded link goes from the relay to a direct path",
        _switch,
        {"latest_frame_rtts": TWO_RTTS},
    ),
    Scenario(
        "switch-back-and-forth",
        "a loaded direct link goes back to the relay and becomes direct again, as an interface comes up",
        _epoch,
        {"latest_frame_rtts": TWO_RTTS},
    ),
    Scenario(
        "direct-dies",
        "a loaded direct path goes silent and returns ten seconds later",
        _dies_both,
        {"relay_took_over_ms": TAKE_OVER_MS, "direct_again_s": DIRECT_AGAIN_S},
    ),
    Scenario(
        "direct-dies-one-way",
        "the same, in one direction alone",
        _dies_one_way,
        {"relay_took_over_ms": TAKE_OVER_MS, "direct_again_s": DIRECT_AGAIN_S},
    ),
    Scenario(
        "rendezvous-restart",
        "the rendezvous restarts beside a direct link, which does not notice",
        _restart_beside_direct,
        {"latest_frame_rtts": TWO_RTTS},
    ),
    Scenario(
        "rendezvous-restart-relayed",
        "the rendezvous restarts under a relayed link, which goes on after it",
        _restart_under_relay,
        {"resumed_s": RESUMED_S},
    ),
    Scenario(
        "signalling-lost",
        "the rendezvous cannot be reached for two minutes, and the direct link lives",
        _signalling_lost,
        {"latest_frame_rtts": TWO_RTTS},
    ),
    Scenario(
        "idle-30-s-mapping",
        "a NAT forgets after 30 s, and an idle link is kept open",
        _idle,
        {"latest_frame_rtts": TWO_RTTS},
    ),
    Scenario(
        "idle-inbound-not-refreshing",
        "the same where only what goes out keeps a mapping",
        _idle_outbound,
        {"latest_frame_rtts": TWO_RTTS},
    ),
    Scenario(
        "mapping-moves",
        "a carrier moves a live mapping to another port",
        _moves_whole,
        {"longest_silence_ms": TAKE_OVER_MS},
    ),
    Scenario(
        "mapping-moves-half",
        "the same, and the old port still lets packets in",
        _moves_half,
        {"longest_silence_ms": TAKE_OVER_MS},
    ),
    Scenario(
        "nat-reboot",
        "a home router restarts with a new address under load",
        _reboot,
        {"direct_again_s": DIRECT_AGAIN_S},
    ),
]
