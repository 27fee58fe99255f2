"""Which sessions the report is made of, and their summaries when they have been run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kafila.plan import Allocation, Objective
from sims.fleet.place import Net
from sims.fleet.run import sessions_of
from sims.fleet.trial import Outcome, Refused, Summary, Trial, summary
from sims.fleets import PAPER_FLEETS
from sims.table_iv import paper_models

USERS = 4
"""As in the paper's Fig. 2."""
ANSWER_TOKENS = 8
"""In virtual time one token is like another: a longer answer tells nothing more."""
TIGHT_MODEL, TIGHT_FLEET = "Qwen3-32B", "intercontinental"
"""What no uniform split fits (Section VII-B)."""
ABLATIONS = {
    "head pinned at the opener": {"head_stays": True},
    "ordered by relay count": {"count_relays": True},
    "no margin for the head": {"margin": False},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One fleet with one model."""

    fleet: str
    model: str

    def trial(self, network: Net, **changes: object) -> Trial:
        """One of this cell's, with four users."""
        trial = Trial(self.fleet, self.model, network, users=USERS, answer_tokens=ANSWER_TOKENS)
        return replace(trial, **changes)  # type: ignore[arg-type]  # fields of Trial by name

    def papers(self, allocation: Allocation) -> Trial:
        """As the paper measured: requests one by one, over its network."""
        return self.trial(Net.OVERHEAD, allocation=allocation, batching=False)

    def ours(self, planned_users: int) -> Trial:
        """Batching, the throughput objective for so many, and the vocabulary in two parts."""
        return self.trial(Net.OVERHEAD, objective=Objective.THROUGHPUT, planned_users=planned_users, divide_head=True)

    def batched(self, allocation: Allocation) -> Trial:
        """A division of the paper's, with our batching."""
        return self.trial(Net.OVERHEAD, allocation=allocation)


def cells_of(fleets: Sequence[str]) -> list[Cell]:
    """Table IV's, in its order."""
    return [Cell(fleet, model) for fleet in PAPER_FLEETS if fleet in fleets for model in paper_models(fleet)]


def tight(context: int, allocation: Allocation) -> Trial:
    """The model that no uniform split fits, at a context where that is so."""
    return replace(
        Cell(TIGHT_FLEET, TIGHT_MODEL).papers(allocation), context=context, generations=2, users=1, answer_tokens=8
    )


def work(cells: Sequence[Cell], sessions: int, tight_context: int | None) -> dict[Trial, int]:
    """Every trial, and in how many sessions."""
    few = min(sessions, 3)
    wanted: dict[Trial, int] = {}
    for cell in cells:
        wanted |= dict.fromkeys((cell.papers(allocation) for allocation in papers_allocations()), sessions)
        wanted |= dict.fromkeys((cell.trial(network) for network in (Net.GEOGRAPHY, Net.PATHS)), few)
        wanted |= dict.fromkeys((cell.ours(planned) for planned in (1, USERS)), few)
        if cell.fleet == "lan":
            wanted |= dict.fromkeys((cell.batched(allocation) for allocation in papers_allocations()), few)
        if cell.model == "Qwen3-8B":
            changed = (cell.trial(Net.GEOGRAPHY, **changes) for changes in ABLATIONS.values())
            wanted |= dict.fromkeys(changed, few)
    if tight_context is not None:
        wanted |= {tight(tight_context, allocation): 1 for allocation in (Allocation.UNIFORM, Allocation.KAFILA)}
    return wanted


def papers_allocations() -> tuple[Allocation, ...]:
    """In the paper's order."""
    return (Allocation.KAFILA, Allocation.MEMORY, Allocation.UNIFORM)


def unrolled(wanted: Mapping[Trial, int]) -> list[Trial]:
    """One trial a session. The longest come first, so that no processor waits at the end."""
    far = sorted(wanted, key=lambda trial: trial.fleet != "intercontinental")
    return [session for trial in far for session in sessions_of(trial, wanted[trial])]


@dataclass(frozen=True, slots=True)
class Results:
    """Summaries by trial."""

    found: Mapping[Trial, Summary | Refused]

    @classmethod
    def of(cls, wanted: Mapping[Trial, int], outcomes: Mapping[Trial, Outcome | Refused]) -> Results:
        """From the outcome of each session."""
        return cls(
            {
                trial: summary([outcomes[session] for session in sessions_of(trial, count)])
                for trial, count in wanted.items()
            }
        )

    def get(self, trial: Trial) -> Summary | None:
        """None where it was refused."""
        result = self.found[trial]
        return result if isinstance(result, Summary) else None

    def refusal(self, trial: Trial) -> str:
        """What the host said; empty where it served."""
        result = self.found[trial]
        return result.text if isinstance(result, Refused) else ""
