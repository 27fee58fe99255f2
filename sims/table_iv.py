"""The paper's Table IV beside our own predictions, for one fleet and one user."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kafila.plan import Allocation, Declined, ModelManifest, Plan, Workload, plan_session
from kafila.plan.words import size
from sims.fleets import Fleet
from sims.reading import DATA

_NAMES = {
    Allocation.KAFILA: "Kafila",
    Allocation.MEMORY: "Mem-prop. (exo)",
    Allocation.UNIFORM: "Uniform (GPipe)",
}
"""In the paper's order and words."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The four columns of Table IV; tokens per second are missing where the network has no price."""

    imbalance: float
    bottleneck_ms: float
    utilisation_percent: float
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One model under one allocation."""

    model: str
    allocation: Allocation
    ours: Figures | Declined | None
    """``Declined`` where no such plan is admitted, ``None`` where it cannot be priced."""
    papers: Figures | None
    """``None`` where the paper has no such cell, or calls it infeasible."""
    infeasible: bool
    """The paper calls it infeasible."""


Cells = dict[tuple[str, str, Allocation], Figures | None]
"""By fleet, model and allocation; ``None`` where the paper calls the division infeasible."""


def paper_cells() -> Cells:
    """The paper's table."""
    rows = json.loads((DATA / "table_iv.json").read_text(encoding="utf-8"))["rows"]
    return {
        (row["fleet"], row["model"], allocation): None
        if row[allocation.value] is None
        else Figures(**row[allocation.value])
        for row in rows
        for allocation in _NAMES
    }


def paper_models(fleet: str) -> list[str]:
    """The models that Table IV has for a fleet."""
    return list(dict.fromkeys(model for of, model, _ in paper_cells() if of == fleet))


def compare(fleet: Fleet, models: Sequence[ModelManifest], workload: Workload) -> list[Row]:
    """Every model under every allocation."""
    rows = []
    cells = paper_cells()
    for model in models:
        for allocation in _NAMES:
            plan = plan_session(
                fleet.members, model, workload, anchor=fleet.host, allocation=allocation, users=1, edges=fleet.edges
            )
            ours = plan if isinstance(plan, Declined) else figures_of(plan)
            key = (fleet.name, model.name, allocation)
            rows.append(Row(model.name, allocation, ours, cells.get(key), infeasible=cells.get(key, ours) is None))
    return rows


def figures_of(plan: Plan) -> Figures | None:
    """A plan's four columns; ``None`` where its stages could not be priced."""
    if plan.bottleneck_s is None or plan.imbalance is None or plan.utilisation is None:
        return None
    return Figures(plan.imbalance, plan.bottleneck_s * 1e3, plan.utilisation * 100, plan.tokens_per_s(1))


def layout(rows: Sequence[Row]) -> str:
    """The table as text: each of our figures with the paper's behind it in brackets."""
    cells: list[tuple[str, ...]] = [("Model", "Allocation", "Imbal.", "Bneck ms", "Util.", "tok/s")]
    cells += [(row.model, _NAMES[row.allocation], *_columns(row)) for row in rows]
    widths = [max(len(row[column]) for row in cells if len(row) > column) for column in range(6)]
    # A refusal is a sentence: it runs on over the columns and does not widen them.
    widths[2] = max(len(row[2]) for row in cells if len(row) == 6)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in cells
    )


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Every number of the table by name, ours and the paper's."""
    found: dict[str, float] = {}
    for row in rows:
        for whose, cell in (("ours", row.ours), ("paper", row.papers)):
            if isinstance(cell, Figures):
                prefix = f"{row.model}_{row.allocation.value}_{whose}"
                found |= {f"{prefix}_{key}": value for key, value in asdict(cell).items() if value is not None}
    return found


def _columns(row: Row) -> tuple[str, ...]:
    theirs = "infeasible" if row.infeasible else ""
    if isinstance(row.ours, Declined):
        ending = f" ({theirs})" if theirs else ""
        return (f"declined: {row.ours.who} is {size(row.ours.shortfall_bytes)} too small{ending}",)
    if row.ours is None:
        return ("not priced: somebody's speed is unknown",)
    ours, papers = _words(row.ours), None if row.papers is None else _words(row.papers)
    if papers is None:
        return (ours[0], f"{ours[1]} ({theirs})" if theirs else ours[1], *ours[2:])
    return tuple(f"{our} ({their})" for our, their in zip(ours, papers, strict=True))


def _words(cell: Figures) -> tuple[str, str, str, str]:
    rate = "?" if cell.tokens_per_s is None else f"{cell.tokens_per_s:.1f}"
    return f"{cell.imbalance:.2f}", f"{cell.bottleneck_ms:.1f}", f"{cell.utilisation_percent:.0f}%", rate
