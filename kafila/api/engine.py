"""What the interface needs of a node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from kafila.ring.frames import Text
from kafila.types import Question


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model a session serves."""

    name: str
    family: str
    """The architecture's name in its config.json: ``llama``, ``qwen3``."""
    dtype: str
    context: int
    """Tokens a conversation may hold."""
    slots: int
    """Answers at once."""
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One member's place in the ring. Its name is what its owner chose: anything."""

    name: str
    first: int
    stop: int
    """Blocks ``first`` (inclusive) to ``stop`` (exclusive)."""
    predicted_s: float | None
    measured_s: float | None
    """Its stage's time a token: what the plan expected, and lately."""
    memory_used_bytes: int
    memory_room_bytes: int


@dataclass(frozen=True, slots=True)
class EdgeFacts:
    """An edge of the ring, from the member with its index to the next."""

    kind: str
    """``direct`` or ``relayed``."""
    rtt_s: float | None
    measured: bool
    """Whether one of its ends sees it so now. Otherwise it is not known, and this is what the plan expects."""


@dataclass(frozen=True, slots=True)
class RingFacts:
    """The ring as one member knows it now."""

    me: int
    """This member's index in ``members``; -1 where it is not in the ring."""
    members: tuple[MemberFacts, ...]
    """The head first."""
    edges: tuple[EdgeFacts, ...]
    """``edges[i]`` leaves ``members[i]``; none for a ring of one."""
    circuit_s: float | None
    """A token's time once round, lately."""
    running: int
    """Answers that hold a slot, everybody's."""
    waiting: int
    """Questions in the queue, everybody's."""
    tokens: int
    """Tokens generated since the session began, everybody's."""


class Engine(Protocol):
    """A node, as far as the interface can see."""

    def model(self) -> ModelFacts | None:
        """What is served; None until prompts may be asked, and once the session is over."""
        ...

    def ring(self) -> RingFacts | None:
        """The ring; None until it is formed."""
        ...

    def answer(self, question: Question) -> AbstractAsyncContextManager[AsyncIterator[Text]]:
        """Ask the ring; the parts as they come. Leaving the context early cancels the answer.

        Raises UsageError where the question cannot be meant, SessionError or DeviceError where nobody can answer now.
        """
        ...
