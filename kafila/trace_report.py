"""What a trace says of a plan: every stage's time as predicted and as measured, and what the ring did (pure).

A plan predicts the time of one row, so decode batches of one row are compared with it, as long as there were any; with
more rows a stage reads its weights once for all of them. Prefill stands apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kafila.trace_reading import Batch, Epoch, Trace


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage, or the whole circuit, in seconds."""

    name: str
    blocks: str
    predicted_s: float | None
    measured_s: tuple[float, ...]
    """Of every batch that is compared, in order."""

    @property
    def median_s(self) -> float | None:
        """Of what was measured; None for nothing."""
        return median(self.measured_s) if self.measured_s else None

    @property
    def error(self) -> float | None:
        """Of the prediction, over the median that was measured."""
        if self.predicted_s is None or not self.median_s:
            return None
        return self.predicted_s / self.median_s - 1

    def share(self, part: float) -> float | None:
        """The time that ``part`` of the batches did not exceed."""
        if not self.measured_s:
            return None
        ordered = sorted(self.measured_s)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def compared(epoch: Epoch) -> list[Batch]:
    """The batches that a plan's predictions are about."""
    decode = [batch for batch in epoch.batches if batch.decode]
    return [batch for batch in decode if batch.rows == 1] or decode


def stage_times(epoch: Epoch) -> list[StageTimes]:
    """By ring position, decode only."""
    batches = compared(epoch)
    return [
        StageTimes(
            name=stage.name + (" (head)" if place == 0 else ""),
            blocks=f"{stage.blocks.first}-{stage.blocks.stop - 1}",
            predicted_s=stage.stage_s,
            measured_s=tuple(batch.stage_s[place] for batch in batches),
        )
        for place, stage in enumerate(epoch.plan.stages)
    ]


def report(trace: Trace) -> str:
    """All of it as text, without a trailing newline."""
    parts = [_epoch(epoch) for epoch in trace.epochs]
    if trace.cut:
        parts.append("The file's last line is cut off, as a killed node leaves it; everything before it is here.")
    return "\n\n".join(parts)


def _epoch(epoch: Epoch) -> str:
    plan = epoch.plan
    decode = [batch for batch in epoch.batches if batch.decode]
    prefill = [batch for batch in epoch.batches if not batch.decode]
    lines = [f"{plan.model} on {len(plan.stages)} member{'s' if len(plan.stages) > 1 else ''}"]
    if epoch.batches:
        lines += _decode(epoch, decode)
        lines += _prefill(epoch, prefill)
    else:
        lines.append("No batch in this trace: the head's has them, and only once something was asked.")
    return "\n".join([*lines, *_edges(epoch), *_answers(epoch)])


def _decode(epoch: Epoch, decode: Sequence[Batch]) -> list[str]:
    if not decode:
        return ["No decode batch."]
    batches = compared(epoch)
    rows = (
        "one row" if batches[0].rows == 1 else f"{min(b.rows for b in batches)} to {max(b.rows for b in batches)} rows"
    )
    circuit = StageTimes("circuit", "", epoch.plan.circuit_s, tuple(batch.circuit_s for batch in batches))
    times = stage_times(epoch)
    lines = [f"Decode, {len(batches)} of {len(decode)} batches, those of {rows}:"]
    lines += _table(
        [("stage", "blocks", "predicted ms", "measured ms", "p90 ms", "error"), *map(_row, [*times, circuit])]
    )
    errors = [abs(error) for one in times if (error := one.error) is not None]
    if errors:
        lines.append(f"Median error of the stages: {median(errors):.1%}.")
    return lines


def _row(one: StageTimes) -> tuple[str, ...]:
    error = "?" if one.error is None else f"{one.error:+.1%}"
    return one.name, one.blocks, _ms(one.predicted_s), _ms(one.median_s), _ms(one.share(0.9)), error


def _prefill(epoch: Epoch, prefill: Sequence[Batch]) -> list[str]:
    if not prefill:
        return []
    rows = [("stage", "blocks", "ms a batch", "ms a row")]
    for place, stage in enumerate(epoch.plan.stages):
        took = median(batch.stage_s[place] for batch in prefill)
        each = median(batch.stage_s[place] / max(1, batch.rows) for batch in prefill)
        rows.append((stage.name, f"{stage.blocks.first}-{stage.blocks.stop - 1}", _ms(took), f"{each * 1e3:.3f}"))
    sizes = median(batch.rows for batch in prefill)
    return [f"Prefill, {len(prefill)} batches, median {sizes:.0f} rows:", *_table(rows)]


def _edges(epoch: Epoch) -> list[str]:
    """Each edge with its path, as it was last or else as it was planned."""
    if not epoch.plan.edges:
        return []
    names, here = epoch.plan.names, _own_place(epoch)
    rows = [("edge", "path", "planned", "predicted ms")]
    for place, edge in enumerate(epoch.plan.edges):
        ends = place, (place + 1) % len(names)
        other = None if here not in ends else names[ends[0] + ends[1] - here]
        last = "not seen from here" if other is None else epoch.paths.get(other, "relayed")
        rows.append((f"{names[ends[0]]} -> {names[ends[1]]}", last, edge.kind.value, _ms(edge.latency_s)))
    lines = ["Edges:", *_table(rows)]
    for phase, decode in (("decode", True), ("prefill", False)):
        batches = [batch for batch in epoch.batches if batch.decode is decode]
        sizes = [batch.hop_bytes for batch in batches if batch.hop_bytes is not None]
        back = [batch.back_bytes for batch in batches if batch.back_bytes is not None]
        if sizes:
            carried = f"{sum(sizes):,} bytes of {phase} rows, median {median(sizes):,.0f} a batch"
            if back == sizes:
                lines.append(f"Every edge carried {carried}.")
            else:
                last = f"{sum(back):,} bytes, median {median(back):,.0f}"
                lines.append(f"Every edge but the last carried {carried}; the last, back to the head, {last}.")
    return lines


def _own_place(epoch: Epoch) -> int:
    """Whose trace it is: the head's where there are batches, else the only member with just these neighbours; -1 for
    nobody knows. A member sees no links but its own."""
    if epoch.batches:
        return 0
    names = epoch.plan.names
    size = len(names)
    fitting = [
        place
        for place in range(size)
        if epoch.paths and set(epoch.paths) <= {names[place - 1], names[(place + 1) % size]} - {names[place]}
    ]
    return fitting[0] if len(fitting) == 1 else -1


def _answers(epoch: Epoch) -> list[str]:
    told = [answer for answer in epoch.answers if answer.answer_tokens > 1 and answer.rest_s > 0]
    if not told:
        return []
    rate = median((answer.answer_tokens - 1) / answer.rest_s for answer in told)
    first = median(answer.first_token_s for answer in told)
    return [f"{len(told)} answers: median {rate:.1f} tokens/s, first token after {first:.2f} s."]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.2f}"
