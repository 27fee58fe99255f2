"""A simulated device behind `kafila.backend`: it takes the time that `sims.fleet.device` says and answers with rows of
the real size, all zeros, and tokens that mean nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from kafila.backend import Duty
from kafila.errors import DeviceError
from kafila.ring.agreement import ModelOffer
from kafila.shard.worker import Forward, Forwarded, Job, Loaded, Result, Sample, Sampled, Score, Scored
from kafila.types import Best, Capability, ModelManifest, Question, Segment
from sims.fabric import Fabric
from sims.fleet.device import Device

LOAD_BYTES_PER_S = 2e9
"""Weights come from a local disk (an NVMe drive of a few years ago); fetching them is not simulated."""
INBOX_JOBS = 128
"""As the deployed device has."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_TOKEN = 7
_BEST = Best(1.0, _TOKEN)
"""Of the head's rows: what it draws from all of them, too."""
_SECOND = Best(0.5, _TOKEN + 1)
"""Of the last member's."""


@dataclass(slots=True)
class Passage:
    """One job at one member."""

    batch: int
    draws: bool
    """The head's second job of a batch, after its rows have been round; the last member's, once it has sent them."""
    rows: int
    is_decode: bool
    """Whether every segment is one row. Drawing from a prompt looks so too, where only last rows come back."""
    arrived_at: float
    done_at: float = 0.0


class SimulatedWorker:
    """Does jobs in order, each in the device's time. ``one_by_one``: the requests of a batch are not computed together.

    Timed by the virtual network's own events, which costs less than a task that sleeps; ``log`` takes every job."""

    def __init__(
        self,
        device: Device,
        model: ModelManifest,
        duty: Duty,
        on_result: Callable[[Result], None],
        fabric: Fabric,
        *,
        one_by_one: bool,
        log: list[Passage],
    ) -> None:
        self._device = device
        self._model = model
        self._duty = duty
        self._on_result = on_result
        self._fabric = fabric
        self._one_by_one = one_by_one
        self._log = log
        self._waiting: deque[tuple[Job, Passage]] = deque()
        self._busy = True
        self._stopped = False

    def start(self) -> None:
        """Load, then work."""
        duty, model = self._duty, self._model
        percent = 100 if duty.holds_head else duty.scored_percent
        held = (duty.blocks.stop - duty.blocks.first) * model.block_bytes + model.head_bytes * percent // 100
        self._tell_after(held / LOAD_BYTES_PER_S, Loaded("simulated", held / LOAD_BYTES_PER_S))

    def submit(self, job: Job) -> None:
        """Queue a job. Raises DeviceError when too many wait."""
        if len(self._waiting) >= INBOX_JOBS:
            raise DeviceError(f"more than {INBOX_JOBS} jobs wait for it")
        decode = all(segment.length == 1 for segment in job.segments)
        rows = sum(segment.length for segment in job.segments)
        passage = Passage(job.batch, not isinstance(job, Forward), rows, decode, trio.current_time())
        self._log.append(passage)
        self._waiting.append((job, passage))
        if not self._busy:
            self._begin()

    def stop(self) -> None:
        """No result is heard afterwards."""
        self._stopped = True

    def _begin(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            job, passage = self._waiting.popleft()
            takes_s = self._takes_s(job)
            passage.done_at = self._fabric.now + takes_s
            self._tell_after(takes_s, self._result(job, passage.rows, takes_s))

    def _tell_after(self, duration_s: float, result: Result) -> None:
        self._fabric.at(self._fabric.now + duration_s, self._tell, result)

    def _tell(self, result: Result) -> None:
        if not self._stopped:
            self._on_result(result)
            self._begin()

    def _parts(self, job: Job) -> list[tuple[Segment, ...]]:
        """What is computed together."""
        return [(segment,) for segment in job.segments] if self._one_by_one else [job.segments]

    def _draw_s(self, job: Job, percent: int) -> float:
        """From so much of the vocabulary."""
        rows = [sum(segment.sample for segment in part) for part in self._parts(job)]
        return sum(self._device.sample_s(self._model, count, ITEM_BYTES[job.dtype], percent) for count in rows)

    def _takes_s(self, job: Job) -> float:
        parts, item_bytes, device = self._parts(job), ITEM_BYTES[job.dtype], self._device
        if isinstance(job, Sample):
            return self._draw_s(job, 100 - self._duty.scored_percent if job.partial else 100)
        if isinstance(job, Score):
            return self._draw_s(job, self._duty.scored_percent)
        blocks = self._duty.blocks.stop - self._duty.blocks.first
        return sum(device.forward_s(self._model, blocks, part, item_bytes) for part in parts)

    def _result(self, job: Job, rows: int, takes_s: float) -> Result:
        if isinstance(job, Forward):
            rows = len(job.segments) if job.last_only else rows
            return Forwarded(job.batch, bytes(rows * self._model.hidden_bytes), job.dtype, takes_s)
        if isinstance(job, Score):
            return Scored(job.batch, tuple(_SECOND for segment in job.segments if segment.sample), takes_s)
        best = tuple(_BEST for segment in job.segments if segment.sample) if job.partial else ()
        tokens = tuple(_TOKEN if segment.sample else None for segment in job.segments)
        return Sampled(job.batch, tokens, takes_s, best=best)


class SimulatedBackend:
    """A device and a model of which only the sizes are known."""

    def __init__(
        self, device: Device, model: ModelManifest, fabric: Fabric, *, one_by_one: bool, dtype: str = "bfloat16"
    ) -> None:
        self.log: list[Passage] = []
        self._device = device
        self._model = model
        self._fabric = fabric
        self._one_by_one = one_by_one
        self._dtype = dtype

    async def offer(self, model: str, context: int | None, slots: int) -> ModelOffer:
        """The model's sizes."""
        await trio.lowlevel.checkpoint()
        return ModelOffer(self._model, model, "{}", self._dtype, context or self._model.max_context, slots)

    async def measure(self, offer: ModelOffer) -> Capability:  # noqa: ARG002  - a backend's
        """What the probe would say."""
        device = self._device
        await trio.lowlevel.checkpoint()
        overhead_s = None if device.probed_bytes_per_s is None else device.overhead_s
        return Capability("simulated", device.memory_bytes, device.probed_bytes_per_s, overhead_s, device.flops)

    async def worker(self, offer: ModelOffer, duty: Duty, on_result: Callable[[Result], None]) -> SimulatedWorker:
        """A worker for a shard."""
        await trio.lowlevel.checkpoint()
        return SimulatedWorker(
            self._device, offer.manifest, duty, on_result, self._fabric, one_by_one=self._one_by_one, log=self.log
        )

    async def language(self, offer: ModelOffer) -> Counted:  # noqa: ARG002  - a backend's
        """A language of counted tokens."""
        await trio.lowlevel.checkpoint()
        return Counted()


class Counted:
    """A message is the number of its tokens in digits; an answer is a letter a token and has no end of its own.

    No two questions begin alike, so that none is answered out of another's cache."""

    stop_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._asked = 0

    def prompt(self, question: Question) -> list[int]:
        """So many tokens, the first of them new."""
        self._asked += 1
        length = sum(int(message.content) for message in question.messages)
        return [_TOKEN + self._asked, *[_TOKEN] * (length - 1)]

    def opening(self, prompt: Sequence[int]) -> str:  # noqa: ARG002  - a language's
        """Nothing."""
        return ""

    def spell(self, token: int) -> bytes:  # noqa: ARG002  - a language's
        """One letter."""
        return b"x"

    def stream(self, stop: Sequence[str]) -> CountedStream:  # noqa: ARG002  - a language's
        """One letter a token."""
        return CountedStream()


class CountedStream:
    """An answer's text."""

    stopped = False

    def feed(self, token: int) -> str:  # noqa: ARG002  - a stream's
        """One letter."""
        return "x"

    def finish(self) -> str:
        """Nothing is held back."""
        return ""
