"""What a planner would do without one of its rules: for comparisons alone."""

from __future__ import annotations

from dataclasses import replace

from kafila.plan import Declined, KnownEdge, Plan
from kafila.plan.order import Ordering
from kafila.plan.planner import plan_session
from kafila.types import PathKind
from sims.fleet.papers import PAPER_WORKLOAD
from sims.fleets import load_fleet
from sims.models import load_model

MODEL = load_model("Qwen3-8B")
LAN = load_fleet("lan")


def test_a_head_that_stays_is_where_the_session_was_opened() -> None:
    laptop = 3
    free = plan_session(LAN.members, MODEL, PAPER_WORKLOAD, anchor=laptop, edges=LAN.edges)
    pinned = plan_session(LAN.members, MODEL, PAPER_WORKLOAD, anchor=laptop, edges=LAN.edges, head_stays=True)
    assert isinstance(free, Plan)
    assert isinstance(pinned, Plan)
    assert free.head != laptop
    assert pinned.head == laptop
    assert (pinned.bottleneck_s or 0) > (free.bottleneck_s or 0)


def test_a_head_that_stays_and_does_not_fit_is_declined() -> None:
    small = [replace(member, memory_bytes=10**9) if place == 3 else member for place, member in enumerate(LAN.members)]
    assert isinstance(plan_session(small, MODEL, PAPER_WORKLOAD, anchor=3, edges=LAN.edges), Plan)
    refused = plan_session(small, MODEL, PAPER_WORKLOAD, anchor=3, edges=LAN.edges, head_stays=True)
    assert isinstance(refused, Declined)
    assert refused.who == "M3 Pro"


def test_counting_relays_is_blind_to_what_an_edge_costs() -> None:
    """Four direct edges in two orders: only their costs tell which is better."""
    edges = {
        (a, b): KnownEdge(PathKind.DIRECT, 0.001 if abs(a - b) in {1, 3} else 0.5) for a in range(4) for b in range(a)
    }
    shuffled = [LAN.members[place] for place in (0, 2, 1, 3)]
    known = {(shuffled.index(LAN.members[a]), shuffled.index(LAN.members[b])): edge for (a, b), edge in edges.items()}
    priced = plan_session(shuffled, MODEL, PAPER_WORKLOAD, anchor=0, edges=known)
    counted = plan_session(shuffled, MODEL, PAPER_WORKLOAD, anchor=0, edges=known, count_relays=True)
    assert isinstance(priced, Plan)
    assert isinstance(counted, Plan)
    assert priced.ordering is Ordering.CHEAPEST
    assert counted.ordering is Ordering.COUNTED
    assert (priced.network_s or 0) < (counted.network_s or 0)
