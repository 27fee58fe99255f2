"""From who is here and what they measured to a plan: between the session's words and the planner's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kafila.members import are_near, one_public_host, report_of
from kafila.nat.predict import Reach, predict
from kafila.nat.report import nat_class
from kafila.plan import Allocation, Declined, KnownEdge, Member, Objective, Plan, Workload, divide_head, plan_session
from kafila.plan.batching import batched_tokens_per_s
from kafila.plan.head import HEAD_MARGIN
from kafila.ring.agreement import SCORES, MemberInfo, ModelOffer
from kafila.ring.frames import ITEM_BYTES
from kafila.scoring import vocabulary_of
from kafila.types import Capability, NatClass, PathKind

BATCHING_MARGIN = 1.1
"""What shared batches must promise over a pipeline: their prediction leans on a measured arithmetic rate, and on links
that are priced by the ways to the rendezvous alone."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the host's owner asked of the plan."""

    objective: Objective = Objective.BOTTLENECK
    allocation: Allocation = Allocation.KAFILA
    shares: tuple[int, ...] | None = None
    """Exact block counts, in the order members joined (the host first), instead of a division."""
    users: int = 1
    margin: float = HEAD_MARGIN
    """What another head must gain over the host's."""
    head_stays: bool = False
    """For comparisons: the head is the host's, and ..."""
    count_relays: bool = False
    """... the ring is ordered by the number of relayed edges, not by their cost."""
    divide_head: bool = True
    """The last member may score a part of the vocabulary for the head; for comparisons: never."""


def make_plan(members: Sequence[tuple[MemberInfo, Capability]], offer: ModelOffer, wishes: Wishes) -> Plan | Declined:
    """Divide the offered model among ``members``; the first is the host and the anchor, and has a place in the ring:
    the session is its own.

    For several users the throughput objective weighs its ring for so many against its ring for one: the former is best
    where answers pass one by one, and answers that share batches may be served faster by the latter.
    """
    infos = [info for info, _ in members]
    planned = [
        Member.from_capability(info.name, capability, rtt_s=info.rendezvous_rtt_s, nat=class_of(info))
        for info, capability in members
    ]
    plan = _best_plan(infos, planned, offer, wishes)
    if isinstance(plan, Declined) or not wishes.divide_head or not all(SCORES in infos[n].knows for n in plan.order):
        return plan
    return divide_head(plan, planned, offer.manifest, vocabulary_of(offer.config))


def _best_plan(
    infos: Sequence[MemberInfo], planned: Sequence[Member], offer: ModelOffer, wishes: Wishes
) -> Plan | Declined:
    plan = _plan(infos, planned, offer, wishes)
    if isinstance(plan, Declined) or plan.objective is not Objective.THROUGHPUT or wishes.users == 1:
        return plan
    for_one = _plan(infos, planned, offer, replace(wishes, users=1))
    rates = [_batched(each, planned, offer, wishes.users) for each in (plan, for_one)]
    return for_one if rates[1] > rates[0] * BATCHING_MARGIN else plan


def _batched(plan: Plan | Declined, planned: Sequence[Member], offer: ModelOffer, users: int) -> float:
    if isinstance(plan, Declined):
        return 0.0
    return batched_tokens_per_s(plan, planned, offer.manifest, users, ITEM_BYTES.get(offer.dtype, 2)) or 0.0


def _plan(infos: Sequence[MemberInfo], planned: Sequence[Member], offer: ModelOffer, wishes: Wishes) -> Plan | Declined:
    return plan_session(
        planned,
        offer.manifest,
        Workload(offer.context, offer.slots),
        anchor=0,
        objective=wishes.objective,
        allocation=wishes.allocation,
        shares=wishes.shares,
        users=wishes.users,
        edges=known_edges(infos),
        margin=wishes.margin,
        head_stays=wishes.head_stays,
        count_relays=wishes.count_relays,
        host_must_serve=True,
    )


def class_of(info: MemberInfo) -> NatClass:
    """A member's class. One that was not surveyed counts as ordinary, which home routers mostly are: a wrong guess
    costs nothing but the order, since every edge begins relayed and becomes direct if it can."""
    report = report_of(info)
    return NatClass.ORDINARY if report is None else nat_class(report)


def known_edges(members: Sequence[MemberInfo]) -> dict[tuple[int, int], KnownEdge]:
    """What the members' reports say of each pair; pairs they leave open are left to the classes."""
    kinds = {
        (first, second): _kind(members[first], members[second])
        for first, second in combinations(range(len(members)), 2)
    }
    return {pair: KnownEdge(kind) for pair, kind in kinds.items() if kind is not None}


def _kind(a: MemberInfo, b: MemberInfo) -> PathKind | None:
    if are_near(a, b):
        return PathKind.DIRECT
    one, other = report_of(a), report_of(b)
    reach = Reach.UNKNOWN if one is None or other is None else predict(one, other)
    if reach is Reach.UNKNOWN:
        # Behind one address and not near: it is known not to let its hosts meet there.
        return PathKind.RELAYED if one_public_host(a, b) else None
    # Each direction chooses its own path, so two different pairs of addresses are as good as one. An edge of a ring of
    # two is crossed both ways, and acknowledgements always go back: a way in one direction alone does not count.
    return PathKind.DIRECT if reach in {Reach.DIRECT, Reach.ASYMMETRIC} else PathKind.RELAYED


def in_ring(plan: Plan, members: Sequence[tuple[MemberInfo, Capability]]) -> list[MemberInfo]:
    """The members in the plan's ring order, the head first."""
    return [members[index][0] for index in plan.order]
