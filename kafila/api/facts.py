"""What is told of a session beside answers: the ring as JSON, the model as OpenAI and Ollama list it (pure)."""

from __future__ import annotations

import hashlib
from typing import Any

from kafila.api.engine import Engine, MemberFacts, ModelFacts, RingFacts

OLLAMA_LEVEL = "0.6.4"
"""The version of Ollama whose interface this is; its clients ask before they use what came later."""


def health(engine: Engine) -> tuple[int, dict[str, Any]]:
    """Whether prompts may be asked, with the HTTP status that says so."""
    model = engine.model()
    if model is None:
        return 503, {"status": "forming"}
    return 200, {"status": "ok", "model": model.name}


def ring(engine: Engine) -> dict[str, Any]:
    """The ring as one member knows it; times in milliseconds, None where nothing is known."""
    model, facts = engine.model(), engine.ring()
    return {
        "status": "forming" if model is None else "serving",
        "model": None
        if model is None
        else {"name": model.name, "dtype": model.dtype, "context": model.context, "slots": model.slots},
        "members": [] if facts is None else [_member(place, one, facts) for place, one in enumerate(facts.members)],
        "edges": [] if facts is None else _edges(facts),
        "circuit_ms": None if facts is None else _milliseconds(facts.circuit_s),
        "running": 0 if facts is None else facts.running,
        "waiting": 0 if facts is None else facts.waiting,
        "tokens": 0 if facts is None else facts.tokens,
    }


def _member(place: int, member: MemberFacts, facts: RingFacts) -> dict[str, Any]:
    return {
        "name": member.name,
        "you": place == facts.me,
        "head": place == 0,
        "blocks": [member.first, member.stop - 1],
        "predicted_ms": _milliseconds(member.predicted_s),
        "measured_ms": _milliseconds(member.measured_s),
        "memory_used_bytes": member.memory_used_bytes,
        "memory_room_bytes": member.memory_room_bytes,
    }


def _edges(facts: RingFacts) -> list[dict[str, Any]]:
    return [
        {
            "from": place,
            "to": (place + 1) % len(facts.members),
            "kind": edge.kind,
            "rtt_ms": _milliseconds(edge.rtt_s),
            "measured": edge.measured,
        }
        for place, edge in enumerate(facts.edges)
    ]


def _milliseconds(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s * 1e3, 3)


def openai_model(model: ModelFacts, since: int) -> dict[str, Any]:
    """One entry of /v1/models; ``since`` in seconds since 1970."""
    return {
        "id": model.name,
        "object": "model",
        "created": since,
        "owned_by": "kafila",
        "max_model_len": model.context,
    }


def ollama_model(model: ModelFacts, since: str) -> dict[str, Any]:
    """One entry of /api/tags."""
    return {
        "name": f"{model.name}:latest",
        "model": f"{model.name}:latest",
        "modified_at": since,
        "size": model.weight_bytes,
        # Clients want one to tell models apart; a session serves one model, which its name tells.
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": model.family,
        "families": [model.family],
        "parameter_size": "",
        "quantization_level": model.dtype,
    }


def ollama_show(model: ModelFacts) -> dict[str, Any]:
    """The answer of /api/show."""
    return {
        "details": _details(model),
        "model_info": {
            "general.architecture": model.family,
            f"{model.family}.context_length": model.context,
        },
        "capabilities": ["completion", "tools"],
    }
