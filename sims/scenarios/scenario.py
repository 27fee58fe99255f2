"""What a scenario is: a sentence, a body that runs deployed code in the virtual network, and its figures' targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sims.topology import VirtualNetwork


class Unmet(Exception):
    """Something that must hold does not; the message says what was found instead."""


def expect(holds: object, otherwise: str) -> None:
    """Raise :class:`Unmet` with ``otherwise`` unless ``holds``."""
    if not holds:
        raise Unmet(otherwise)


Figures = dict[str, list[float]]
"""Samples by name; the name ends in the unit (``_ms``, ``_s``, ``_rtts``, ``_bytes``, or a count of things)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run measured, and lines worth reading."""

    figures: Figures = field(default_factory=dict)
    notes: Sequence[str] = ()


class Target(NamedTuple):
    """What the samples of a figure must not exceed."""

    median: float
    p95: float


Body = Callable[[VirtualNetwork], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One situation. ``body`` raises :class:`Unmet` where what must hold does not."""

    name: str
    sentence: str
    body: Body
    targets: Mapping[str, Target] = field(default_factory=dict)
    known_failure: str | None = None
    """Why it fails today; it is then run and shown as a known failure, and as a surprise should it pass."""
    max_seeds: int | None = None
    """No more runs than this however many are asked for: a long one whose figures hardly vary."""
