"""Rotary position embeddings as configurations describe them: a base, and how positions are stretched.

transformers 4 writes ``rope_theta`` and ``rope_scaling`` (and Gemma 3 ``rope_local_base_freq``); transformers 5 writes
``rope_parameters``, for models that turn some blocks otherwise one object a kind of block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kafila.errors import ModelIncomplete, UnsupportedModel
from kafila.shard.keys import Keys

DEFAULT_THETA = 10_000.0
"""Where neither the configuration nor its family says otherwise."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by ``factor`` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's scaling: long wavelengths divided by ``factor``, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rope:
    """How a block turns its queries and keys."""

    theta: float
    scaling: LinearRope | Llama3Rope | None = None

    def frequencies(self, head_dim: int) -> list[float]:
        """Radians a position, one a pair: theta^(-2i/head_dim), then the scaling.

        Llama 3's ramp: https://github.com/meta-llama/llama-models, ``apply_scaling``.
        """
        pairs = head_dim // 2
        plain = [self.theta ** (-index / pairs) for index in range(pairs)]
        match self.scaling:
            case None:
                return plain
            case LinearRope(factor):
                return [frequency / factor for frequency in plain]
            case Llama3Rope() as scaling:
                return [_llama3(frequency, scaling) for frequency in plain]


def parse_rope(config: Keys, family: str) -> Rope:
    """The rotation of all blocks, or of those that see everything."""
    given = _parameters(config, config.get("rope_parameters") or config.get("rope_scaling"))
    own = given.get("full_attention")
    if own is not None or given.get("sliding_attention") is not None:  # one object a kind
        given = _parameters(config, own)
    return _rope(given, family, config.number("rope_theta", DEFAULT_THETA))


def parse_window_rope(config: Keys, family: str) -> Rope:
    """The rotation of blocks with a window, in a family whose other blocks have one of their own."""
    given = _parameters(config, config.get("rope_parameters"))
    own = _parameters(config, given.get("sliding_attention"))
    return _rope(own, family, config.number("rope_local_base_freq", DEFAULT_THETA))


def _parameters(config: Keys, values: object) -> Keys:
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ModelIncomplete(f"{config.file}: the rope parameters are not a JSON object")
    return Keys(f"{config.file}, rope parameters", values)


def _rope(given: Keys, family: str, theta: float) -> Rope:
    if given.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(f"{family} with a partial rotary embedding is not supported")
    theta = given.number("rope_theta", theta)
    match given.get("rope_type") or given.get("type") or "default":
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, LinearRope(given.number("factor")))
        case "llama3":
            return Rope(
                theta,
                Llama3Rope(
                    given.number("factor"),
                    given.number("low_freq_factor"),
                    given.number("high_freq_factor"),
                    given.count("original_max_position_embeddings"),
                ),
            )
        case other:
            raise UnsupportedModel(
                f"{family} with rope scaling {other!r} is not supported; supported are: default, linear, llama3"
            )


def _llama3(frequency: float, scaling: Llama3Rope) -> float:
    turns = scaling.original_context * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - kept) * frequency / scaling.factor + kept * frequency
