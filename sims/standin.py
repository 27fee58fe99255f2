"""An exact stand-in for a shard: integer arithmetic whose every result depends on the whole history of its slot.

A row of hidden numbers is one float32 that holds an integer below 2**20 exactly. A stage adds up what its cache holds
before each row, so a wrong slot, a wrong position, a lost, doubled or reordered row changes everything after it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from itertools import accumulate

from kafila.errors import ModelError
from kafila.shard.worker import Forward, Forwarded, Job, Result, Sample, Sampled, Score, Scored
from kafila.types import Best, History, Question, Sampling, Segment, TokenLogprobs

PRIME = 1_048_573
"""The largest prime below 2**20: sums stay exact in a float32."""
STOP_ID = 0
WORDS = ["stop", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"]
VOCABULARY = len(WORDS)


def pack(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def unpack(data: bytes) -> list[int]:
    return [round(number) for number in struct.unpack(f"<{len(data) // 4}f", data)]


def choose(hidden: int, sampling: Sampling, position: int, history: History) -> int:
    """The next token: greedy depends on the hidden number alone, sampling on seed and position too; with a penalty, on
    where the prompt ends and on every token of the answer."""
    if sampling.looks_back:
        hidden = (hidden + len(history.prompt) + sum(at * token for at, token in enumerate(history.answer, 2))) % PRIME
    if sampling.temperature == 0:
        return hidden % VOCABULARY
    return random.Random(f"{hidden} {sampling.seed} {position}").randrange(VOCABULARY)


def best_of(rows: range, token: int) -> Best:
    """The likeliest of some rows of the vocabulary where ``token`` is the likeliest of all: what comes after it, round
    the vocabulary, is ever less likely."""
    return max((Best(-float((row - token) % VOCABULARY), row) for row in rows), key=lambda best: best.logit)


class StandInShard:
    """One member's blocks, and the head's sampling. ``percent`` of the vocabulary's last rows are the last member's to
    score, at least one."""

    def __init__(self, salt: int, percent: int = 0) -> None:
        self._salt = salt
        self._cut = VOCABULARY - max(VOCABULARY * percent // 100, percent > 0)
        self._caches: dict[int, list[int]] = {}

    def do(self, job: Job) -> Result:
        """What comes of a job."""
        match job:
            case Sample():
                tokens = self._sample(job)
                if not job.partial:
                    return Sampled(job.batch, tokens, 1e-4, tuple(map(_logprobs, tokens, job.sampling)))
                best = _best(range(self._cut), tokens)
                return Sampled(job.batch, tuple(one.token for one in best), 1e-4, best=best)
            case Score():
                sampling = (Sampling(),) * len(job.segments)
                tokens = self._sample(Sample(job.batch, job.segments, sampling, job.hidden, job.dtype))
                return Scored(job.batch, _best(range(self._cut, VOCABULARY), tokens), 1e-4)
            case Forward():
                rows = list(job.tokens) if job.tokens is not None else unpack(job.hidden or b"")
                out = self._forward(job.segments, rows)
                if job.last_only:
                    out = [out[end - 1] for end in accumulate(segment.length for segment in job.segments)]
                return Forwarded(job.batch, pack(out), job.dtype, 1e-3)

    def _forward(self, segments: Sequence[Segment], rows: list[int]) -> list[int]:
        _check(segments, rows)
        out: list[int] = []
        for segment in segments:
            cache = self._caches.setdefault(segment.slot, [])
            if segment.start > len(cache):
                raise RuntimeError("the cache lacks what the scheduler counts on")
            del cache[segment.start :]
            for row in rows[: segment.length]:
                cache.append(row)
                out.append((sum(cache) * 31 + len(cache) * self._salt) % PRIME)
            del rows[: segment.length]
        return out

    def _sample(self, job: Sample) -> tuple[int | None, ...]:
        rows = unpack(job.hidden)
        _check(job.segments, rows)
        tokens: list[int | None] = []
        at = 0
        histories = job.histories or (History(),) * len(job.segments)
        for segment, sampling, history in zip(job.segments, job.sampling, histories, strict=True):
            at += segment.length
            position = segment.start + segment.length
            tokens.append(choose(rows[at - 1], sampling, position, history) if segment.sample else None)
        return tuple(tokens)


def _check(segments: Sequence[Segment], rows: Sequence[int]) -> None:
    if sum(segment.length for segment in segments) != len(rows):
        raise RuntimeError("a batch came with other rows than its segments have")


def _best(rows: range, tokens: Sequence[int | None]) -> tuple[Best, ...]:
    return tuple(best_of(rows, token) for token in tokens if token is not None)


def _logprobs(token: int | None, sampling: Sampling) -> TokenLogprobs | None:
    """As many likeliest tokens as were asked for; all numbers tell of the token alone."""
    if token is None or not sampling.logprobs:
        return None
    return TokenLogprobs(token, -float(token), tuple((token, -float(n)) for n in range(sampling.logprobs)))


def solo_tokens(
    prompt: Sequence[int], salts: Sequence[int], sampling: Sampling, max_tokens: int, context: int
) -> list[int]:
    """What a request must yield, computed without scheduler, frames or ring; one salt a member."""
    tokens, answer = list(prompt), list[int]()
    while True:
        shards = [StandInShard(salt) for salt in salts]
        token = _next_token(shards, History(tuple(prompt), tuple(answer)), sampling)
        if token == STOP_ID:
            return answer
        tokens.append(token)
        answer.append(token)
        if len(answer) == max_tokens or len(tokens) >= context:
            return answer


def _next_token(shards: Sequence[StandInShard], history: History, sampling: Sampling) -> int:
    """The token after all of ``history``, computed anew by shards with empty caches."""
    tokens = history.prompt + history.answer
    segment = Segment(0, 0, len(tokens), True)
    jobs = [Forward(0, (segment,), tokens, None, "float32")]
    for shard in shards:
        result = shard.do(jobs[-1])
        if not isinstance(result, Forwarded):
            raise TypeError("a stand-in shard answered a forward job with something else")
        jobs.append(Forward(0, (segment,), None, result.hidden, "float32"))
    drawn = shards[0].do(Sample(0, (segment,), (sampling,), jobs[-1].hidden or b"", "float32", (history,)))
    if not isinstance(drawn, Sampled) or drawn.tokens[0] is None:
        raise TypeError("a stand-in shard answered a sample job with something else")
    return drawn.tokens[0]


class Letters:
    """A language whose tokens are the words of the message and whose text is one letter a token."""

    stop_ids = frozenset({STOP_ID})

    def prompt(self, question: Question) -> list[int]:
        words = [word for message in question.messages for word in message.content.split()]
        if not words:
            raise ModelError("nothing was asked")
        return [WORDS.index(word) for word in words]

    def opening(self, prompt: Sequence[int]) -> str:  # noqa: ARG002  - a language's
        return ""

    def spell(self, token: int) -> bytes:
        return WORDS[token].encode()

    def stream(self, stop: Sequence[str]) -> LetterStream:
        return LetterStream(set(stop))


class LetterStream:
    def __init__(self, stop: set[str]) -> None:
        self._stop = stop
        self.stopped = False

    def feed(self, token: int) -> str:
        self.stopped |= WORDS[token] in self._stop
        return "" if self.stopped else WORDS[token]

    def finish(self) -> str:
        return ""
