"""A node's build as the local interface is told of it (:mod:`kafila.api.engine`)."""

from __future__ import annotations

import json
from collections.abc import Callable

from kafila.api.engine import EdgeFacts, MemberFacts, ModelFacts, RingFacts
from kafila.building import Build
from kafila.mesh import LinkState
from kafila.ring.agreement import ModelOffer
from kafila.types import NodeId


def model_facts(offer: ModelOffer) -> ModelFacts:
    """The offered model."""
    manifest = offer.manifest
    weights = manifest.blocks * manifest.block_bytes + manifest.head_bytes
    return ModelFacts(manifest.name, _family(offer.config), offer.dtype, offer.context, offer.slots, weights)


def _family(config: str) -> str:
    try:
        read = json.loads(config)
    except ValueError:
        return "unknown"
    family = read.get("model_type") if isinstance(read, dict) else None
    return family if isinstance(family, str) else "unknown"


def ring_facts(build: Build, link_state: Callable[[NodeId], LinkState | None]) -> RingFacts:
    """The ring as this member knows it: its own links as they are, the others' as it was told of them."""
    plan, stats = build.plan, build.serving.stats
    measured = () if stats is None else stats.stage_s
    members = tuple(
        MemberFacts(
            stage.name,
            stage.blocks.first,
            stage.blocks.stop,
            stage.stage_s,
            measured[place] if place < len(measured) else None,
            stage.memory_used_bytes,
            stage.memory_room_bytes,
        )
        for place, stage in enumerate(plan.stages)
    )
    ring = [info.node_id for info in build.assignment.ring]
    me = ring.index(build.me.node_id) if build.me.node_id in ring else -1
    return RingFacts(
        me,
        members,
        tuple(_edge(build, place, ring, me, link_state) for place in range(len(plan.edges))),
        None if stats is None or stats.circuit_s <= 0 else stats.circuit_s,
        0 if stats is None else stats.running,
        0 if stats is None else stats.waiting,
        0 if stats is None else stats.tokens,
    )


def _edge(
    build: Build, place: int, ring: list[NodeId], me: int, link_state: Callable[[NodeId], LinkState | None]
) -> EdgeFacts:
    ends = {place, (place + 1) % len(ring)}
    if me in ends:
        (other,) = ends - {me}
        if (state := link_state(ring[other])) is not None:
            return EdgeFacts(state.kind.value, state.rtt_s, measured=True)
    if (told := build.serving.edge_from(ring[place])) is not None:
        return EdgeFacts(told.path.value, told.rtt_s, measured=True)
    planned = build.plan.edges[place]
    return EdgeFacts(planned.kind.value, planned.rtt_s, measured=False)
