"""A draw that two members share (pure).

Where the plan divides the vocabulary, the ring's last member holds the unembedding's last rows, too. It has the final
hidden row before the head does; so both score at the same time, each its own rows, and the head takes the better of two
tokens in the place of reading the whole matrix while the others idle.

That is the same token only where the largest logit decides: greedily, with nothing added to logits and no logarithms of
probabilities wanted, which take the whole row's sum. And it is a gain only while no other batch is on its way: with
several, the last member's time for scoring would be taken from the next batch's blocks, while the head scores anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kafila.errors import ModelError, ProtocolError
from kafila.ring.schedule import Batch
from kafila.shard.config import parse_config
from kafila.shard.worker import Sampled
from kafila.types import Best, Sampling, scored_from


def vocabulary_of(config: str) -> int:
    """Rows of the vocabulary by a checkpoint's config.json; 0 where it does not say (a simulated model's)."""
    try:
        return parse_config(config).vocab
    except ModelError:
        return 0


def is_shared(batch: Batch, on_their_way: int) -> bool:
    """Whether two may draw for this batch, one of so many on their way."""
    alone = on_their_way == 1
    return alone and is_decode(batch) and all(map(_largest_decides, batch.sampling))


def is_decode(batch: Batch) -> bool:
    """Whether the batch brings everybody in it the next token, and no prompt."""
    return all(segment.length == 1 and segment.sample for segment in batch.segments)


def _largest_decides(sampling: Sampling) -> bool:
    others = sampling.looks_back or sampling.logit_bias or sampling.logprobs
    return sampling.temperature <= 0 and not others


@dataclass(slots=True)
class SharedDraw:
    """The two halves of one batch's draw, which come in either order: the head's from its worker, the last member's
    over the link."""

    rows: range
    """The last member's, of the vocabulary; empty where that is not known."""
    sampled: Sampled | None = None
    best: tuple[Best, ...] = ()

    @classmethod
    def of(cls, vocab: int, percent: int) -> SharedDraw:
        """For a vocabulary of so many rows (0: not known), of whose last ``percent`` the other half comes."""
        return cls(range(scored_from(vocab, percent), vocab))

    def scored(self, best: Sequence[Best], batch: Batch) -> None:
        """The last member's half. Raises ProtocolError where it came already, or cannot be this batch's."""
        if self.best:
            raise ProtocolError("scores of one batch came twice")
        if len(best) != len(batch.segments):
            raise ProtocolError(f"{len(best)} scores came for {len(batch.segments)} requests")
        if self.rows and not all(one.token in self.rows for one in best):
            raise ProtocolError("a score is of a token that the last member does not score")
        self.best = tuple(best)

    def whole(self) -> Sampled | None:
        """The head's result with each request's better token; None until both halves are there."""
        if self.sampled is None or not self.best:
            return None
        pairs = zip(self.sampled.best, self.best, strict=True)
        return replace(self.sampled, tokens=tuple(better(*pair).token for pair in pairs), best=())


def better(one: Best, other: Best) -> Best:
    """The larger logit, and of equal ones the lower token: what the whole matrix would have given."""
    return min(one, other, key=lambda best: (-best.logit, best.token))
