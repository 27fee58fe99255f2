"""What goes into planning: the members, the workload they are to serve, and what is known of the edges between them.

The model's sizes come as :class:`kafila.types.ModelManifest`, re-exported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kafila.errors import UsageError
from kafila.types import Capability, ModelManifest, NatClass, PathKind

__all__ = ["KnownEdge", "KnownEdges", "Member", "ModelManifest", "Workload", "measured"]

MOST_AT_ONCE = 1_000_000
"""More requests, or users, at once are a slip of the keyboard."""
_MOST_SECONDS = 86_400.0
_LEAST_RATE = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One machine as the planner sees it. ``None`` is a measurement that failed (paper Section V-D)."""

    name: str
    memory_bytes: int
    """Room for weights, KV cache and workspace: the working set the device reports."""
    bandwidth_bytes_per_s: float | None
    """Effective memory bandwidth, b_i of equation (2)."""
    overhead_s: float | None
    """Fixed dispatch overhead per token, o_i of equation (2)."""
    flops: float | None
    """Arithmetic throughput, floating-point operations per second; used only when somebody has no bandwidth."""
    rtt_s: float | None
    """Round trip to the rendezvous."""
    nat: NatClass
    memory_is_exact: bool = False
    """The owner stated how much may be used (``--memory``): no headroom is taken off that."""
    head_bytes_per_s: float | None = None
    """How fast this member goes through the bytes the head reads; ``None``: as fast as through blocks."""
    block_memory_bytes: int | None = None
    """What a block's weights take on this member, the reserved cache apart; ``None``: what the manifest says."""
    head_memory_bytes: int | None = None
    """What the head takes; likewise."""
    workspace_bytes: int = 0
    """What loading and computing need besides."""

    @classmethod
    def from_capability(cls, name: str, capability: Capability, *, rtt_s: float | None, nat: NatClass) -> Member:
        """The member whose probe reported ``capability``."""
        return cls(
            name=name,
            memory_bytes=capability.memory_bytes,
            bandwidth_bytes_per_s=capability.bandwidth_bytes_per_s,
            overhead_s=capability.overhead_s,
            flops=capability.flops,
            rtt_s=rtt_s,
            nat=nat,
            head_bytes_per_s=capability.head_bytes_per_s,
            block_memory_bytes=capability.block_memory_bytes,
            head_memory_bytes=capability.head_memory_bytes,
            workspace_bytes=capability.workspace_bytes,
        )

    @property
    def priced(self) -> bool:
        """Whether equation (2) can price this member: it needs both the bandwidth and the overhead."""
        return measured(self.bandwidth_bytes_per_s, positive=True) and measured(self.overhead_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """What the session promises: cache is reserved for ``concurrency`` requests of ``context`` tokens each.

    Raises UsageError where either is below 1 or cannot be meant.
    """

    context: int
    concurrency: int

    def __post_init__(self) -> None:
        if self.context < 1:
            raise UsageError(f"a context of {self.context} tokens cannot be served: give at least 1")
        if not 1 <= self.concurrency <= MOST_AT_ONCE:
            raise UsageError(f"give from 1 to {MOST_AT_ONCE:,} concurrent requests to serve")


@dataclass(frozen=True, slots=True)
class KnownEdge:
    """What is known of a pair beyond their NAT classes: a prediction (no round trip yet) or a verified path."""

    kind: PathKind
    rtt_s: float | None = None
    """Measured round trip between the two; ``None`` leaves the price to the estimate for ``kind``."""


KnownEdges = Mapping[tuple[int, int], KnownEdge]
"""By member indices, in either order; pairs that are missing are predicted from the NAT classes."""


def measured(value: float | None, *, positive: bool = False) -> bool:
    """Whether a probe's number can be used: a duration in seconds, or with ``positive`` a rate per second.

    A bandwidth of zero, a negative time, a NaN, an overhead of days are failed measurements. The limits also keep every
    sum of times far from overflowing.
    """
    if value is None or not math.isfinite(value):
        return False
    return value >= _LEAST_RATE if positive else 0 <= value <= _MOST_SECONDS
