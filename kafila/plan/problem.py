"""One ring, one model, one rule of division: what every later step of planning is asked about."""

from __future__ import annotations

from dataclasses import dataclass

from kafila.plan import baselines
from kafila.plan.admit import Need, heads_that_fit, limits_of, need_of, overloads, room_of
from kafila.plan.cost import Device, Limits, Tier, best_tier, price
from kafila.plan.members import Member, ModelManifest, Workload
from kafila.plan.outcome import Allocation, Objective
from kafila.plan.placement import Latencies


@dataclass(frozen=True, slots=True)
class Rule:
    """How the model is to be divided."""

    allocation: Allocation
    objective: Objective
    users: int
    shares: tuple[int, ...] | None
    """Exact counts in ring order, from the anchor."""
    margin: float
    headroom: float
    host_must_serve: bool
    head_stays: bool = False
    """The head is where the session was opened, whatever that costs."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Members in ring order, the anchor first, with a model, a workload and a rule."""

    members: tuple[Member, ...]
    manifest: ModelManifest
    workload: Workload
    rule: Rule
    latencies: Latencies | None
    """One way, in ticks, by places in the ring; ``None`` where some pair has no price."""

    @property
    def needs(self) -> tuple[Need, ...]:
        """What the model takes in each member's memory."""
        return tuple(need_of(self.manifest, self.workload, member) for member in self.members)

    @property
    def rooms(self) -> tuple[int, ...]:
        """What each member may give, in bytes."""
        return tuple(room_of(member, self.rule.headroom) for member in self.members)

    @property
    def limits(self) -> tuple[Limits, ...]:
        """How many blocks each member can hold."""
        return tuple(limits_of(room, need) for room, need in zip(self.rooms, self.needs, strict=True))

    @property
    def tier(self) -> Tier:
        """How well informed a division can be."""
        return best_tier(self.members)

    @property
    def objective(self) -> Objective:
        """The rule's objective; the bottleneck where rates cannot be told beforehand, or the division is a baseline."""
        if self.rule.allocation is Allocation.KAFILA and self.tier is Tier.COST and self.latencies is not None:
            return self.rule.objective
        return Objective.BOTTLENECK

    @property
    def serving(self) -> tuple[int, ...]:
        """The places that must hold blocks."""
        if self.objective is Objective.BOTTLENECK:
            return tuple(range(len(self.members)))
        return (0,) if self.rule.host_must_serve else ()

    @property
    def heads(self) -> tuple[int, ...]:
        """The places the head may be put: it stays with the anchor where equation (2) does not price it, and under
        divisions that know of no head."""
        if self.rule.allocation is Allocation.KAFILA and self.tier is Tier.COST and not self.rule.head_stays:
            return tuple(range(len(self.members)))
        return (0,)

    def devices(self) -> tuple[Device, ...] | None:
        """The members priced; ``None`` in the memory tier."""
        tier = self.tier
        found = [
            price(member, self.manifest, limits, tier) for member, limits in zip(self.members, self.limits, strict=True)
        ]
        known = tuple(device for device in found if device is not None)
        return known if len(known) == len(found) else None

    def settled(self) -> tuple[int, ...] | None:
        """Counts that are fixed before memory is looked at, with the head at the anchor; ``None`` where a search
        decides. Needs no more members than blocks."""
        if self.rule.shares is not None:
            return self.rule.shares
        if self.rule.allocation is Allocation.UNIFORM:
            return baselines.uniform(self.manifest.blocks, len(self.members))
        if self.rule.allocation is Allocation.MEMORY or self.tier is Tier.MEMORY:
            weights = [max(0, member.memory_bytes) for member in self.members]
            return baselines.proportional(self.manifest.blocks, weights)
        return None


def admits(problem: Problem) -> bool:
    """Whether the problem has a division at all: memory is the only thing that can stand in its way."""
    blocks = problem.manifest.blocks
    if len(problem.serving) > blocks:
        return False
    counts = problem.settled()
    if counts is not None:
        return len(counts) == len(problem.members) and not overloads(counts, 0, problem.rooms, problem.needs)
    able = heads_that_fit(problem.limits, blocks, problem.serving)
    return any(head in problem.heads for head in able)
