"""How long a device takes: what it reads over its bandwidth, or what it computes over its arithmetic, if longer.

A stage of one token reads every weight it holds (of experts, those the token goes through), so it takes equation (2)
of the paper: overhead, then bytes over bandwidth. A prefill chunk or a large batch reads the same weights once and
multiplies with them for every row: from some number of rows on it takes the arithmetic's time (the roofline model,
Williams et al. 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from kafila.plan import Member, read_bytes
from kafila.types import ModelManifest, Segment

FLOPS_PER_BYTE = 50.0
"""Operations per second for each byte per second, where nobody says: less than graphics cards have (150 and more), more
than processors do (10 to 30)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One machine in one session."""

    memory_bytes: int
    probed_bytes_per_s: float | None
    """What its probe says; None where that fails."""
    served_bytes_per_s: float
    """What it reads at while it serves: another draw from the same range."""
    overhead_s: float
    flops: float

    def forward_s(self, model: ModelManifest, blocks: int, segments: Iterable[Segment], item_bytes: int) -> float:
        """A batch through ``blocks`` blocks."""
        segments = tuple(segments)
        rows = sum(segment.length for segment in segments)
        cached = sum(segment.start + segment.length for segment in segments)
        read = blocks * (read_bytes(model, rows) + cached * model.kv_bytes_per_token_per_block)
        return self.overhead_s + self._takes(read, _flops(blocks * read_bytes(model), rows, item_bytes))

    def sample_s(self, model: ModelManifest, rows: int, item_bytes: int, percent: int = 100) -> float:
        """Norm, unembedding and draw of ``rows`` rows, from so much of the vocabulary; no rows cost nothing."""
        if rows == 0:
            return 0.0
        read = model.head_read_bytes * percent // 100
        return self._takes(read, _flops(read, rows, item_bytes))

    def _takes(self, read_bytes: float, flops: float) -> float:
        return max(read_bytes / self.served_bytes_per_s, flops / self.flops)


def _flops(weight_bytes: int, rows: int, item_bytes: int) -> float:
    """Two operations a weight and row."""
    return 2 * weight_bytes / item_bytes * rows


def draw_device(
    member: Member, bandwidth: tuple[float, float] | None, served_over_probed: float, random: Random
) -> Device:
    """``member`` as one session meets it: probed and served bandwidth, each drawn from the measured range."""
    flops = member.flops
    if bandwidth is None:
        served = FLOPS_PER_BYTE**-1 * flops if flops else 1e9
        return Device(member.memory_bytes, None, served, member.overhead_s or 0.0, flops or served * FLOPS_PER_BYTE)
    probed, served = random.uniform(*bandwidth), random.uniform(*bandwidth) * served_over_probed
    return Device(member.memory_bytes, probed, served, member.overhead_s or 0.0, flops or served * FLOPS_PER_BYTE)
