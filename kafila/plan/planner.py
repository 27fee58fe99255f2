"""Planning a session: order the ring, divide the model, admit the division, say what it would yield.

Nothing raises for an expected outcome: a model that does not fit is :class:`Declined`. UsageError is for what a person
typed and cannot have meant, such as shares that do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kafila.errors import UsageError
from kafila.plan.admit import HEADROOM
from kafila.plan.cost import Device, Tier, to_seconds
from kafila.plan.decline import decline
from kafila.plan.head import HEAD_MARGIN, place_head
from kafila.plan.members import MOST_AT_ONCE, KnownEdges, Member, ModelManifest, Workload
from kafila.plan.order import Arrangement, Ordering, Pairs, arrange, survey, unpriced
from kafila.plan.outcome import (
    Allocation,
    Declined,
    Guest,
    Objective,
    Plan,
    Prediction,
    RingEdge,
    Stage,
)
from kafila.plan.placement import Latencies, Placement, circuit_ticks, hops, stage_ticks
from kafila.plan.problem import Problem, Rule, admits
from kafila.plan.throughput import fastest_rings
from kafila.plan.words import counted
from kafila.types import BlockRange

MEMBER_LIMIT = 64
"""A session is a group of people who know one another; far beyond this the exact searches would take minutes."""


def plan_session(
    members: Sequence[Member],
    manifest: ModelManifest,
    workload: Workload,
    *,
    anchor: int,
    objective: Objective | str = Objective.BOTTLENECK,
    allocation: Allocation | str = Allocation.KAFILA,
    users: int | None = None,
    shares: Sequence[int] | None = None,
    edges: KnownEdges | None = None,
    margin: float = HEAD_MARGIN,
    headroom: float = HEADROOM,
    host_must_serve: bool = False,
    head_stays: bool = False,
    count_relays: bool = False,
) -> Plan | Declined:
    """Divide ``manifest`` over ``members``; ``anchor`` is the index of the one that opened the session.

    ``users`` is how many people the throughput objective and the predictions are for (default: the workload's
    concurrency). ``shares`` are exact block counts for a ring in the order of the members as listed, the head at the
    anchor. ``edges`` is what is known of pairs beyond their NAT classes. ``margin`` is what another head must gain over
    the anchor, 0 for anything at all. ``headroom`` is the share of a member's memory left unused. ``host_must_serve``
    keeps the anchor in the ring under the throughput objective. For comparisons under the bottleneck objective,
    ``head_stays`` leaves the head where the session was opened, and ``count_relays`` orders the ring by the number of
    relayed edges instead of their cost.

    The throughput objective needs a price for every member and every edge, and applies to Kafila's own allocation;
    otherwise the plan's ``objective`` says that the bottleneck was used instead. Raises UsageError where the arguments
    cannot be meant.
    """
    users = workload.concurrency if users is None else users
    _check_numbers(members, anchor, users, margin, headroom)
    if shares is not None:
        _check_shares(shares, members, manifest)
    if (refusal := _refuse_early(members, manifest, workload)) is not None:
        return refusal
    pairs = survey(members, edges or {})
    ordered_by = unpriced(pairs) if count_relays else pairs
    arrangement = arrange(members, ordered_by, anchor) if shares is None else _as_listed(members, anchor)
    order = arrangement.order
    rule = Rule(
        allocation=Allocation(allocation) if shares is None else Allocation.GIVEN,
        objective=Objective(objective),
        users=users,
        shares=None if shares is None else tuple(shares[index] for index in order),
        margin=margin,
        headroom=headroom,
        host_must_serve=host_must_serve,
        head_stays=head_stays,
    )
    ring = tuple(members[index] for index in order)
    problem = Problem(ring, manifest, workload, rule, _latencies(order, pairs))
    if not admits(problem):
        return decline(problem)
    devices = problem.devices()
    found = _search(problem, devices)
    counts = problem.settled()
    chosen = found[problem.objective, users] if counts is None else Placement(0, counts)
    return _write(problem, devices, chosen, found, arrangement, pairs)


def _check_numbers(members: Sequence[Member], anchor: int, users: int, margin: float, headroom: float) -> None:
    if not 0 <= anchor < len(members):
        raise UsageError(f"there is no member {anchor} among {counted(len(members), 'member')} to open the session")
    if not 1 <= users <= MOST_AT_ONCE:
        raise UsageError(f"give from 1 to {MOST_AT_ONCE:,} users to plan for")
    if not (0 <= margin < 1 and 0 <= headroom < 1):
        raise UsageError("the head margin and the headroom are shares: give 0 or more, and less than 1")


def _check_shares(shares: Sequence[int], members: Sequence[Member], manifest: ModelManifest) -> None:
    if len(shares) != len(members):
        raise UsageError(f"{counted(len(shares), 'share')} for {counted(len(members), 'member')}: give one each")
    if min(shares) < 1:
        raise UsageError("every share must be at least one block: leave a member out instead of giving it none")
    if sum(shares) != manifest.blocks:
        raise UsageError(f"the shares add up to {sum(shares)}, but {manifest.name} has {manifest.blocks} blocks")


def _refuse_early(members: Sequence[Member], manifest: ModelManifest, workload: Workload) -> Declined | None:
    least = min(members, key=lambda member: member.memory_bytes).name
    if len(members) > MEMBER_LIMIT:
        message = f"{len(members)} members are more than one ring is planned for"
        return Declined(least, 0, message, (f"at most {MEMBER_LIMIT} members",))
    most = manifest.max_context
    if workload.context > most:
        message = f"{manifest.name} handles at most {most:,} tokens of context, not {workload.context:,}"
        return Declined(least, 0, message, (f"a context of {most:,} tokens or less",))
    return None


def _as_listed(members: Sequence[Member], anchor: int) -> Arrangement:
    size = len(members)
    return Arrangement(tuple((anchor + step) % size for step in range(size)), Ordering.GIVEN, 0)


def _latencies(order: Sequence[int], pairs: Pairs) -> Latencies | None:
    """A token crosses an edge once, one way: half of the pair's round trip."""
    rows = []
    for source in order:
        row = [0 if source == target else pairs[source][target].rtt for target in order]
        known = [rtt // 2 for rtt in row if rtt is not None]
        if len(known) < len(row):
            return None
        rows.append(known)
    return rows


def _search(problem: Problem, devices: Sequence[Device] | None) -> dict[tuple[Objective, int], Placement]:
    """Kafila's placements by objective and users: the paper's, and where rates can be told beforehand the fastest rings
    for the rule's users and for one."""
    found: dict[tuple[Objective, int], Placement] = {}
    if devices is None:
        return found
    blocks, users, latencies = problem.manifest.blocks, problem.rule.users, problem.latencies
    whole = None
    if len(devices) <= blocks:
        fixed = problem.tier is not Tier.COST or problem.rule.head_stays
        whole = place_head(blocks, devices, problem.rule.margin, fixed=fixed)
    if whole is not None:
        found[Objective.BOTTLENECK, users] = whole
    if problem.tier is not Tier.COST or latencies is None:
        return found
    fastest = fastest_rings(
        blocks,
        devices,
        latencies,
        {users, 1},
        anchor_serves=problem.rule.host_must_serve,
        known=() if whole is None else (whole,),
    )
    found |= {(Objective.THROUGHPUT, count): placement for count, placement in fastest.items()}
    return found


def _write(
    problem: Problem,
    devices: Sequence[Device] | None,
    chosen: Placement,
    found: dict[tuple[Objective, int], Placement],
    arrangement: Arrangement,
    pairs: Pairs,
) -> Plan:
    rule, order = problem.rule, arrangement.order
    ring = tuple(order[place] for place in chosen.circuit)
    return Plan(
        model=problem.manifest.name,
        blocks=problem.manifest.blocks,
        context=problem.workload.context,
        concurrency=problem.workload.concurrency,
        users=rule.users,
        objective=problem.objective,
        allocation=rule.allocation,
        tier=problem.tier,
        ordering=arrangement.method,
        order_excess_s=to_seconds(arrangement.excess) / 2,
        anchor=order[0],
        stages=_stages(problem, chosen, order, devices),
        edges=tuple(_edge(source, target, pairs) for source, target in hops(ring)),
        guests=tuple(
            Guest(index, problem.members[place].name) for place, index in enumerate(order) if not chosen.counts[place]
        ),
        alternatives=_alternatives(problem, found, devices),
    )


def _stages(
    problem: Problem, chosen: Placement, order: Sequence[int], devices: Sequence[Device] | None
) -> tuple[Stage, ...]:
    circuit, needs, rooms = chosen.circuit, problem.needs, problem.rooms
    ends = list(accumulate(chosen.counts[place] for place in circuit))
    times: list[float | None] = [None] * len(circuit)
    if devices is not None and problem.tier is Tier.COST:
        times = [to_seconds(ticks) for ticks in stage_ticks(chosen, devices)]
    return tuple(
        Stage(
            member=order[place],
            name=problem.members[place].name,
            blocks=BlockRange(stop - chosen.counts[place], stop),
            stage_s=time,
            memory_used_bytes=needs[place].of(chosen.counts[place], is_head=place == chosen.head),
            memory_room_bytes=rooms[place],
        )
        for place, stop, time in zip(circuit, ends, times, strict=True)
    )


def _edge(source: int, target: int, pairs: Pairs) -> RingEdge:
    pair = pairs[source][target]
    rtt_s = None if pair.rtt is None else to_seconds(pair.rtt)
    latency_s = None if pair.rtt is None else to_seconds(pair.rtt // 2)
    return RingEdge(source, target, pair.kind, rtt_s, latency_s, pair.verified)


def _alternatives(
    problem: Problem,
    found: dict[tuple[Objective, int], Placement],
    devices: Sequence[Device] | None,
) -> tuple[Prediction, ...]:
    """What was found and not chosen, where it can be predicted."""
    latencies = problem.latencies
    if devices is None or latencies is None or problem.tier is not Tier.COST:
        return ()
    own = (problem.objective, problem.rule.users)
    return tuple(
        Prediction(
            objective=objective,
            users=users,
            names=tuple(problem.members[place].name for place in placement.circuit),
            counts=tuple(placement.counts[place] for place in placement.circuit),
            bottleneck_s=to_seconds(max(stage_ticks(placement, devices))),
            circuit_s=to_seconds(circuit_ticks(placement, devices, latencies)),
        )
        for (objective, users), placement in found.items()
        if problem.settled() is not None or (objective, users) != own
    )
