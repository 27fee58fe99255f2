"""What a node needs of a device: the seam between the session and the shard.

The deployed node uses :mod:`kafila.device`, which does the work in threads; the simulator a backend that takes the
(virtual) time a device would take. All may raise ModelError or DeviceError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kafila.head import Language
from kafila.ring.agreement import ModelOffer
from kafila.shard.worker import Job, Result
from kafila.types import BlockRange, Capability


@dataclass(frozen=True, slots=True)
class Duty:
    """The part of the model one member holds, and how much of it is reserved for talk."""

    blocks: BlockRange
    holds_head: bool
    slots: int
    context: int
    dtype: str
    scored_percent: int = 0
    """Of the vocabulary's last rows (:func:`kafila.types.scored_from`). At the head, those it leaves to the last member
    where a draw allows that; elsewhere this is the last member, which holds them and the final norm."""
    spare_bytes: int = 0
    """Of the member's room, what the plan leaves: prompts may keep that much of the checkpoint's file in memory."""


class Worker(Protocol):
    """Runs jobs in order, away from the event loop. Its first result is ``Loaded`` or ``Failed``."""

    def start(self) -> None:
        """Begin loading."""
        ...

    def submit(self, job: Job) -> None:
        """Queue a job; its result goes to the callback the worker was built with."""
        ...

    def stop(self) -> None:
        """End within a second, whatever it is doing."""
        ...


class Backend(Protocol):
    """A device and the way to checkpoints."""

    async def offer(self, model: str, context: int | None, slots: int) -> ModelOffer:
        """Read what the planner and the members must know of a checkpoint, without its weights."""
        ...

    async def measure(self, offer: ModelOffer) -> Capability:
        """Measure this device with the model's own shapes, before any weight is loaded."""
        ...

    async def worker(self, offer: ModelOffer, duty: Duty, on_result: Callable[[Result], None]) -> Worker:
        """A worker for a shard; ``on_result`` may be called from any thread."""
        ...

    async def language(self, offer: ModelOffer) -> Language:
        """The checkpoint's tokenizer and chat template, for the head."""
        ...
