"""One session of a fleet, whole, in virtual time: deployed nodes on the virtual network with simulated devices."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import trio

from kafila.errors import KafilaError, PlanDeclined, SessionError
from kafila.plan import Objective, Plan
from kafila.plan.head import HEAD_MARGIN
from kafila.planning import Wishes
from kafila.rendezvous_service import Alternate, rendezvous
from kafila.ring.invite import HostPort
from kafila.settings import HostSettings
from sims.clock import run_virtual
from sims.fleet.device import Device, draw_device
from sims.fleet.member import Member
from sims.fleet.papers import network_s, served_over_probed
from sims.fleet.place import Ground, Net
from sims.fleet.shard import Passage, SimulatedBackend
from sims.fleet.trial import Edge, Outcome, Refused, Trial
from sims.fleets import PAPER, PAPER_FLEETS, Fleet, load_fleet
from sims.models import load_model
from sims.topology import VirtualNetwork

PORT = 7443
FORMED_WITHIN_S = 600.0
"""Loading a large share takes a minute; a session that does not form in ten has a fault."""
RUBBISH = 100_000
"""Objects made before the collector looks for cycles: a session makes few, and looking takes a tenth of its time."""
CROWDS = 2
"""How often all users ask at once; the first time is discarded."""
OVERLAP_TOKENS = 8
"""Tokens that each user gets while all are being answered, at least: a rate over a round or two says where it began."""
SETTLE_S = 6.0
"""After forming, before the first question is asked: paths that can be direct are so by then."""


def run_trial(trial: Trial) -> Outcome | Refused:
    """One session from the first datagram to the last answer. Not to be called inside Trio.

    Raises UsageError for a fleet or model that there is none of, SessionError where the session breaks.
    """
    fleet, devices = _drawn(trial)
    return run_fleet(trial, fleet, devices)


def run_fleet(
    trial: Trial, fleet: Fleet, devices: Sequence[Device], *, edge_s: float | None = None
) -> Outcome | Refused:
    """The same with members and devices as given; ``edge_s`` is what an edge takes under the overhead network."""
    began = time.perf_counter()
    if edge_s is None:
        edge_s = network_s(fleet.name) / len(fleet.members) if trial.network is Net.OVERHEAD else 0.0
    usual = gc.get_threshold()
    gc.set_threshold(RUBBISH, *usual[1:])
    try:
        return run_virtual(_Session(trial, fleet, devices, edge_s, began).run, seed=trial.seed)
    except BaseExceptionGroup as group:
        # Nurseries wrap what their tasks raise; what a person is told of is one of our own errors.
        ours, others = group.split(KafilaError)
        if ours is None or others is not None:
            raise
        raise _first(ours) from None
    finally:
        gc.unfreeze()  # a node freezes what it holds when it begins to serve; here others follow
        gc.set_threshold(*usual)


def _first(group: BaseExceptionGroup[KafilaError]) -> KafilaError:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _drawn(trial: Trial) -> tuple[Fleet, list[Device]]:
    fleet = load_fleet(trial.fleet)
    if trial.network is Net.GEOGRAPHY and PAPER in fleet.networks:
        fleet = load_fleet(trial.fleet, PAPER)
    random = VirtualNetwork(trial.seed).fabric.random
    factor = served_over_probed(fleet.name, load_model(trial.model).name) if trial.fleet in PAPER_FLEETS else 1.0
    return fleet, [
        draw_device(member, bandwidth, factor, random(f"device/{member.name}"))
        for member, bandwidth in zip(fleet.members, fleet.bandwidths, strict=True)
    ]


class _Session:
    def __init__(self, trial: Trial, fleet: Fleet, devices: Sequence[Device], edge_s: float, began: float) -> None:
        self._trial = trial
        self._fleet = fleet
        self._devices = devices
        self._edge_s = edge_s
        self._began = began
        self._members: list[Member] = []
        self._soak_tokens = 0

    async def run(self) -> Outcome | Refused:
        trial, net = self._trial, VirtualNetwork(self._trial.seed, rtt_s=0.0)
        ground = Ground(net, self._fleet, trial.network, self._edge_s)
        alternate = Alternate(ground.second, ground.server.hosts()[0], ground.second.hosts()[0])
        async with net.running(), rendezvous(ground.server, PORT, alternate), trio.open_nursery() as nursery:
            for stated, device, machine in zip(self._fleet.members, self._devices, ground.machines, strict=True):
                backend = SimulatedBackend(device, load_model(trial.model), net.fabric, one_by_one=not trial.batching)
                self._members.append(Member(stated.name, machine, backend))
            try:
                result = await self._live(nursery, HostPort(ground.server.hosts()[0], PORT))
            finally:
                nursery.cancel_scope.cancel()
        return result

    # -- forming ------------------------------------------------------------------------------------------------------

    async def _live(self, nursery: trio.Nursery, where: HostPort) -> Outcome | Refused:
        host = self._members[self._fleet.host]
        others = [member for member in self._members if member is not host]
        began = trio.current_time()
        nursery.start_soon(host.host, self._role(where))
        await host.invited_or_ended()
        for other in others:
            # One after another, so that the plan's ties fall the same way every time.
            nursery.start_soon(other.join, host.code(), where)
        with trio.move_on_after(FORMED_WITHIN_S):
            for member in self._members:
                await member.serving_or_ended()
        if isinstance(host.failure, PlanDeclined):
            return Refused(str(host.failure))
        if not host.serving.is_set():
            raise SessionError(f"{host.name} does not serve: {host.failure or host.last_words}")
        ring = self._plan().names
        for member in self._members:
            if member.name in ring and not member.serving.is_set():
                raise SessionError(f"{member.name} does not serve: {member.failure or member.last_words}")
        formed_s = trio.current_time() - began
        await trio.sleep(SETTLE_S)
        return await self._measured(formed_s)

    def _role(self, where: HostPort) -> HostSettings:
        trial = self._trial
        wishes = Wishes(
            objective=Objective(trial.objective),
            allocation=trial.allocation,
            shares=trial.shares,
            users=trial.planned_users or trial.users,
            margin=HEAD_MARGIN if trial.margin else 0.0,
            head_stays=trial.head_stays,
            count_relays=trial.count_relays,
            divide_head=trial.divide_head,
        )
        return HostSettings(trial.model, len(self._fleet.members), trial.context, trial.slots, where, wishes)

    # -- asking -------------------------------------------------------------------------------------------------------

    async def _measured(self, formed_s: float) -> Outcome:
        trial = self._trial
        plan = self._plan()
        ring = [self._members[index] for index in _by_name(self._members, plan.names)]
        alone: list[Mapping[str, Any]] = []
        since = trio.current_time()
        for _ in range(trial.generations):
            since = trio.current_time() if not alone else since
            alone.append(await self._ask(0))
        one_user_until = trio.current_time()
        kept = alone[1:] or alone
        rates = [_rate(facts) for facts in kept]
        stage_s, circuit_s = _decoding(ring[0], since, one_user_until)
        hops = _hops([member.backend.log for member in ring], since, one_user_until)
        crowd = [await self._crowd(ring[0]) for _ in range(CROWDS)] if trial.users > 1 else []
        if trial.minutes:
            await self._soak(trial.minutes * 60)
        return Outcome(
            names=plan.names,
            counts=plan.counts,
            predicted_s=tuple(stage.stage_s for stage in plan.stages),
            stage_s=stage_s,
            circuit_s=circuit_s,
            edges=self._edges(ring, hops),
            formed_s=formed_s,
            first_token_s=median(float(facts["first_token_s"]) for facts in kept),
            one_user=median(rates),
            all_users=median(crowd[1:]) if crowd else median(rates),
            virtual_s=trio.current_time(),
            real_s=time.perf_counter() - self._began,
            soak_tokens=self._soak_tokens,
        )

    def _plan(self) -> Plan:
        records = self._members[self._fleet.host].facts.of("plan")
        return Plan.from_json(records[-1][1]["plan"])

    async def _ask(self, user: int, answer_tokens: int = 0) -> Mapping[str, Any]:
        """One question of a user's, asked at the host or at those after it in the ring; what came of it."""
        askers = [member for member in self._members if member.serving.is_set()]
        member = askers[(askers.index(self._members[self._fleet.host]) + user) % len(askers)]
        return await member.ask(self._trial.prompt_tokens, answer_tokens or self._trial.answer_tokens)

    async def _crowd(self, head: Member) -> float:
        """Everybody asks at once; tokens per second while all are being answered.

        The last one's prompt is read in beside the others' answers, and those may be over by then, or nearly: longer
        ones are asked for until all overlap for long enough.
        """
        tokens = self._trial.answer_tokens
        most = self._trial.context - self._trial.prompt_tokens
        while (rate := await self._overlapping(head, tokens)) is None:
            if tokens >= most:
                raise SessionError("the answers are too short to overlap: give them more context")
            tokens = min(2 * tokens, most)
        return rate

    async def _overlapping(self, head: Member, answer_tokens: int) -> float | None:
        began = trio.current_time()
        times: list[tuple[float, float]] = []

        async def one(user: int) -> None:
            asked_at = trio.current_time()
            facts = await self._ask(user, answer_tokens)
            first = asked_at + float(facts["first_token_s"])
            times.append((first, first + float(facts["rest_s"])))

        async with trio.open_nursery() as nursery:
            for user in range(self._trial.users):
                nursery.start_soon(one, user)
        start, stop = max(first for first, _ in times), min(last for _, last in times)
        decoded = [(at, facts) for at, facts in head.facts.of("batch") if at >= began and facts["phase"] == "decode"]
        inside = [(at, int(facts["rows"])) for at, facts in decoded if start < at <= stop]
        tokens = sum(rows for _, rows in inside[1:])
        if tokens < OVERLAP_TOKENS * self._trial.users:
            return None
        return tokens / (inside[-1][0] - inside[0][0])

    async def _soak(self, duration_s: float) -> None:
        """Every user asks again and again."""
        until = trio.current_time() + duration_s

        async def one(user: int) -> None:
            while trio.current_time() < until:
                facts = await self._ask(user)
                self._soak_tokens += int(facts["answer_tokens"])

        async with trio.open_nursery() as nursery:
            for user in range(self._trial.users):
                nursery.start_soon(one, user)

    # -- what the trace says ------------------------------------------------------------------------------------------

    def _edges(self, ring: Sequence[Member], hops: Sequence[float]) -> tuple[Edge, ...]:
        edges = []
        for source, target, hop_s in zip(ring, [*ring[1:], ring[0]], hops, strict=False):
            linked = max(one.linked_s(other) for one, other in ((source, target), (target, source)))
            direct = [one.direct_s(other) for one, other in ((source, target), (target, source))]
            known = [time_s for time_s in direct if time_s is not None]
            edges.append(
                Edge(
                    source.name,
                    target.name,
                    source.kind_to(target),
                    linked,
                    max(known) if len(known) == len(direct) else None,
                    hop_s,
                )
            )
        return tuple(edges)


def _by_name(members: Sequence[Member], names: Sequence[str]) -> list[int]:
    return [[member.name for member in members].index(name) for name in names]


def _rate(facts: Mapping[str, Any]) -> float:
    return (int(facts["answer_tokens"]) - 1) / float(facts["rest_s"])


def _decoding(head: Member, since: float, until: float) -> tuple[tuple[float, ...], float]:
    """Median stage times round the ring and median circuit of the head's decode batches."""
    decoded = [facts for at, facts in head.facts.of("batch") if since <= at <= until and facts["phase"] == "decode"]
    stages = zip(*(facts["stage_s"] for facts in decoded), strict=True)
    return tuple(median(times) for times in stages), median(facts["circuit_s"] for facts in decoded)


def _hops(logs: Sequence[Sequence[Passage]], since: float, until: float) -> list[float]:
    """Median time of decode rows between devices, edge by edge."""
    if len(logs) == 1:
        return []
    hops = []
    for place, log in enumerate(logs):
        after = logs[(place + 1) % len(logs)]
        closes = place == len(logs) - 1
        left = {one.batch: one.done_at for one in log if one.is_decode and not one.draws}
        came = {one.batch: one.arrived_at for one in after if one.draws is closes}
        hops.append(
            median(came[batch] - done for batch, done in left.items() if batch in came and since <= done <= until)
        )
    return hops
