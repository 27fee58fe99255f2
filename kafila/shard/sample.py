"""Drawing the next token from logits.

The randomness of a draw is a function of the request's seed and the token's position alone: no generator is kept, so a
draw does not depend on what else shares its batch, and drawing from the same logits again gives the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kafila.errors import DeviceError
from kafila.shard.worker import Draws
from kafila.types import Best, History, Sampling, Segment, TokenLogprobs

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
Probabilities = npt.NDArray[np.float64]

NO_HISTORY = History()
LEAST_LOGPROB = -9999.0
"""Stands for a probability of 0, which has no logarithm that JSON can write; OpenAI's interface writes the same."""
_STREAM = 0x6B6166696C61
"""The second word of the generator's key ("kafila" in ASCII): our draws are no other program's for the same seed."""


def draw_all(
    logits: Logits, segments: Sequence[Segment], sampling: Sequence[Sampling], histories: Sequence[History] = ()
) -> Draws:
    """A token after each segment that wants one, from ``logits`` of shape (segments that want one, vocab)."""
    tokens: list[int | None] = []
    logprobs: list[TokenLogprobs | None] = []
    rows = iter(logits)
    for at, (segment, how) in enumerate(zip(segments, sampling, strict=True)):
        if not segment.sample:
            tokens.append(None)
            logprobs.append(None)
            continue
        row = next(rows)
        token = draw(row, how, segment.start + segment.length, histories[at] if histories else NO_HISTORY)
        tokens.append(token)
        logprobs.append(logprobs_of(row, token, how.logprobs) if how.logprobs else None)
    return Draws(tuple(tokens), tuple(logprobs) if any(logprobs) else ())


def draw(logits: Logits, sampling: Sampling, position: int, history: History = NO_HISTORY) -> int:
    """The token for ``position`` (tokens before it in its sequence, at least 0), from ``logits`` of shape (vocab,).

    Penalties and biases come first. Temperature 0 then takes the largest logit, the lowest id where several are
    largest. Raises `DeviceError` where the largest logit is not a finite number, which only a fault in the model's
    arithmetic produces.
    """
    _check(logits)
    if sampling.looks_back or sampling.logit_bias:
        logits = adjusted(logits, sampling, history)
    if sampling.temperature <= 0:
        return int(np.argmax(logits))
    ids, probabilities = distribution(logits, sampling)
    cumulative = np.cumsum(probabilities)
    # Rounding leaves the sum a little off 1; kept below it, the point always falls on a token that has a share.
    total = cumulative[-1]
    point = min(uniform(sampling.seed, position) * total, np.nextafter(total, 0))
    return int(ids[np.searchsorted(cumulative, point, side="right")])


def best_of(logits: Logits, first: int = 0) -> tuple[Best, ...]:
    """The likeliest token of each row of ``logits`` (rows, some of the vocabulary from the id ``first`` on). Raises
    `DeviceError` as `draw` does."""
    found = []
    for row in logits:
        _check(row)
        at = int(np.argmax(row))
        found.append(Best(float(row[at]), first + at))
    return tuple(found)


def adjusted(logits: Logits, sampling: Sampling, history: History) -> Logits:
    """A copy of ``logits`` with penalties and biases; ids beyond the vocabulary are passed over.

    The repetition penalty is that of Keskar et al. (CTRL, 2019) as Hugging Face applies it, to prompt and answer alike;
    presence and frequency penalties are OpenAI's, which count the answer alone.
    """
    logits = logits.copy()
    if sampling.repetition_penalty != 1:
        seen = _known(np.unique(np.array(history.prompt + history.answer, dtype=np.intp)), logits)
        penalty = np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, counts = np.unique(np.array(history.answer, dtype=np.intp), return_counts=True)
        ids, counts = _known(ids, logits), counts[ids < len(logits)]
        logits[ids] -= (sampling.presence_penalty + sampling.frequency_penalty * counts).astype(np.float32)
    for token, bias in sampling.logit_bias:
        if 0 <= token < len(logits):
            logits[token] += np.float32(bias)
    return logits


def logprobs_of(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """``token`` and the ``count`` likeliest tokens, lowest ids first among equals, by the model's own ``logits``."""
    shifted = logits.astype(np.float64) - np.max(logits)
    logprobs = shifted - np.log(np.sum(np.exp(shifted)))
    likeliest = _top_k(logits, count)
    likeliest = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]
    top = tuple((int(i), max(float(logprobs[i]), LEAST_LOGPROB)) for i in likeliest)
    return TokenLogprobs(token, max(float(logprobs[token]), LEAST_LOGPROB), top)


def distribution(logits: Logits, sampling: Sampling) -> tuple[Ids, Probabilities]:
    """The tokens that ``sampling`` leaves, ids ascending, and the probability of each; ``temperature`` is above 0.

    Temperature comes first, then top-k, top-p and min-p, each on what the one before it left, renormalised: the order
    of Hugging Face's `generate`. Where tokens are equally probable the lower ids stay. One token at least stays.
    """
    ids = _top_k(logits, sampling.top_k)
    probabilities = _softmax(logits[ids], sampling.temperature)
    if sampling.top_p < 1:
        ids, probabilities = _only(_top_p(probabilities, sampling.top_p), ids, probabilities)
    if sampling.min_p > 0:
        ids, probabilities = _only(_min_p(probabilities, sampling.min_p), ids, probabilities)
    return ids, probabilities


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53: the counter-based generator Philox4x64-10 (Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3", SC 2011) with the seed in its key and the position in its counter."""
    word_mask = 2**64 - 1
    key = np.array([seed & word_mask, _STREAM], dtype=np.uint64)
    # The lowest word counts blocks within a position, so that no two positions ever share a block.
    counter = np.array([0, position & word_mask, 0, 0], dtype=np.uint64)
    return float(int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53


def _check(logits: Logits) -> None:
    if not np.isfinite(np.max(logits)):
        raise DeviceError("the model's output is not a number: its weights or a member's device are faulty")


def _known(ids: Ids, logits: Logits) -> Ids:
    return ids[ids < len(logits)]


def _only(chosen: Ids, ids: Ids, probabilities: Probabilities) -> tuple[Ids, Probabilities]:
    kept = probabilities[chosen]
    return ids[chosen], kept / kept.sum()


def _softmax(logits: Logits, temperature: float) -> Probabilities:
    with np.errstate(over="ignore"):  # a tiny temperature sends the others to -inf, whose exponential is rightly 0
        weights = np.exp((logits.astype(np.float64) - np.max(logits)) / temperature)
    return np.asarray(weights / weights.sum())


def _top_k(logits: Logits, k: int) -> Ids:
    """The ids of the ``k`` largest logits, ascending; all of them where ``k`` is 0."""
    if not 0 < k < len(logits):
        return np.arange(len(logits))
    smallest_kept = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > smallest_kept)
    ties = np.flatnonzero(logits == smallest_kept)
    return np.sort(np.concatenate([above, ties[: k - len(above)]]))


def _top_p(probabilities: Probabilities, p: float) -> Ids:
    """Indices, ascending, of the fewest most probable tokens whose probabilities sum to at least ``p``."""
    # Tokens below this sum to at most 1 - p, so the rest hold the answer: a few hundred to sort in place of 100,000.
    candidates = np.flatnonzero(probabilities >= (1 - p) / len(probabilities))
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1
    return np.sort(order[:enough])


def _min_p(probabilities: Probabilities, share: float) -> Ids:
    """Indices, ascending, of the tokens at least ``share`` times as probable as the most probable one."""
    return np.flatnonzero(probabilities >= min(share, 1.0) * probabilities.max())
