"""How many batches circulate and how long a prompt's chunks are, from what circuits took lately (pure).

A stage reads its weights once a batch, however many rows are in it, so its time for k rows, t(k), grows slower than k.
With q answers in m batches of k = q/m rows, every stage sees a batch of each in turn, so an answer gets its next token
after

    gap(m) = max(m x largest t(k), sum of t(k) + what lies between the stages)

and the ring yields q / gap(m) tokens a second: the paper's min(1/bottleneck, q/circuit) for rows that are worth a batch
each. The fewest rows a batch keep every stage at work; one batch saves reading. Which is better, times decide: what
stage times promise is tried, and what then came of it is kept (:mod:`kafila.ring.divisions`).

A chunk of a prompt makes every batch longer that it rides in. While answers run it is as long as keeps their gap within
``MAX_STRETCH`` of what it is without, at the place in the prompt that it comes from (:mod:`kafila.ring.chunks`), and
now and then a batch goes without one, so that what is usual is known as it is now. While none runs, it is the one by
which the prompt is done first: short chunks fill the stages sooner, long ones read weights less often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kafila.ring.chunks import ChunkCosts
from kafila.ring.divisions import Divisions, divided
from kafila.types import Segment

MAX_STRETCH = 2.5
"""What chunks may make of a running answer's gap. The promise is 4: machines do other things."""
MAX_MEETING = 3.0
"""And of the one gap in which several batches of answers, each longer than before, are not evenly apart yet."""
CHUNKS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens a chunk may have: beyond 512 rows matrix work is as quick as it gets on any device."""
_BESIDE = (1, 2, 3, *CHUNKS)
"""And beside running answers, where a row more may be all there is time for."""
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
_WORTH_IT = 1.5
"""What another batch on its way must add to a prompt's speed: it is one more to wait behind, should it be late."""
_INSTANT_S = 1e-9
"""No batch is quicker."""
_SPARED = 0.8
"""Part of the time that stage times promise for fewer batches than there are, as long as none was measured: stages that
share a machine were slower side by side than they would be in turns."""
_BETTER, _MEASURED_BETTER = 0.95, 0.98
"""A change of course must promise a gap shorter by this, or noise would change it all the time; by less where both were
measured."""


_USUAL_FROM = 3
"""Batches of answers alone before a chunk joins any: the first ones are slower than is usual."""
_REFRESH, _REFRESH_CRAMPED = 32, 4
"""Batches with a chunk before one goes without; fewer where no chunk seems to fit, for then the usual may be out of
date."""


class Reading(NamedTuple):
    """How to read a prompt in."""

    batches: int
    """That may be on their way meanwhile."""
    tokens: int
    """Of prompts that may ride in one batch; 0: none in this one."""


class Pacing(Protocol):
    """What the scheduler asks."""

    def batches(self, answers: int) -> int:
        """Into how many batches to divide ``answers`` running ones."""
        ...

    def reading(self, answers: int, prompt_tokens: int, start: int) -> Reading:
        """How a prompt is read in beside so many answers; ``prompt_tokens`` is the longest one, ``start`` the place
        that the next chunk comes from."""
        ...

    def record(self, segments: Sequence[Segment], stage_s: Sequence[float], circuit_s: float) -> None:
        """A batch has been round; ``stage_s`` has one entry a stage."""
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
        self._chunks = ChunkCosts(self._answers_s)
        self._divisions = Divisions()
        self._alone_seen = 0
        """Batches that had one token of each of some answers and nothing else."""
        self._since_alone = 0
        """Batches of answers with a chunk since then."""
        self._measured = False
        self._between_s: float | None = None
        """Of a circuit, what is no stage's: links, and handing over."""
        self._course: dict[int, int] = {}
        self._decided: dict[tuple[int, ...], int] = {}
        """Since the last look at the times."""
        self._until_look = 0

    def record(self, segments: Sequence[Segment], stage_s: Sequence[float], circuit_s: float) -> None:
        """A batch has been round; ``stage_s`` has one entry a stage."""
        chunks = [segment for segment in segments if segment.length > 1 or not segment.sample]
        rows, answers = sum(segment.length for segment in segments), len(segments) - len(chunks)
        new = False
        if not chunks:
            new = self._answers.record(rows, stage_s)
            self._divisions.record(answers, circuit_s)
            self._alone_seen += 1
            self._since_alone = 0
        else:
            self._divisions.disturbed()
        if chunks and answers:
            self._since_alone += 1
            self._chunks.record(answers, rows - answers, max(chunk.start for chunk in chunks), stage_s)
        if chunks or rows == 1:
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
        return self._gap_s([self._answers_s(size, hopeful=hopeful) for size in divided(answers, batches)])

    def batches(self, answers: int) -> int:
        """Into how many batches to divide ``answers`` running ones: as many as there are stages, until times say
        better."""
        batches = self._once((answers,), lambda: self._best_batches(answers))
        self._divisions.use(answers, batches)
        return batches

    def _best_batches(self, answers: int) -> int:
        most = max(1, min(answers, MAX_BATCHES))
        course = min(self._course.get(answers, self._stages), most)
        if self._measured and self._divisions.tried(answers, course):
            gaps = {m: self._promised_gap_s(answers, m, course) for m in range(1, most + 1)}
            best = min(gaps, key=lambda m: (gaps[m], -m))
            measured = all(self._divisions.gap_s(answers, m) is not None for m in (best, course))
            if gaps[best] < (_MEASURED_BETTER if measured else _BETTER) * gaps[course]:
                course = best
            self._course[answers] = course
        return course

    def _promised_gap_s(self, answers: int, batches: int, course: int) -> float:
        measured_s = self._divisions.gap_s(answers, batches)
        if measured_s is not None:
            return measured_s
        return self._answers_gap_s(answers, batches, hopeful=True) * (_SPARED if batches < course else 1.0)

    def reading(self, answers: int, prompt_tokens: int, start: int) -> Reading:
        """How a prompt is read in: with nobody running, so that no stage waits; beside answers, so much at a time that
        they hardly do."""
        if answers:
            return self._beside(answers, start)
        batches = min(2 * self._stages, MAX_BATCHES) if self._stages > 1 else 1
        return Reading(batches, self._once((0, prompt_tokens), lambda: self._best_chunk(prompt_tokens)))

    def _best_chunk(self, prompt_tokens: int) -> int:
        if not self._measured:
            return FIRST_CHUNK if self._stages > 1 else CHUNKS[-1]
        return min(CHUNKS, key=lambda size: (self._prompt_s(size, prompt_tokens), -size))

    def _beside(self, answers: int, start: int) -> Reading:
        """The most tokens a second that keep the answers' gap; where nothing does, few tokens, for a prompt has to end.

        Behind the one batch of all answers others may follow that are chunks alone. Fewer of them leave room for longer
        chunks, which is better where a chunk's cost is mostly what it reads. Between several batches of answers there
        are none: those would have to wait for them whenever they are not evenly apart.
        """
        batches = self.batches(answers)
        if self._alone_seen < _USUAL_FROM or self._since_alone >= _REFRESH:
            return Reading(batches, 0)
        usual_s = self._answers_s(divided(answers, batches)[0])
        usual_gap_s = self._answers_gap_s(answers, batches, hopeful=True)
        longest = self._chunks.longest(start)
        best, most = Reading(batches, min(longest or CHUNKS[0], CHUNKS[0])), -1.0
        for size in (size for size in _BESIDE if size <= longest):
            added_s = self._chunks.added_s(size, start)
            stage_s = tuple(map(sum, zip(usual_s, added_s, strict=True)))
            meeting_s = (batches - 1) * max(added_s)
            for crowd in range(batches, (self._stages if batches == 1 else batches) + 1):
                gap_s = self._gap_s([stage_s] * crowd)
                fits = gap_s <= MAX_STRETCH * usual_gap_s and gap_s + meeting_s <= MAX_MEETING * usual_gap_s
                if fits and crowd * size >= most * gap_s * (_WORTH_IT if crowd > best.batches else 1.0):
                    best, most = Reading(crowd, size), crowd * size / max(gap_s, _INSTANT_S)
        if longest and most < 0 and self._since_alone >= _REFRESH_CRAMPED:
            return Reading(batches, 0)
        return best

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
