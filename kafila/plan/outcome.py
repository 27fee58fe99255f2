"""What comes out of planning: a :class:`Plan` to serve by, or :class:`Declined` with who is too small and what would
help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from kafila.errors import ProtocolError
from kafila.plan.cost import Tier
from kafila.plan.order import Ordering
from kafila.plan.placement import hops
from kafila.plan.reading import Fields
from kafila.types import BlockRange, PathKind

PLAN_VERSION = 1
"""Raised when a reader of an older plan would misunderstand a newer one; new fields alone do not raise it."""


class Objective(Enum):
    """What Kafila's division minimises."""

    BOTTLENECK = "bottleneck"
    """The slowest stage, over all members: the paper's objective."""
    THROUGHPUT = "throughput"
    """The time per token over all users, over divisions, heads and subsets of the members."""


class Allocation(Enum):
    """Whose division it is."""

    KAFILA = "kafila"
    UNIFORM = "uniform"
    MEMORY = "memory"
    GIVEN = "given"
    """The person gave the counts."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One member's part of the circuit."""

    member: int
    """Index into the members that were planned for."""
    name: str
    blocks: BlockRange
    stage_s: float | None
    """Predicted seconds per token, equation (2); ``None`` where it could not be priced."""
    memory_used_bytes: int
    """Weights, reserved cache and workspace, the head's included."""
    memory_room_bytes: int
    """What may be used, headroom taken off."""

    @property
    def count(self) -> int:
        """How many blocks it holds."""
        return self.blocks.stop - self.blocks.first


@dataclass(frozen=True, slots=True)
class RingEdge:
    """One edge of the ring, in the direction a token takes."""

    source: int
    target: int
    kind: PathKind
    rtt_s: float | None
    latency_s: float | None
    """What a token pays: it crosses once, one way, so half of the round trip."""
    verified: bool
    """The round trip was measured on this path, not estimated from the rendezvous."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A member that the plan leaves out of the ring."""

    member: int
    name: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What some plan for the same members would yield."""

    objective: Objective
    users: int
    """How many users at once it is best for; a bottleneck plan is the same for any number."""
    names: tuple[str, ...]
    """The ring's members from the head on."""
    counts: tuple[int, ...]
    bottleneck_s: float
    circuit_s: float

    def tokens_per_s(self, users: int) -> float:
        """All users together: min(1/bottleneck, users/circuit)."""
        return min(1 / self.bottleneck_s, users / self.circuit_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds what, in which order, and what that is predicted to yield."""

    model: str
    blocks: int
    context: int
    concurrency: int
    users: int
    """Concurrent users the predictions are given for, beside one."""
    objective: Objective
    allocation: Allocation
    tier: Tier
    ordering: Ordering
    order_excess_s: float
    """The circuit's network part is at most this much above the cheapest ring's; 0 where the search was exact."""
    anchor: int
    """Index of the member that opened the session."""
    stages: tuple[Stage, ...]
    """In the order a token visits them: the head first, block 0 with it."""
    edges: tuple[RingEdge, ...]
    """``edges[i]`` leaves ``stages[i]``; none for a ring of one."""
    guests: tuple[Guest, ...]
    alternatives: tuple[Prediction, ...]
    """The other objective for ``users``, and the fastest ring for one user."""
    scored_percent: int = 0
    """Of the vocabulary's last rows: the last stage holds them, too (in its memory), and scores them while the head
    scores the others, where a draw allows that. Predicted times do not count on it."""

    @property
    def head(self) -> int:
        """Index of the member that holds the head."""
        return self.stages[0].member

    @property
    def order(self) -> tuple[int, ...]:
        """Member indices round the ring, from the head."""
        return tuple(stage.member for stage in self.stages)

    @property
    def names(self) -> tuple[str, ...]:
        """Member names round the ring, from the head."""
        return tuple(stage.name for stage in self.stages)

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks per member round the ring, from the head."""
        return tuple(stage.count for stage in self.stages)

    @property
    def stage_s(self) -> tuple[float, ...] | None:
        """Predicted stage times round the ring; ``None`` where any is missing."""
        return _complete([stage.stage_s for stage in self.stages])

    @property
    def bottleneck_s(self) -> float | None:
        """The slowest stage."""
        return None if self.stage_s is None else max(self.stage_s)

    @property
    def compute_s(self) -> float | None:
        """The stages' sum."""
        return None if self.stage_s is None else sum(self.stage_s)

    @property
    def network_s(self) -> float | None:
        """The edges' sum."""
        latencies = _complete([edge.latency_s for edge in self.edges])
        return None if latencies is None else sum(latencies)

    @property
    def circuit_s(self) -> float | None:
        """Equation (1): once round the ring."""
        if self.compute_s is None or self.network_s is None:
            return None
        return self.compute_s + self.network_s

    @property
    def utilisation(self) -> float | None:
        """The average stage over the slowest: the share of the committed devices' time that computes."""
        if self.stage_s is None:
            return None
        return sum(self.stage_s) / len(self.stage_s) / max(self.stage_s)

    @property
    def imbalance(self) -> float | None:
        """The slowest stage over the fastest."""
        return None if self.stage_s is None else max(self.stage_s) / min(self.stage_s)

    @property
    def prediction(self) -> Prediction | None:
        """This plan in the terms of its alternatives."""
        if self.bottleneck_s is None or self.circuit_s is None:
            return None
        return Prediction(self.objective, self.users, self.names, self.counts, self.bottleneck_s, self.circuit_s)

    def tokens_per_s(self, users: int) -> float | None:
        """Predicted, all users together; ``None`` where a stage or an edge has no price."""
        return None if self.prediction is None else self.prediction.tokens_per_s(users)

    def to_json(self) -> str:
        """One line of JSON, for :meth:`from_json` of this or a later version."""
        record = {"version": PLAN_VERSION, **asdict(self)}
        return json.dumps(record, default=lambda value: value.value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan in ``text``. Raises ProtocolError where it is not one, contradicts itself, or is of a later make."""
        fields = Fields.parse(text, "plan")
        version = fields.integer("version", 1)
        if version > PLAN_VERSION:
            raise ProtocolError(f"the plan was made by a newer Kafila (version {version}): update this one")
        plan = cls(
            model=fields.text("model"),
            blocks=fields.integer("blocks", 1),
            context=fields.integer("context", 1),
            concurrency=fields.integer("concurrency", 1),
            users=fields.integer("users", 1),
            objective=fields.choice("objective", Objective),
            allocation=fields.choice("allocation", Allocation),
            tier=fields.choice("tier", Tier),
            ordering=fields.choice("ordering", Ordering),
            order_excess_s=fields.number("order_excess_s"),
            anchor=fields.integer("anchor"),
            stages=tuple(map(_read_stage, fields.objects("stages"))),
            edges=tuple(map(_read_edge, fields.objects("edges"))),
            guests=tuple(Guest(row.integer("member"), row.text("name")) for row in fields.objects("guests")),
            alternatives=tuple(map(_read_prediction, fields.objects("alternatives"))),
            scored_percent=fields.integer_or("scored_percent", 0),
        )
        _check(plan, fields)
        return plan


@dataclass(frozen=True, slots=True)
class Declined:
    """No plan: expected where a model is too large for its members, so a value and not an exception."""

    who: str
    """The undersized member's name."""
    shortfall_bytes: int
    """How much is lacking; 0 where memory is not what is wrong."""
    message: str
    """One line: what does not fit, on whom, by how much."""
    remedies: tuple[str, ...]
    """What would help, each checked to be enough on its own."""


def _complete(values: Sequence[float | None]) -> tuple[float, ...] | None:
    known = tuple(value for value in values if value is not None)
    return known if len(known) == len(values) else None


def _read_stage(row: Fields) -> Stage:
    blocks = row.object("blocks")
    return Stage(
        member=row.integer("member"),
        name=row.text("name"),
        blocks=BlockRange(blocks.integer("first"), blocks.integer("stop", 1)),
        stage_s=row.optional_number("stage_s"),
        memory_used_bytes=row.integer("memory_used_bytes"),
        memory_room_bytes=row.integer("memory_room_bytes"),
    )


def _read_edge(row: Fields) -> RingEdge:
    return RingEdge(
        source=row.integer("source"),
        target=row.integer("target"),
        kind=row.choice("kind", PathKind),
        rtt_s=row.optional_number("rtt_s"),
        latency_s=row.optional_number("latency_s"),
        verified=row.flag("verified"),
    )


def _read_prediction(row: Fields) -> Prediction:
    prediction = Prediction(
        objective=row.choice("objective", Objective),
        users=row.integer("users", 1),
        names=row.texts("names"),
        counts=row.integers("counts"),
        bottleneck_s=row.number("bottleneck_s"),
        circuit_s=row.number("circuit_s"),
    )
    if not prediction.bottleneck_s or not prediction.circuit_s:
        raise row.wrong("bottleneck_s")
    return prediction


def _check(plan: Plan, fields: Fields) -> None:
    """A plan whose parts contradict one another would fail later and elsewhere."""
    reached = 0
    for stage in plan.stages:
        if stage.blocks.first != reached or stage.blocks.stop <= reached or stage.stage_s == 0:
            raise fields.wrong("stages")
        reached = stage.blocks.stop
    everybody = (*plan.order, *(guest.member for guest in plan.guests))
    if reached != plan.blocks or len(set(everybody)) != len(everybody):
        raise fields.wrong("stages")
    if tuple((edge.source, edge.target) for edge in plan.edges) != hops(plan.order):
        raise fields.wrong("edges")
    if plan.anchor not in everybody:
        raise fields.wrong("anchor")
    if plan.scored_percent > (100 if len(plan.stages) > 1 else 0):
        raise fields.wrong("scored_percent")
