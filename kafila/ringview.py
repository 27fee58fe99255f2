"""The ring as a person sees it: who holds what, how fast, over which edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafila.api.engine import EdgeFacts, RingFacts
from kafila.mesh import LinkState
from kafila.types import NodeId


def ring_table(facts: RingFacts, guests: LinkState | None) -> str:
    """A table of the ring, the head first; below it ``guests``, a guest's own link with the head."""
    rows = [("member", "blocks", "predicted", "measured", "link to the next")]
    for place, member in enumerate(facts.members):
        rows.append(
            (
                member.name + (" (you)" if place == facts.me else ""),
                f"{member.first}-{member.stop - 1}" + (" + head" if place == 0 else ""),
                _milliseconds(member.predicted_s),
                _milliseconds(member.measured_s),
                _edge(facts.edges[place]) if facts.edges else "-",
            )
        )
    lines = _columns(rows)
    if facts.circuit_s is not None:
        network_s = max(facts.circuit_s - sum(member.measured_s or 0.0 for member in facts.members), 0.0)
        circuit, network = _milliseconds(facts.circuit_s), _milliseconds(network_s)
        lines.append(f"once round: {circuit}, of which {network} between members")
    if guests is not None:
        lines.append(f"your link to the head: {_link(guests.kind.value, guests.rtt_s)}")
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


def _edge(edge: EdgeFacts) -> str:
    words = _link(edge.kind, edge.rtt_s)
    return words if edge.measured else f"unknown (planned: {words})"


def _link(kind: str, rtt_s: float | None) -> str:
    return kind if rtt_s is None else f"{kind}, {_milliseconds(rtt_s)}"
