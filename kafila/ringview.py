"""The ring as a person sees it: who holds what, how fast, over which edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafila.mesh import LinkState
from kafila.plan import Plan
from kafila.ring.frames import Stats
from kafila.types import NodeId, PathKind


def ring_table(plan: Plan, me: int | None, stats: Stats | None, links: Mapping[int, LinkState | None]) -> str:
    """A table of the ring, the head first. ``me`` is this member's place, None a guest's; ``links`` its own, by the
    other's place."""
    rows = [("member", "blocks", "predicted", "measured", "link from here")]
    for place, stage in enumerate(plan.stages):
        blocks = f"{stage.blocks.first}-{stage.blocks.stop - 1}" + (" + head" if place == 0 else "")
        measured = stats.stage_s[place] if stats is not None and place < len(stats.stage_s) else None
        rows.append(
            (
                stage.name + (" (you)" if place == me else ""),
                blocks,
                _milliseconds(stage.stage_s),
                _milliseconds(measured),
                _link(links.get(place)),
            )
        )
    lines = _columns(rows)
    if stats is not None and stats.circuit_s > 0:
        network_s = max(stats.circuit_s - sum(stats.stage_s), 0.0)
        lines.append(
            f"once round: {_milliseconds(stats.circuit_s)}, of which {_milliseconds(network_s)} between members"
        )
    return "\n".join(lines)


def people(ring: Mapping[NodeId, str], others: Mapping[NodeId, str], me: NodeId) -> str:
    """A line for everybody: the members of the ring in its order, then guests."""
    roles = {node: "head" if place == 0 else "member" for place, node in enumerate(ring)}
    return "\n".join(
        f"{name} ({', '.join([roles.get(node, 'guest'), *(['you'] if node == me else [])])})"
        for node, name in {**ring, **{node: name for node, name in others.items() if node not in ring}}.items()
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _milliseconds(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{duration_s * 1e3:.2f} ms"


def _link(state: LinkState | None) -> str:
    if state is None:
        return "-"
    how = "direct" if state.kind is PathKind.DIRECT else "relayed"
    return how if state.rtt_s is None else f"{how}, {_milliseconds(state.rtt_s)}"
