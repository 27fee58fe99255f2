"""Who holds what, in which order: the division of a model over a session's members (paper Section V).

:func:`plan_session` is the way in: members, a model's sizes and a workload go in, a :class:`Plan` or
:class:`Declined` comes out. The room is pure: no I/O, no clock, no randomness, nothing but the standard library and
the package's shared values.

    members     what goes in                     outcome     what comes out, and its JSON
    cost        equation (2), in exact integers  order       ring order; tours: the cheapest cycle
    partition   Algorithm 1                      head        head placement by rotation
    throughput  the other objective, exactly     baselines   uniform and memory-proportional divisions
    admit       what fits in memory              decline     what does not, and what would help
    describe    a plan as text                   sizes       a model's sizes from its config.json
    batching    rates when answers share batches reads       what a batch reads of a block with experts
    scoring     the vocabulary in two parts
"""

from __future__ import annotations

from kafila.plan.cost import Tier
from kafila.plan.describe import describe, remark
from kafila.plan.members import KnownEdge, KnownEdges, Member, ModelManifest, Workload
from kafila.plan.order import Ordering
from kafila.plan.outcome import (
    Allocation,
    Declined,
    Guest,
    Objective,
    Plan,
    Prediction,
    RingEdge,
    Stage,
)
from kafila.plan.planner import plan_session
from kafila.plan.reads import read_bytes
from kafila.plan.scoring import divide_head
from kafila.plan.sizes import manifest_from_config

__all__ = [
    "Allocation",
    "Declined",
    "Guest",
    "KnownEdge",
    "KnownEdges",
    "Member",
    "ModelManifest",
    "Objective",
    "Ordering",
    "Plan",
    "Prediction",
    "RingEdge",
    "Stage",
    "Tier",
    "Workload",
    "describe",
    "divide_head",
    "manifest_from_config",
    "plan_session",
    "read_bytes",
    "remark",
]
