"""Rings of shards in one process: what the ring does, without the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import Any

from kafila.shard.decoder import Shard
from kafila.shard.load import load_shard
from kafila.shard.manifest import open_checkpoint
from kafila.shard.schemes import with_scheme
from kafila.types import Best, BlockRange, Sampling, Segment, last_rows
from tests.shard.backends import make_ops

GREEDY = Sampling()


class LocalRing:
    """Shards of ``counts`` blocks each, on ``backends`` in turn, the first with the head; ``quantize``: a scheme;
    ``scored_percent`` and ``spare_bytes``: as in `kafila.backend.Duty`, the former of the first and the last."""

    def __init__(
        self,
        folder: Path,
        counts: Sequence[int],
        *,
        dtype: str = "float32",
        slots: int = 3,
        context: int = 128,
        backends: Sequence[str] = ("torch",),
        quantize: str = "",
        scored_percent: int = 0,
        spare_bytes: int = 0,
    ) -> None:
        checkpoint = open_checkpoint(folder)
        checkpoint = replace(checkpoint, config=with_scheme(checkpoint.config, quantize))
        self.dtype = dtype
        self.config = checkpoint.config
        self.shards: list[Shard[Any]] = [
            load_shard(
                make_ops(backend, dtype),
                checkpoint,
                BlockRange(first, stop),
                holds_head=first == 0,
                slots=slots,
                context=context,
                scored_percent=scored_percent if 0 in (first, self.config.blocks - stop) else 0,
                spare_bytes=spare_bytes,
            )
            for (first, stop), backend in zip(pairwise(accumulate(counts, initial=0)), cycle(backends), strict=False)
        ]

    def forward(self, segments: Sequence[Segment], tokens: Sequence[int], *, last_only: bool = False) -> bytes:
        """Once round: the rows after the last block."""
        given: Sequence[int] | None = tokens
        hidden: bytes | None = None
        for shard in self.shards:
            last = last_only and shard is self.shards[-1]
            given, hidden = None, shard.forward(segments, given, hidden, self.dtype, last_only=last)
        assert hidden is not None
        return hidden

    def step(
        self, segments: Sequence[Segment], tokens: Sequence[int], sampling: Sampling = GREEDY
    ) -> tuple[int | None, ...]:
        """Once round, and a token for each segment that wants one."""
        hidden = self.forward(segments, tokens, last_only=True)
        return self.shards[0].sample(last_rows(tuple(segments)), [sampling] * len(segments), hidden, self.dtype).tokens

    def parts(self, segments: Sequence[Segment], hidden: bytes) -> list[tuple[Best, Best]]:
        """After `forward`, by segment that wants a token: the best of the head's rows and of the others."""
        own = self.shards[0].sample_part(segments, hidden, self.dtype)
        return list(zip(own, self.shards[-1].score(segments, hidden, self.dtype), strict=True))

    def divided_answer(self, prompt: Sequence[int], count: int) -> tuple[list[int], set[int]]:
        """``count`` greedy tokens, each the better of two, and whose they were: 0 the head's, 1 the last member's."""
        answer, winners = [self.prefill(prompt)], set()
        while len(answer) < count:
            segments = [Segment(0, len(prompt) + len(answer) - 1, 1, sample=True)]
            (parts,) = self.parts(segments, self.forward(segments, answer[-1:]))
            winners.add(int(parts[1].logit > parts[0].logit))
            answer.append(better(*parts))
        return answer, winners

    def prefill(self, prompt: Sequence[int], *, slot: int = 0, chunk: int | None = None) -> int:
        """The prompt in chunks of ``chunk`` tokens (None: one), and the first token of the answer."""
        size = chunk or len(prompt)
        token: int | None = None
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            last = start + len(part) == len(prompt)
            (token,) = self.step([Segment(slot, start, len(part), last)], part)
        assert token is not None
        return token

    def answer(self, prompt: Sequence[int], count: int, *, slot: int = 0, chunk: int | None = None) -> list[int]:
        """``count`` greedy tokens."""
        answer = [self.prefill(prompt, slot=slot, chunk=chunk)]
        while len(answer) < count:
            position = len(prompt) + len(answer) - 1
            (token,) = self.step([Segment(slot, position, 1, sample=True)], answer[-1:])
            assert token is not None
            answer.append(token)
        return answer


def better(one: Best, other: Best) -> int:
    """The token with the larger logit, the lower of two that are alike."""
    return min((one, other), key=lambda best: (-best.logit, best.token)).token


PROMPT = [5, 17, 99, 3, 3, 120, 64, 8, 1, 77, 2, 41, 30]
OTHERS = [[9, 8, 7], [100, 1, 50, 51, 52, 53, 20]]
SPLITS = [(4,), (1, 3), (2, 1, 1), (1, 1, 1, 1)]


def assert_every_ring_answers(folder: Path, backends: Sequence[str], expected: Sequence[int]) -> None:
    """Rings of one to four members over four blocks give these tokens to `PROMPT`."""
    assert len(set(expected)) > 4, "an answer that repeats itself tests little"
    # MLX's CPU build is slow, and a split is no business of a backend's: half of them each.
    for counts in SPLITS if backends == ("torch",) else SPLITS[len(backends) - 1 :: 2]:
        assert LocalRing(folder, counts, backends=backends).answer(PROMPT, len(expected)) == expected, counts
