"""What is asked of a simulated fleet, and what came of it: values that travel between processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kafila.plan import Allocation, Objective
from kafila.types import PathKind
from sims.fleet.place import Net


@dataclass(frozen=True, slots=True)
class Trial:
    """One session of a fleet."""

    fleet: str
    """One of the paper's by name, or a file."""
    model: str
    network: Net
    allocation: Allocation = Allocation.KAFILA
    objective: Objective = Objective.BOTTLENECK
    users: int = 1
    planned_users: int | None = None
    """Whom the throughput objective plans for; None: the users."""
    shares: tuple[int, ...] | None = None
    """Exact block counts, the host's first, then in the fleet's order."""
    batching: bool = True
    """Requests that share a batch are computed together; otherwise each by itself."""
    head_stays: bool = False
    count_relays: bool = False
    divide_head: bool = False
    """The last member may score a part of the vocabulary; the paper's head scores all of it."""
    margin: bool = True
    context: int = 4096
    slots: int = 4
    seed: int = 0
    generations: int = 5
    """Answers one after another; the first is discarded."""
    prompt_tokens: int = 32
    answer_tokens: int = 16
    minutes: float = 0.0
    """How long the users then go on asking, in virtual time."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge of the ring, in the direction a token takes."""

    source: str
    target: str
    kind: PathKind
    """In the end."""
    linked_s: float
    """From the plan to a link that carries data: through the relay at first."""
    direct_s: float | None
    """From the plan to a direct path in both directions, None for never."""
    hop_s: float
    """A token's rows from one member's device to the next one's: median over decoding."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One session; times are of the virtual clock."""

    names: tuple[str, ...]
    """Round the ring, the head first."""
    counts: tuple[int, ...]
    predicted_s: tuple[float | None, ...]
    stage_s: tuple[float, ...]
    """Measured on each device: median over one user's decoding."""
    circuit_s: float
    """Once round, measured: median over one user's decoding."""
    edges: tuple[Edge, ...]
    formed_s: float
    """From opening the session to everybody serving, weights loaded."""
    first_token_s: float
    """Of one user's question."""
    one_user: float
    """Tokens per second."""
    all_users: float
    """Tokens per second, all users together."""
    virtual_s: float
    real_s: float
    soak_tokens: int = 0

    @property
    def bottleneck_s(self) -> float:
        """The slowest stage."""
        return max(self.stage_s)

    @property
    def utilisation(self) -> float:
        """The average stage over the slowest."""
        return statistics.fmean(self.stage_s) / max(self.stage_s)

    @property
    def imbalance(self) -> float:
        """The slowest stage over the fastest."""
        return max(self.stage_s) / min(self.stage_s)

    @property
    def network_s(self) -> float:
        """What of a token is not computing."""
        return self.circuit_s - sum(self.stage_s)

    @property
    def errors(self) -> list[float]:
        """How far the cost model was from each stage, as a share of what was measured."""
        pairs = zip(self.predicted_s, self.stage_s, strict=True)
        return [abs(predicted - stage) / stage for predicted, stage in pairs if predicted is not None]


@dataclass(frozen=True, slots=True)
class Refused:
    """No session: what the host said."""

    text: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Sessions of one kind: medians over them."""

    outcomes: tuple[Outcome, ...]

    def median(self, name: str) -> float:
        """Of a figure of the sessions."""
        return statistics.median(self._each(name))

    def half_range(self, name: str) -> float:
        """Half of the difference between the largest and the smallest."""
        found = self._each(name)
        return (max(found) - min(found)) / 2

    def _each(self, name: str) -> list[float]:
        return [float(getattr(outcome, name)) for outcome in self.outcomes]

    @property
    def gain(self) -> float:
        """All users over one: median over sessions."""
        return statistics.median(outcome.all_users / outcome.one_user for outcome in self.outcomes)

    @property
    def overhead(self) -> float:
        """The network's share of a token."""
        return statistics.median(outcome.network_s / outcome.circuit_s for outcome in self.outcomes)

    @property
    def errors(self) -> list[float]:
        """The cost model's, of every stage."""
        return [error for outcome in self.outcomes for error in outcome.errors]

    def setup_s(self, *, direct: bool) -> list[float]:
        """Every edge's time to data, or to a direct path where there is one."""
        edges = [edge for outcome in self.outcomes for edge in outcome.edges]
        if not direct:
            return [edge.linked_s for edge in edges]
        return [edge.direct_s for edge in edges if edge.direct_s is not None]


def summary(results: Sequence[Outcome | Refused]) -> Summary | Refused:
    """Of sessions that all formed; the refusal where one did not."""
    refused = next((result for result in results if isinstance(result, Refused)), None)
    if refused is not None:
        return refused
    return Summary(tuple(result for result in results if isinstance(result, Outcome)))
