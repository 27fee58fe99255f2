"""How many batches circulate and how long a prompt's chunks are, from what circuits took lately (pure).

A stage reads its weights once a batch, however many rows are in it, so its time for k rows, t(k), grows slower than k.
With q answers in m batches of k = q/m rows, every stage sees a batch of each in turn, so an answer gets its next token
after

    gap(m) = max(m x largest t(k), sum of t(k) + what lies between the stages)

and the ring yields q / gap(m) tokens a second: the paper's min(1/bottleneck, q/circuit) for rows that are worth a batch
each. The fewest rows a batch keep every stage at work; one batch saves reading. Which is better, times decide.

A chunk of a prompt makes every batch longer that it rides in. While answers run it is the longest that keeps their gap
within ``MAX_STRETCH`` of what it is without; while none does, the one by which the prompt is done first: short chunks
fill the stages sooner, long ones read weights less often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

MAX_STRETCH = 2.5
"""What a chunk may make of a running answer's gap. The promise is 4; a chunk's cost also grows with its place in the
prompt, and machines do other things."""
CHUNKS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens a chunk may have: beyond 512 rows matrix work is as quick as it gets on any device."""
FIRST_CHUNK = 64
"""Where several stages work and nothing was measured; one stage takes the longest."""
MAX_BATCHES = 16
"""On their way at once; more would only help a ring whose links take longer than ten of its stages."""
_KEPT = 8
"""Times a median is taken over, for one number of rows."""
_SIZES = 32
"""Numbers of rows that are remembered, those seen last."""
_SLOWLY = 1 / 2048
"""How fast what lies between the stages is believed to have grown: a path that became slower is noticed in minutes."""
_LOOK_EVERY = 4
"""Batches between two looks at the times: deciding costs as much as a small model's block, and changes little."""
_BETTER = 0.95
"""A change of course must promise a gap shorter by this, or noise would change it all the time."""


class Pacing(Protocol):
    """What the scheduler asks."""

    def batches(self, answers: int) -> int:
        """Into how many batches to divide ``answers`` running ones."""
        ...

    def chunk(self, answers: int, prompt_tokens: int) -> int:
        """How many tokens of prompts may ride in one batch; ``prompt_tokens`` is the longest prompt."""
        ...

    def prefill_batches(self, answers: int) -> int:
        """How many batches may be on their way while a prompt is read in."""
        ...

    def record(self, rows: int, stage_s: Sequence[float], circuit_s: float, *, decode: bool) -> None:
        """A batch of ``rows`` has been round; ``decode``: one of each of so many answers."""
        ...


class _Costs:
    """What each stage takes for so many rows, as far as was seen."""

    def __init__(self) -> None:
        self._times: OrderedDict[int, deque[tuple[float, ...]]] = OrderedDict()
        self._seen: list[tuple[int, tuple[float, ...]]] = []
        self._hoped: list[tuple[int, tuple[float, ...]]] = []

    def record(self, rows: int, stage_s: Sequence[float]) -> bool:
        """Whether so many rows had never been seen."""
        new = rows not in self._times
        self._times.setdefault(rows, deque(maxlen=_KEPT)).append(tuple(stage_s))
        self._times.move_to_end(rows)
        if len(self._times) > _SIZES:
            self._times.popitem(last=False)
        return new

    def look(self) -> None:
        """Take in what was recorded."""
        self._seen = sorted((rows, _medians(times)) for rows, times in self._times.items())
        self._hoped = _sensible(self._seen)

    def stage_s(self, rows: int, *, hopeful: bool = False) -> tuple[float, ...] | None:
        """Between two numbers that were seen, in proportion. Below the least it may be the same, and beyond the most
        every row may cost as much; ``hopeful``, both lie on the line through least and most, or with one alone the
        other way round, so that what might be better is tried once. None before any was seen."""
        known = self._hoped if hopeful else self._seen
        if not known:
            return None
        at = bisect_left(known, rows, key=lambda entry: entry[0])
        (least, lower), (most, upper) = known[0], known[-1]
        if least <= rows <= most:
            (below, lower), (above, upper) = known[max(at - 1, 0)], known[at]
            return upper if above == rows else _between(lower, upper, (rows - below) / (above - below))
        if hopeful and most > least:
            return _between(lower, upper, (rows - least) / (most - least))
        if hopeful:
            return tuple(time * min(rows / most, 1) for time in upper)
        return tuple(time * rows / most for time in upper) if rows > most else lower


class Pace:
    """What a ring of ``stages`` members does best, learnt from its own circuits."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._answers = _Costs()
        """By the number of answers in a batch that has one token of each and nothing else."""
        self._rows = _Costs()
        """By the number of rows, chunks among them: those attend to one another and not each to a conversation."""
        self._measured = False
        self._between_s: float | None = None
        """Of a circuit, what is no stage's: links, and handing over."""
        self._course: dict[int, int] = {}
        self._decided: dict[tuple[int, ...], int] = {}
        """Since the last look at the times."""
        self._until_look = 0

    def record(self, rows: int, stage_s: Sequence[float], circuit_s: float, *, decode: bool) -> None:
        """A batch of ``rows`` has been round; ``stage_s`` has one entry a stage."""
        new = self._answers.record(rows, stage_s) if decode else False
        if not decode or rows == 1:
            new |= self._rows.record(rows, stage_s)
        between_s = max(circuit_s - sum(stage_s), 0.0)
        if self._between_s is None or between_s < self._between_s:
            self._between_s = between_s
        else:  # most often it waited behind another batch; only if that lasts it is the links
            self._between_s += _SLOWLY * (between_s - self._between_s)
        self._until_look -= 1
        if self._until_look <= 0 or new:
            self._until_look = _LOOK_EVERY
            self._measured = True
            self._answers.look()
            self._rows.look()
            self._decided.clear()

    def _answers_s(self, answers: int, *, hopeful: bool = False) -> tuple[float, ...]:
        """What each stage takes for a token of each of so many answers."""
        found = self._answers.stage_s(answers, hopeful=hopeful) or self._rows.stage_s(answers)
        return found or (0.0,) * self._stages

    def _rows_s(self, rows: int, *, hopeful: bool = False) -> tuple[float, ...]:
        """What each stage takes for rows of which some are a chunk's."""
        found = self._rows.stage_s(rows, hopeful=hopeful) or self._answers.stage_s(rows)
        return found or (0.0,) * self._stages

    def _gap_s(self, batches: Sequence[tuple[float, ...]]) -> float:
        """How long an answer waits for its next token where such batches are on their way: stage times of each."""
        busiest = max(map(sum, zip(*batches, strict=True)))
        return max(busiest, max(map(sum, batches)) + (self._between_s or 0.0))

    def _answers_gap_s(self, answers: int, batches: int, *, hopeful: bool = False) -> float:
        return self._gap_s([self._answers_s(size, hopeful=hopeful) for size in _divided(answers, batches)])

    def batches(self, answers: int) -> int:
        """Into how many batches to divide ``answers`` running ones: as many as there are stages, until times say
        better."""
        return self._once((answers,), lambda: self._best_batches(answers))

    def _best_batches(self, answers: int) -> int:
        most = max(1, min(answers, MAX_BATCHES))
        course = min(self._course.get(answers, self._stages), most)
        if self._measured:
            gaps = {m: self._answers_gap_s(answers, m, hopeful=True) for m in range(1, most + 1)}
            best = min(gaps, key=lambda m: (gaps[m], -m))
            if gaps[best] < _BETTER * gaps[course]:
                course = best
            self._course[answers] = course
        return course

    def chunk(self, answers: int, prompt_tokens: int) -> int:
        """How many tokens of prompts may ride in one batch; ``prompt_tokens`` is the longest prompt."""
        return self._once((answers, prompt_tokens), lambda: self._best_chunk(answers, prompt_tokens))

    def _best_chunk(self, answers: int, prompt_tokens: int) -> int:
        if not self._measured:
            return FIRST_CHUNK if self._stages > 1 else CHUNKS[-1]
        if not answers:
            return min(CHUNKS, key=lambda size: (self._prompt_s(size, prompt_tokens), -size))
        batches = self.batches(answers)
        allowed = MAX_STRETCH * self._answers_gap_s(answers, batches)
        most, crowd = _divided(answers, batches)[0], max(batches, self._stages)
        fitting = (size for size in CHUNKS if self._gap_s([self._rows_s(most + size)] * crowd) <= allowed)
        return max(fitting, default=CHUNKS[0])

    def prefill_batches(self, answers: int) -> int:
        """How many batches may be on their way while a prompt is read in: so many that no stage waits; beside running
        answers, which would wait for every one of them, no more than there are stages."""
        if answers:
            return max(self.batches(answers), self._stages)
        return min(2 * self._stages, MAX_BATCHES) if self._stages > 1 else 1

    def _once(self, question: tuple[int, ...], decide: Callable[[], int]) -> int:
        """A decision stands until the times are looked at again."""
        if question not in self._decided:
            self._decided[question] = decide()
        return self._decided[question]

    def _prompt_s(self, size: int, tokens: int) -> float:
        """From a prompt's first chunk of ``size`` leaving to its last being back."""
        size = min(size, max(tokens, 1))
        stages = self._rows_s(size, hopeful=True)
        chunks = -(-tokens // size)
        return sum(stages) + (self._between_s or 0.0) + (chunks - 1) * max(stages)


def _divided(answers: int, batches: int) -> list[int]:
    """The sizes of ``batches`` that share ``answers`` as evenly as can be, the larger ones first."""
    each, larger = divmod(answers, batches)
    return [each + 1] * larger + [each] * (batches - larger)


def _between(lower: Sequence[float], upper: Sequence[float], part: float) -> tuple[float, ...]:
    """On the line through both, which does not fall: more rows are no quicker, whatever was measured."""
    return tuple(max(a + max(b - a, 0.0) * part, 0.0) for a, b in zip(lower, upper, strict=True))


def _sensible(known: Sequence[tuple[int, tuple[float, ...]]]) -> list[tuple[int, tuple[float, ...]]]:
    """More rows take no less, and a row among more costs no more. What was measured otherwise was once: a first use of
    a size, or a machine that did something else; without this it would never be tried again."""
    sensible = list(known)
    for at in range(len(known) - 2, -1, -1):
        rows, times = sensible[at]
        sensible[at] = rows, tuple(map(min, times, sensible[at + 1][1]))
    for at in range(1, len(known)):
        (fewer, below), (rows, times) = sensible[at - 1], sensible[at]
        sensible[at] = rows, tuple(min(time, least * rows / fewer) for time, least in zip(times, below, strict=True))
    return sensible


def _medians(times: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sorted(stage)[len(stage) // 2] for stage in zip(*times, strict=True))
