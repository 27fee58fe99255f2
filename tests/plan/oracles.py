"""The planner's questions answered by trying everything, and small worlds to ask them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from hypothesis import strategies as st

from kafila.plan import Member, ModelManifest
from kafila.plan.cost import Device, StageCost
from kafila.plan.placement import Latencies, Placement, token_ticks
from kafila.types import NatClass


def divisions(blocks: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut a chain of blocks into so many parts, none empty."""
    for cuts in combinations(range(1, blocks), parts - 1):
        ends = (0, *cuts, blocks)
        yield tuple(stop - start for start, stop in pairwise(ends))


def bottleneck(counts: Sequence[int], stages: Sequence[StageCost]) -> int | None:
    """The slowest stage, or nothing where a limit is exceeded."""
    if any(count > stage.limit for count, stage in zip(counts, stages, strict=True)):
        return None
    return max(stage.fixed + count * stage.per_block for count, stage in zip(counts, stages, strict=True))


def least_bottleneck(blocks: int, stages: Sequence[StageCost]) -> int | None:
    """Over every division."""
    found = [bottleneck(counts, stages) for counts in divisions(blocks, len(stages))]
    return min((value for value in found if value is not None), default=None)


def least_token_ticks(
    blocks: int, devices: Sequence[Device], latencies: Latencies, users: int, *, anchor_serves: bool
) -> int | None:
    """Over every subset, head and division, in ring order."""
    size = len(devices)
    found = []
    for count in range(1, size + 1):
        for members in combinations(range(size), count):
            if anchor_serves and 0 not in members:
                continue
            for counts in divisions(blocks, count):
                for head in members:
                    spread = dict(zip(members, counts, strict=True))
                    fits = all(
                        spread[member] <= (devices[member].head_limit if member == head else devices[member].limit)
                        for member in members
                    )
                    if fits:
                        placement = Placement(head, tuple(spread.get(place, 0) for place in range(size)))
                        found.append(token_ticks(placement, devices, latencies, users))
    return min(found, default=None)


def cheapest_cycles(weights: Sequence[Sequence[int]]) -> tuple[int, list[tuple[int, ...]]]:
    """The least weight of a cycle from member 0 and every order that has it, smallest first."""
    best: int | None = None
    orders: list[tuple[int, ...]] = []
    for rest in permutations(range(1, len(weights))):
        order = (0, *rest)
        total = sum(weights[a][b] for a, b in zip(order, (*rest, 0), strict=True))
        if best is None or total < best:
            best, orders = total, []
        if total == best:
            orders.append(order)
    return best or 0, sorted(orders)


@st.composite
def device_lists(draw: st.DrawFn, least: int = 1, most: int = 4) -> list[Device]:
    """Devices whose costs are small enough to tie often, some without room."""
    devices = []
    for _ in range(draw(st.integers(least, most))):
        limit = draw(st.integers(0, 8))
        devices.append(
            Device(
                overhead=draw(st.integers(0, 6)),
                per_block=draw(st.integers(1, 9)),
                head_read=draw(st.integers(0, 12)),
                limit=limit,
                head_limit=draw(st.integers(0, limit)),
            )
        )
    return devices


@st.composite
def symmetric_weights(draw: st.DrawFn, size: int, most: int = 9) -> list[list[int]]:
    """A symmetric matrix of small numbers, with ties, zero on the diagonal."""
    upper = {pair: draw(st.integers(0, most)) for pair in combinations(range(size), 2)}
    return [[0 if a == b else upper[min(a, b), max(a, b)] for b in range(size)] for a in range(size)]


MODEL = ModelManifest(
    name="toy",
    blocks=8,
    block_bytes=1_000_000,
    head_bytes=700_000,
    head_read_bytes=350_000,
    kv_bytes_per_token_per_block=100,
    hidden_bytes=64,
    max_context=8192,
)


def member(
    name: str = "a",
    *,
    memory_bytes: int = 100_000_000,
    bandwidth: float | None = 1e9,
    overhead_s: float | None = 5e-5,
    flops: float | None = None,
    rtt_s: float | None = 0.02,
    nat: NatClass = NatClass.ORDINARY,
    head_rate: float | None = None,
    block_memory_bytes: int | None = None,
    workspace_bytes: int = 0,
) -> Member:
    """A member with room for everything unless told otherwise."""
    return Member(
        name,
        memory_bytes,
        bandwidth,
        overhead_s,
        flops,
        rtt_s,
        nat,
        head_bytes_per_s=head_rate,
        block_memory_bytes=block_memory_bytes,
        workspace_bytes=workspace_bytes,
    )


@st.composite
def member_lists(draw: st.DrawFn, least: int = 1, most: int = 4) -> list[Member]:
    """Fully measured members with distinct names, from roomy to too small."""
    return [
        member(
            f"m{number}",
            memory_bytes=draw(st.integers(500_000, 12_000_000)),
            bandwidth=draw(st.floats(1e8, 1e11)),
            overhead_s=draw(st.floats(0, 1e-3)),
            flops=draw(st.none() | st.floats(1e11, 1e14)),
            rtt_s=draw(st.sampled_from([0.0, 0.01, 0.02, 0.05]) | st.floats(0, 0.2)),
            nat=draw(st.sampled_from(NatClass)),
            head_rate=draw(st.none() | st.floats(1e8, 1e11)),
            block_memory_bytes=draw(st.none() | st.integers(500_000, 2_000_000)),
            workspace_bytes=draw(st.sampled_from([0, 0, 400_000])),
        )
        for number in range(draw(st.integers(least, most)))
    ]
