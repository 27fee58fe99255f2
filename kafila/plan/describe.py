"""A plan as text for a person: one row a member, then what the ring would yield and what else would be faster."""

from __future__ import annotations

from collections.abc import Sequence

from kafila.plan.cost import Tier
from kafila.plan.order import Ordering
from kafila.plan.outcome import Allocation, Objective, Plan, Prediction, Stage
from kafila.plan.words import counted, listed, size

WORTH_SAYING = 1.1
"""How many times as fast another plan must be predicted to be before it is mentioned as faster: the cost model's own
error (a median of 18% in the paper's Section VII-B) falls on both sides of the comparison, mostly alike."""

_ALLOCATIONS = {
    Allocation.KAFILA: "Kafila's division",
    Allocation.UNIFORM: "uniform division",
    Allocation.MEMORY: "memory-proportional division",
    Allocation.GIVEN: "shares as given",
}
_TIERS = {
    Tier.FLOPS: "Somebody's bandwidth is unknown: divided by arithmetic throughput, with no stage times predicted.",
    Tier.MEMORY: "Somebody's speed is unknown: divided in proportion to memory, with no stage times predicted.",
}


def describe(plan: Plan) -> str:
    """The plan as a table and a few lines, without a trailing newline."""
    rows = [("member", "blocks", "memory used/room", "stage ms", "edge to the next")]
    rows += [_row(plan, place, stage) for place, stage in enumerate(plan.stages)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([_title(plan), *table, *_lines(plan)])


def remark(plan: Plan) -> str | None:
    """One line on how this plan compares with the other objective; ``None`` where nothing can be predicted."""
    own = plan.prediction
    if own is None:
        return None
    if plan.objective is Objective.THROUGHPUT:
        return _against_the_whole(plan, own)
    return _against_the_fastest(plan, own)


def _against_the_fastest(plan: Plan, own: Prediction) -> str | None:
    """The fastest ring for so many users as it gains most for."""
    fastest = [other for other in plan.alternatives if other.objective is Objective.THROUGHPUT]
    gains = [(other.tokens_per_s(other.users) / own.tokens_per_s(other.users), other) for other in fastest]
    if not gains:
        return None
    gain, other = max(gains, key=lambda pair: pair[0])
    if gain < WORTH_SAYING:
        return "No other ring of these members is predicted to be much faster."
    return (
        f"The fullest ring is not the fastest: with the throughput objective {listed(other.names)} would give "
        f"{_people(other.users)} {other.tokens_per_s(other.users):.1f} tokens/s, {gain:.2f}x as much."
    )


def _against_the_whole(plan: Plan, own: Prediction) -> str:
    """The ring of everybody, which the bottleneck objective insists on."""
    whole = next((other for other in plan.alternatives if other.objective is Objective.BOTTLENECK), None)
    if whole is None:
        return "A ring of all members, the bottleneck objective, does not fit."
    rate = whole.tokens_per_s(plan.users)
    gain = own.tokens_per_s(plan.users) / rate
    said = f"A ring of all {len(whole.names)} members, the bottleneck objective, would give {_people(plan.users)}"
    if gain < WORTH_SAYING:
        return f"{said} about as much, {rate:.1f} tokens/s."
    return f"{said} {rate:.1f} tokens/s: the fullest ring is not the fastest, this one gives {gain:.2f}x as much."


def _title(plan: Plan) -> str:
    division = _ALLOCATIONS[plan.allocation]
    if plan.allocation is Allocation.KAFILA:
        division += f", {plan.objective.value} objective"
    return (
        f"{plan.model} on {counted(len(plan.stages), 'member')}: {division}, "
        f"cache for {plan.concurrency} x {plan.context:,} tokens"
    )


def _row(plan: Plan, place: int, stage: Stage) -> tuple[str, str, str, str, str]:
    name = stage.name + (" (head)" if place == 0 else "")
    blocks = f"{stage.blocks.first}-{stage.blocks.stop - 1} ({stage.count})"
    memory = f"{size(stage.memory_used_bytes)} / {size(stage.memory_room_bytes)}"
    time = "?" if stage.stage_s is None else f"{stage.stage_s * 1e3:.2f}"
    if not plan.edges:
        return name, blocks, memory, time, ""
    edge = plan.edges[place]
    latency = "?" if edge.latency_s is None else f"{edge.latency_s * 1e3:.1f} ms"
    return name, blocks, memory, time, f"{edge.kind.value} {latency}" + ("" if edge.verified else " (estimate)")


def _lines(plan: Plan) -> list[str]:
    lines = []
    if plan.bottleneck_s is not None and plan.utilisation is not None:
        lines.append(
            f"Slowest stage {plan.bottleneck_s * 1e3:.2f} ms, utilisation {plan.utilisation:.0%}, "
            f"slowest over fastest {plan.imbalance:.2f}."
        )
    if plan.circuit_s is not None and plan.compute_s is not None and plan.network_s is not None:
        lines.append(
            f"Circuit {plan.circuit_s * 1e3:.1f} ms: {plan.compute_s * 1e3:.1f} computing, "
            f"{plan.network_s * 1e3:.1f} on the network."
        )
        lines.append(f"Predicted {_rates(plan, sorted({1, plan.users}))}.")
    if plan.tier in _TIERS:
        lines.append(_TIERS[plan.tier])
    if plan.ordering is Ordering.COUNTED and len(plan.stages) > 1:
        lines.append(
            "Some round trips are unknown: the ring has the fewest relayed edges, its latency is not predicted."
        )
    if plan.order_excess_s:
        lines.append(f"The order costs at most {plan.order_excess_s * 1e3:.1f} ms a token more than the cheapest ring.")
    if plan.scored_percent:
        lines.append(
            f"While one answer is drawn greedily, {plan.stages[-1].name} scores the last {plan.scored_percent}% of the "
            "vocabulary and the head the rest."
        )
    if plan.guests:
        lines.append(f"Not in the ring: {listed([guest.name for guest in plan.guests])}.")
    said = remark(plan)
    return lines if said is None else [*lines, said]


def _rates(plan: Plan, users: Sequence[int]) -> str:
    return ", ".join(f"{plan.tokens_per_s(count) or 0:.1f} tokens/s for {_people(count)}" for count in users)


def _people(users: int) -> str:
    return "one user" if users == 1 else f"{users} users"
