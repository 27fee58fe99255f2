"""The scheduler's ring as a queue at every stage, in simulated time: what its decisions yield."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kafila.ring.pace import Pacing, Reading
from kafila.ring.schedule import Batch, Finished, Request, Scheduler, Token
from kafila.types import Segment


@dataclass(frozen=True)
class Fixed:
    """A pace that never changes."""

    in_flight: int
    chunk_tokens: int = 256

    def batches(self, answers: int) -> int:
        return self.in_flight

    def reading(self, answers: int, prompt_tokens: int, start: int) -> Reading:
        return Reading(self.in_flight, self.chunk_tokens)

    def record(self, segments: Sequence[Segment], stage_s: Sequence[float], circuit_s: float) -> None:
        """Nothing is learnt."""


@dataclass
class Pipeline:
    """``stage_s``: what each stage takes for so many rows. ``hop_s`` lies between any two and before the first.

    Attention costs every stage ``read_s`` for each token in the cache of a conversation that rides, and ``pair_s`` for
    each of its rows and each token that the row looks back at. ``shared``: by how much each other stage at work makes a
    stage slower.
    """

    pace: Pacing
    stage_s: Sequence[Callable[[int], float]]
    hop_s: float = 0.0
    read_s: float = 0.0
    pair_s: float = 0.0
    shared: float = 0.0
    slots: int = 16
    context: int = 8192
    now: float = 0.0
    tokens: dict[str, list[float]] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(slots=self.slots, context=self.context, pace=self.pace)
        self._free_at = [0.0] * len(self.stage_s)
        self._back: list[tuple[float, int, Batch, tuple[float, ...], float]] = []

    def ask(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        self.tokens[name] = []
        asker = name.encode().ljust(8, b"-")[:8]
        self.scheduler.submit(Request(name, asker, tuple(range(prompt_tokens)), max_tokens=max_tokens))  # type: ignore[arg-type]  # a name is as good as an id

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left to do, or ``until`` says so after a batch."""
        while not until():
            while (batch := self.scheduler.next_batch()) is not None:
                self._send(batch)
            if not self._back:
                return
            self.now, _, batch, stage_s, began = heapq.heappop(self._back)
            self.pace.record(batch.segments, stage_s, self.now - began)
            self.scheduler.completed(batch.number, [1 if segment.sample else None for segment in batch.segments])
            self._hear()

    def _send(self, batch: Batch) -> None:
        at, times = self.now, list[float]()
        attention_s = sum(map(self._attention_s, batch.segments))
        for stage, cost in enumerate(self.stage_s):
            began = max(at, self._free_at[stage])
            others = sum(free_at > began for n, free_at in enumerate(self._free_at) if n != stage)
            times.append((cost(len(batch.tokens)) + attention_s) * (1 + self.shared * others))
            at = self._free_at[stage] = began + times[-1]
            at += self.hop_s
        heapq.heappush(self._back, (at, batch.number, batch, tuple(times), self.now))

    def _attention_s(self, segment: Segment) -> float:
        end = segment.start + segment.length
        return self.read_s * end + self.pair_s * segment.length * (segment.start + end + 1) / 2

    def _hear(self) -> None:
        while (event := self.scheduler.next_event()) is not None:
            match event:
                case Token(name, _):
                    self.tokens[name].append(self.now)
                case Finished(name, _, _):
                    self.finished[name] = self.now
