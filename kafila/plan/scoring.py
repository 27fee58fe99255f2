"""How much of the vocabulary the ring's last member scores while the head scores the rest.

Both begin when the last stage has the final row (what the head waits for it, it waits again for the other's scores), so
both are done at once where each has rows in proportion to its speed. The last member holds its rows beside its blocks:
the head keeps all, for draws that cannot be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from kafila.plan.members import Member, ModelManifest, measured
from kafila.plan.outcome import Plan
from kafila.types import scored_from

LEAST_PERCENT = 10
"""Of the vocabulary: less saves less than a message more is sure to be worth."""
MOST_PERCENT = 75
"""Speeds are measured when a session forms and change later; the head is never left with next to nothing to do while it
waits for another."""


def divide_head(plan: Plan, members: Sequence[Member], manifest: ModelManifest, vocab: int = 0) -> Plan:
    """The plan with as much of the vocabulary at its last stage as is best and fits there, its memory counted; the same
    plan where that is nothing. ``members`` are those that were planned for; ``vocab`` are the vocabulary's rows where
    they are known (0: not)."""
    head, last = members[plan.order[0]], members[plan.order[-1]]
    if len(plan.stages) == 1:
        return plan
    stage = plan.stages[-1]
    head_bytes = manifest.head_bytes if last.head_memory_bytes is None else max(0, last.head_memory_bytes)
    percent = min(best_percent(head, last), _fitting(stage.memory_room_bytes - stage.memory_used_bytes, head_bytes))
    if percent < LEAST_PERCENT or (vocab and scored_from(vocab, percent) in {0, vocab}):
        return plan
    used = stage.memory_used_bytes + rows_bytes(head_bytes, percent)
    stages = (*plan.stages[:-1], replace(stage, memory_used_bytes=used))
    return replace(plan, stages=stages, scored_percent=percent)


def best_percent(head: Member, last: Member) -> int:
    """The last member's share of both speeds, in whole percent; 0 where one is not known or it would be too little."""
    of_head, of_last = _speed(head), _speed(last)
    if of_head is None or of_last is None:
        return 0
    percent = int(100 * of_last / (of_head + of_last))
    return 0 if percent < LEAST_PERCENT else min(percent, MOST_PERCENT)


def rows_bytes(head_bytes: int, percent: int) -> int:
    """What so many of the rows take, rounded up; ``head_bytes`` is the whole head's, so that this is ample where its
    embedding is a matrix of its own."""
    return -(-head_bytes * percent // 100)


def _fitting(free_bytes: int, head_bytes: int) -> int:
    """The largest percentage whose rows fit."""
    if free_bytes < 0:
        return 0
    return 100 if head_bytes <= free_bytes else 100 * free_bytes // head_bytes


def _speed(member: Member) -> Fraction | None:
    """Bytes of the head a second; where that was not measured, of blocks."""
    for rate in (member.head_bytes_per_s, member.bandwidth_bytes_per_s):
        if rate is not None and measured(rate, positive=True):
            return Fraction(rate)
    return None
