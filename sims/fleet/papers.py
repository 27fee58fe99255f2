"""What the paper's Table IV says beyond its cells: the network's share of a token, and how fast stages really were.

A cell gives the bottleneck, the utilisation (average stage over bottleneck) and the tokens per second, so the stages'
sum is m times their product and what is left of a token is the network's.

The stages of its larger models were quicker than the bandwidths of its Table II allow: a uniform split of Qwen3-32B
over the US Central fleet takes 77 ms by its own columns where equation (2) says 104. The paper calls the difference
the cost model's error, a median of 18%. The *baselines'* rows tell by how much for each fleet and model, because their
divisions are known; what is served is drawn that much faster. Kafila's own rows are used for nothing but the network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from kafila.plan import Allocation, Declined, Workload, plan_session
from sims.fleets import PAPER, PAPER_FLEETS, load_fleet
from sims.models import load_model
from sims.reading import DATA
from sims.table_iv import Figures, paper_cells, paper_models

PAPER_WORKLOAD = Workload(4096, 4)
"""Cache for four concurrent requests (Section VII-B); their length is our assumption."""


@dataclass(frozen=True, slots=True)
class Said:
    """The paper's numbers outside its tables; ranges have two ends."""

    network_overhead: dict[str, list[float]]
    """Share of a token, by fleet."""
    four_user_gain: dict[str, dict[str, list[float]]]
    """By fleet and allocation (Fig. 2)."""
    setup_s: dict[str, float]
    """How long an edge took (Section VII-A)."""
    cost_model_median_error: float
    """Over 165 stages (Section VII-B)."""
    lead: dict[str, float]
    """Throughput on the LAN fleet over the other divisions'."""


@cache
def said() -> Said:
    """What stands in ``sims/data/paper.json``."""
    found = json.loads((DATA / "paper.json").read_text(encoding="utf-8"))
    return Said(**{key: value for key, value in found.items() if not key.startswith("_")})


def _cell(fleet: str, model: str, allocation: Allocation) -> Figures | None:
    return paper_cells().get((fleet, model, allocation))


def _stages_sum_s(cell: Figures, members: int) -> float:
    return members * cell.bottleneck_ms / 1e3 * cell.utilisation_percent / 100


@cache
def network_s(fleet: str) -> float:
    """What a token spends on the network of one of the paper's fleets.

    The stated share where there is one (the LAN's 12%); where the paper gives a range over models, the mean of what its
    table leaves.
    """
    low, high = said().network_overhead[fleet]
    members = len(load_fleet(fleet).members)
    left = []
    for model in paper_models(fleet):
        cell = _cell(fleet, model, Allocation.KAFILA)
        if cell is not None and cell.tokens_per_s:
            token_s = 1 / cell.tokens_per_s
            left.append(low * token_s if low == high else token_s - _stages_sum_s(cell, members))
    return sum(left) / len(left)


@cache
def served_over_probed(fleet: str, model: str) -> float:
    """How many times Table II's bandwidths the stages of the paper's baselines read at; 1 where it says nothing.

    From the uniform row, or from the memory-proportional one where the uniform split does not fit.
    """
    if fleet not in PAPER_FLEETS or model not in paper_models(fleet):
        return 1.0
    loaded = load_fleet(fleet)
    loaded = load_fleet(fleet, PAPER) if PAPER in loaded.networks else loaded
    for allocation in (Allocation.UNIFORM, Allocation.MEMORY):
        cell = _cell(fleet, model, allocation)
        if cell is None:
            continue
        plan = plan_session(
            loaded.members,
            load_model(model),
            PAPER_WORKLOAD,
            anchor=loaded.host,
            allocation=allocation,
            edges=loaded.edges,
        )
        if not isinstance(plan, Declined) and plan.compute_s is not None:
            return plan.compute_s / _stages_sum_s(cell, len(loaded.members))
    return 1.0
