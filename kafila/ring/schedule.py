"""Which tokens go round next (pure).

The head's scheduler turns requests into ragged batches. A request waits in a bounded queue, is given a KV slot, has
its prompt prefilled in chunks, then yields one token a circuit until it ends:

    QUEUED --slot free--> PREFILL --last chunk's token back--> DECODE --stop, length, context, cancel--> gone
       `----------------------------- cancel at any time: the slot is free at once ----------------------'

Several batches circulate so that every stage works (paper Section VII-C), or one where that is quicker:
:mod:`kafila.ring.pace` decides by what circuits took. A request's decode token is in at most one of them. Chunks of one
prompt may follow one another closely, since every stage handles batches in order.

A slot remembers which tokens its cache holds and for whom; a follow-up by the same person that begins with the same
tokens prefills only what is new. The caches of other people are never reused, whatever they hold.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from kafila.ring.pace import Pacing, Reading
from kafila.types import FinishReason, History, NodeId, Sampling, Segment

MAX_WAITING = 64
"""Requests that may wait for a slot; one more is told to come back."""
MAX_ASKERS = 256
"""Whose turns are remembered: more than a session has members and guests."""


@dataclass(frozen=True, slots=True)
class Request:
    """One answer asked for. ``prompt`` is the rendered conversation; ``stop_ids`` end the answer, not part of it.

    ``max_tokens`` 0 means until the model stops or the context is full.
    """

    name: str
    asker: NodeId
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes round next. ``tokens`` are the inputs of all segments, in order; ``sampling`` stands beside each."""

    number: int
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    sampling: tuple[Sampling, ...]
    histories: tuple[History, ...] = ()
    """The tokens before the one to be drawn, beside each segment, empty where its draw does not look back; no entries
    where none does."""


@dataclass(frozen=True, slots=True)
class Token:
    """A request's next token (never a stop id)."""

    name: str
    token: int


@dataclass(frozen=True, slots=True)
class Started:
    """A request left the queue; ``reused`` of its prompt's tokens were still in the cache."""

    name: str
    reused: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over. ``answer_tokens`` counts what was generated, a closing stop id excluded."""

    name: str
    reason: FinishReason
    answer_tokens: int


Event = Token | Started | Finished


class Verdict(Enum):
    """What became of a submitted request at once."""

    ACCEPTED = auto()
    TOO_LONG = auto()
    QUEUE_FULL = auto()
    DUPLICATE = auto()


@dataclass(slots=True)
class _Slot:
    """A KV slot, the same on every member. While it is free, ``held`` are the tokens its cache holds, or will hold when
    the batches on their way have passed: stages keep the order, so what is sent later finds them there."""

    number: int
    owner: NodeId | None = None
    held: list[int] = field(default_factory=list)
    busy: bool = False


@dataclass(slots=True)
class _Running:
    request: Request
    slot: _Slot
    fed: int
    """Tokens of ``tokens`` sent round so far."""
    tokens: list[int]
    """The prompt, then what was generated."""
    reused: int = 0
    """Tokens at the front that were in the cache already."""
    awaiting_sample: bool = False

    @property
    def answered(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def history(self) -> History:
        prompt = self.request.prompt
        return History(prompt, tuple(self.tokens[len(prompt) :]))

    @property
    def left(self) -> int:
        """Tokens not yet sent round: 1 while decoding, more during prefill, 0 while awaiting a sample."""
        return len(self.tokens) - self.fed


class Scheduler:
    """The head's scheduler: :meth:`submit` and :meth:`cancel` requests, take :meth:`next_batch` until it is None,
    report each batch with :meth:`completed`, read :meth:`next_event` until it is None.

    ``slots`` and ``context`` are what the plan reserved on every member; ``pace`` decides how many batches circulate
    and how long chunks are.
    """

    def __init__(self, *, slots: int, context: int, pace: Pacing) -> None:
        self._context = context
        self._pace = pace
        self._slots = [_Slot(number) for number in range(slots)]
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: OrderedDict[str, _Running] = OrderedDict()
        self._in_flight: dict[int, list[tuple[_Running, bool]]] = {}
        self._next_number = 0
        self._turns = count()
        self._served: dict[NodeId, int] = {}
        """When each asker was last given a slot, in turns."""
        self._events: deque[Event] = deque()

    def submit(self, request: Request) -> Verdict:
        """Queue a request; it must leave room in the context for at least one token."""
        if request.name in self._waiting or request.name in self._running:
            return Verdict.DUPLICATE
        if not 0 < len(request.prompt) < self._context:
            return Verdict.TOO_LONG
        if len(self._waiting) >= MAX_WAITING:
            return Verdict.QUEUE_FULL
        self._waiting[request.name] = request
        self._admit()
        return Verdict.ACCEPTED

    def cancel(self, name: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request now; unknown or finished ones are ignored. Its slot is free for another at once."""
        if self._waiting.pop(name, None) is not None:
            self._events.append(Finished(name, reason, 0))
        elif name in self._running:
            self._finish(self._running[name], reason)
            self._admit()

    def position(self, name: str) -> int | None:
        """A waiting request's place in the queue, 1 being next; None when it is not waiting."""
        names = list(self._waiting)
        return names.index(name) + 1 if name in names else None

    @property
    def running(self) -> int:
        """How many requests hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is on its way."""
        return not (self._waiting or self._running or self._in_flight)

    def next_batch(self) -> Batch | None:
        """The next batch to send round, or None when nothing is ready or enough batches are on their way.

        Running answers come first, one token each; prompts share what one chunk holds. So an answer never waits for
        more than one chunk a stage, and a batch leaves some answers to the next one so that all stages have work.
        """
        reading = [running for running in self._running.values() if running.left > 1]
        answers = len(self._running) - len(reading)
        batches = self._pace.batches(answers)
        how = self._how_to_read(reading, answers)
        parts: list[tuple[_Running, int]] = []
        if self._awaited < batches or len(self._in_flight) < how.batches:
            parts = self._answers_due(answers, batches)
        if reading and len(self._in_flight) < how.batches and (parts or not answers or self._chunk_on_its_way):
            parts += _chunk(reading, how.tokens, alike=answers > 0)
        return self._dispatch(parts) if parts else None

    def _how_to_read(self, reading: Sequence[_Running], answers: int) -> Reading:
        if not reading:
            return Reading(0, 0)
        longest = max(len(running.tokens) - running.reused for running in reading)
        return self._pace.reading(answers, longest, reading[0].fed)

    def _answers_due(self, answers: int, batches: int) -> list[tuple[_Running, int]]:
        """Their share of the next batch."""
        parts = [(running, 1) for running in self._running.values() if running.left == 1]
        to_come = max(batches - self._awaited, 1)
        return parts[: min(-(-len(parts) // to_come), -(-answers // batches))]

    @property
    def _chunk_on_its_way(self) -> bool:
        """Only behind one does a chunk leave without an answer: the first would meet answers that are just back, and
        make them wait for it at the first stage and once more at each that it is ahead of them."""
        return any(not wanted for riders in self._in_flight.values() for _, wanted in riders)

    @property
    def _awaited(self) -> int:
        """Batches on their way that bring somebody's next token; the rest are chunks, and hold up no answer."""
        return sum(any(wanted for _, wanted in riders) for riders in self._in_flight.values())

    def _dispatch(self, parts: Sequence[tuple[_Running, int]]) -> Batch:
        segments: list[Segment] = []
        tokens: list[int] = []
        riders: list[tuple[_Running, bool]] = []
        for running, length in parts:
            last = length == running.left
            segments.append(Segment(running.slot.number, running.fed, length, last))
            tokens += running.tokens[running.fed : running.fed + length]
            riders.append((running, last))
            running.fed += length
            running.awaiting_sample = last
            # Whoever was served goes behind the others, so that nobody's chunks always come first.
            self._running.move_to_end(running.request.name)
        number = self._next_number
        self._next_number += 1
        self._in_flight[number] = riders
        sampling = tuple(running.request.sampling for running, _ in parts)
        return Batch(number, tuple(segments), tuple(tokens), sampling, _histories(riders))

    def riders(self, number: int) -> tuple[str, ...]:
        """The requests in batch ``number``, by segment; none when it is not on its way."""
        return tuple(running.request.name for running, _ in self._in_flight.get(number, ()))

    def completed(self, number: int, tokens: Sequence[int | None]) -> None:
        """Batch ``number`` is back with one entry a segment: the sampled token, or None where none was asked for.

        A batch that was never sent, or sent back twice, is ignored; so are tokens of requests that have ended since.
        """
        for (running, wanted), token in zip(self._in_flight.pop(number, ()), tokens, strict=True):
            if wanted and token is not None and self._running.get(running.request.name) is running:
                running.awaiting_sample = False
                self._take_token(running, token)
        self._admit()

    def _take_token(self, running: _Running, token: int) -> None:
        request = running.request
        if token in request.stop_ids:
            self._finish(running, FinishReason.STOP)
            return
        running.tokens.append(token)
        self._events.append(Token(request.name, token))
        if running.answered == request.max_tokens:
            self._finish(running, FinishReason.LENGTH)
        elif len(running.tokens) >= self._context:
            self._finish(running, FinishReason.CONTEXT)

    def _finish(self, running: _Running, reason: FinishReason) -> None:
        del self._running[running.request.name]
        running.slot.busy = False
        running.slot.held = running.tokens[: running.fed]
        self._events.append(Finished(running.request.name, reason, running.answered))

    def _admit(self) -> None:
        """Give free slots to waiting requests, taking askers in turn."""
        while self._waiting:
            free = [slot for slot in self._slots if not slot.busy]
            if not free:
                return
            request = self._take_waiting()
            slot = max(free, key=lambda s: (_reusable(s, request), -len(s.held), -s.number))
            reused = _reusable(slot, request)
            slot.busy, slot.owner = True, request.asker
            self._running[request.name] = _Running(
                request, slot, fed=reused, tokens=list(request.prompt), reused=reused
            )
            self._events.append(Started(request.name, reused))

    def _take_waiting(self) -> Request:
        """The first request of whoever has the fewest slots, of several the one who has waited longest for one."""
        slots = Counter(running.request.asker for running in self._running.values())

        def turn(name: str) -> tuple[int, int]:
            asker = self._waiting[name].asker
            return slots[asker], self._served.get(asker, -1)

        request = self._waiting.pop(min(self._waiting, key=turn))
        self._served.pop(request.asker, None)
        self._served[request.asker] = next(self._turns)
        if len(self._served) > MAX_ASKERS:
            del self._served[next(iter(self._served))]
        return request

    def next_event(self) -> Event | None:
        """What happened, in order; None when all is told."""
        return self._events.popleft() if self._events else None


def _chunk(reading: Sequence[_Running], room: int, *, alike: bool) -> list[tuple[_Running, int]]:
    """Tokens of prompts for one batch; ``alike``: of none that has come further than the first, which ``room`` is
    for."""
    parts = []
    for running in reading:
        if room > 0 and not (alike and running.fed > reading[0].fed):
            parts.append((running, min(running.left, room)))
            room -= parts[-1][1]
    return parts


def _histories(riders: Sequence[tuple[_Running, bool]]) -> tuple[History, ...]:
    """What each rider's draw looks back at: its own tokens and nobody else's."""
    if not any(wanted and running.request.sampling.looks_back for running, wanted in riders):
        return ()
    return tuple(
        running.history if wanted and running.request.sampling.looks_back else History() for running, wanted in riders
    )


def _reusable(slot: _Slot, request: Request) -> int:
    """Tokens at the front of the prompt that the slot's cache already holds for this asker.

    At least one token must go round to draw the next from, so the last of the prompt is never counted.
    """
    if slot.owner != request.asker:
        return 0
    limit = min(len(slot.held), len(request.prompt) - 1)
    return next((i for i in range(limit) if slot.held[i] != request.prompt[i]), limit)
