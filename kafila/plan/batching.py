"""What a plan yields when answers share batches: reading a stage's weights once serves every row of a batch.

The paper pipelines requests one by one, so a ring yields min(1/bottleneck, users/circuit). With n batches of users/n
= k rows on their way, whose stages take t(k), an answer gets its next token after max(n x largest t(k), sum of t(k) +
network), and the scheduler chooses n. Where t(k) hardly grows with k, few long batches win, and the ring with the
shortest circuit serves many as well as it serves one.

t(k) is the larger of two times: the one that reading the weights takes (of experts, those that k rows go through), and
two operations a weight and row over the measured arithmetic. Without a measurement of the latter k rows are taken to
cost k times one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kafila.plan.members import Member, ModelManifest, measured
from kafila.plan.outcome import Plan
from kafila.plan.reads import read_bytes


def batched_tokens_per_s(
    plan: Plan, members: Sequence[Member], manifest: ModelManifest, users: int, item_bytes: int
) -> float | None:
    """Predicted for ``users`` together; ``None`` where a stage or an edge has no price. ``item_bytes`` a weight."""
    stage_s, network_s = plan.stage_s, plan.network_s
    if stage_s is None or network_s is None:
        return None
    gaps = []
    for batches in range(1, users + 1):
        rows = -(-users // batches)
        times = [
            _stage_s(plan, place, alone_s, members[stage.member], manifest, rows, item_bytes)
            for place, (stage, alone_s) in enumerate(zip(plan.stages, stage_s, strict=True))
        ]
        gaps.append(max(batches * max(times), sum(times) + network_s))
    return users / min(gaps)


def _stage_s(
    plan: Plan, place: int, alone_s: float, member: Member, manifest: ModelManifest, rows: int, item_bytes: int
) -> float:
    """What ``rows`` rows take at a stage where one takes ``alone_s``."""
    if member.flops is None or not measured(member.flops, positive=True):
        return alone_s * rows
    count, bandwidth = plan.stages[place].count, member.bandwidth_bytes_per_s
    more_bytes = count * (read_bytes(manifest, rows) - read_bytes(manifest))
    reading_s = alone_s + (more_bytes / bandwidth if more_bytes and bandwidth else 0.0)
    weights = count * read_bytes(manifest) + (place == 0) * manifest.head_read_bytes
    return max(reading_s, 2 * weights / item_bytes * rows / member.flops)
