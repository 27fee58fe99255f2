"""Head placement: Algorithm 1 once for every rotation of the ring (paper Section V-C).

A ring has no first device, so rotating the sequence leaves every edge where it was. The anchor keeps the head unless
some rotation beats it by more than the margin, because overheads are noisier than the difference between two similar
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from kafila.plan.cost import Device
from kafila.plan.partition import partition
from kafila.plan.placement import Placement

HEAD_MARGIN = 0.05
"""Paper Section V-C: overhead is at most 2.2% of a stage and moves it by at most 1.1%, so a gain above 5% is no
noise."""


def place_head(blocks: int, devices: Sequence[Device], margin: float, *, fixed: bool = False) -> Placement | None:
    """The head and division with the smallest bottleneck for ``devices`` in ring order, the anchor at position 0.

    ``fixed`` keeps the head at the anchor whatever that costs (the tiers that do not price it). ``None`` where no
    rotation is feasible.
    """
    found: list[tuple[int, int, Placement]] = []
    for head in range(1 if fixed else len(devices)):
        rotated = [*devices[head:], *devices[:head]]
        division = partition(blocks, [device.stage(is_head=not place) for place, device in enumerate(rotated)])
        if division is not None:
            cut = len(devices) - head
            counts = (*division.counts[cut:], *division.counts[:cut])
            found.append((division.bottleneck, head, Placement(head, counts)))
    if not found:
        return None
    best_ticks, _, best = min(found)
    anchor_ticks, anchor_head, anchor = found[0]
    if anchor_head == 0 and best_ticks >= anchor_ticks * (1 - Fraction(margin)):
        return anchor
    return best
