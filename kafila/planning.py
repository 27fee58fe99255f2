"""From who is here and what they measured to a plan: between the session's words and the planner's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafila.plan import Allocation, Declined, Member, Objective, Plan, Workload, plan_session
from kafila.ring.agreement import MemberInfo, ModelOffer
from kafila.types import Capability, NatClass


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the host's owner asked of the plan."""

    objective: Objective = Objective.BOTTLENECK
    allocation: Allocation = Allocation.KAFILA
    shares: tuple[int, ...] | None = None
    """Exact block counts, in the order members joined (the host first), instead of a division."""
    users: int = 1


def make_plan(members: Sequence[tuple[MemberInfo, Capability]], offer: ModelOffer, wishes: Wishes) -> Plan | Declined:
    """Divide the offered model among ``members``; the first is the host and the anchor."""
    return plan_session(
        [
            # Who sits behind which NAT is not measured yet: "ordinary" is what home routers mostly are, and a wrong
            # guess costs nothing but the order, since every edge begins relayed and becomes direct if it can.
            Member.from_capability(info.name, capability, rtt_s=info.rendezvous_rtt_s, nat=NatClass.ORDINARY)
            for info, capability in members
        ],
        offer.manifest,
        Workload(offer.context, offer.slots),
        anchor=0,
        objective=wishes.objective,
        allocation=wishes.allocation,
        shares=wishes.shares,
        users=wishes.users,
    )


def in_ring(plan: Plan, members: Sequence[tuple[MemberInfo, Capability]]) -> list[MemberInfo]:
    """The members in the plan's ring order, the head first."""
    return [members[index][0] for index in plan.order]
