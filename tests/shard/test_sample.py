from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kafila.errors import DeviceError
from kafila.shard.sample import LEAST_LOGPROB, adjusted, best_of, distribution, draw, draw_all, logprobs_of, uniform
from kafila.types import Best, History, Sampling, Segment

Logits = npt.NDArray[np.float32]

# Few distinct values, so that ties are common; -inf is a token masked out.
LOGITS = hnp.arrays(
    np.float32,
    st.integers(1, 30),
    elements=st.sampled_from([-np.inf, -30.0, -2.5, -1.0, 0.0, 0.25, 1.0, 3.0, 20.0]),
).filter(lambda logits: bool(np.isfinite(logits).any()))
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([1e-300, 0.1, 0.7, 1.0, 2.0, 1e6]),
    top_k=st.integers(0, 35),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**70), 2**70),
)


def as_logits(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def plain_distribution(logits: Logits, sampling: Sampling) -> dict[int, float]:
    """The definition, a token at a time and nothing shared with the implementation."""
    scaled = [(float(logit) - float(max(logits))) / sampling.temperature for logit in logits]
    weight = {token: float(np.exp(value)) for token, value in enumerate(scaled)}
    ranked = sorted(weight, key=lambda token: (-float(logits[token]), token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1:
        total = sum(weight[token] for token in ranked)
        kept, mass = [], 0.0
        for token in sorted(ranked, key=lambda token: (-weight[token], token)):
            kept.append(token)
            mass += weight[token] / total
            if mass >= sampling.top_p:
                break
        ranked = kept
    ranked = [token for token in ranked if weight[token] >= sampling.min_p * weight[ranked[0]]]
    total = sum(weight[token] for token in ranked)
    return {token: weight[token] / total for token in ranked}


@given(LOGITS, st.integers(0, 1000))
def test_greedy_takes_the_lowest_of_the_largest(logits: Logits, position: int) -> None:
    chosen = draw(logits, Sampling(), position)
    assert logits[chosen] == logits.max()
    assert (logits[:chosen] < logits[chosen]).all()


@given(LOGITS, SAMPLINGS)
def test_the_distribution_is_the_definition(logits: Logits, sampling: Sampling) -> None:
    ids, probabilities = distribution(logits, sampling)
    expected = plain_distribution(logits, sampling)
    positive = {int(token): float(p) for token, p in zip(ids, probabilities, strict=True) if p > 0}
    # A cumulative sum that meets top_p exactly may be rounded to either side of it; the values make that rare, and
    # then the two differ by one token of at most the smallest kept probability.
    if positive.keys() == {token for token, p in expected.items() if p > 0}:
        assert positive == pytest.approx({token: p for token, p in expected.items() if p > 0}, rel=1e-9)
    else:
        assert sampling.top_p < 1
        assert abs(len(ids) - len(expected)) == 1
    assert list(ids) == sorted(set(ids.tolist()))


@given(LOGITS, SAMPLINGS, st.integers(0, 2**40))
def test_a_draw_is_repeatable_and_possible(logits: Logits, sampling: Sampling, position: int) -> None:
    chosen = draw(logits, sampling, position)
    assert chosen == draw(logits.copy(), replace(sampling), position)
    ids, probabilities = distribution(logits, sampling)
    assert probabilities[list(ids).index(chosen)] > 0


@given(LOGITS, SAMPLINGS)
def test_the_most_probable_token_always_stays(logits: Logits, sampling: Sampling) -> None:
    ids, _ = distribution(logits, sampling)
    assert logits[ids].max() == logits.max()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.5, seed=2),
        Sampling(temperature=1.5, top_k=3, seed=3),
        Sampling(temperature=1.0, top_p=0.8, seed=4),
        Sampling(temperature=1.0, min_p=0.2, seed=5),
        Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=6),
    ],
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_frequencies_are_the_probabilities(sampling: Sampling, over: str) -> None:
    logits = as_logits(0.3, 2.0, -np.inf, 1.0, 1.0, -1.0, 0.0)
    draws = 4000
    counts = np.zeros(len(logits))
    for number in range(draws):
        if over == "positions":
            counts[draw(logits, sampling, number)] += 1
        else:
            counts[draw(logits, replace(sampling, seed=number), 17)] += 1
    expected = plain_distribution(logits, sampling)
    for token, count in enumerate(counts):
        p = expected.get(token, 0.0)
        # Seeds are fixed, so this holds always or never; five standard deviations is the size of an honest error.
        assert abs(count - draws * p) <= 5 * np.sqrt(draws * p * (1 - p))


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    grid = np.array([[uniform(seed, position) for position in range(60)] for seed in range(60)])
    assert len(np.unique(grid)) == grid.size
    bound = 5 / np.sqrt(grid.size)
    for shifted in (np.roll(grid, 1, axis=0), np.roll(grid, 1, axis=1)):
        assert abs(np.corrcoef(grid.ravel(), shifted.ravel())[0, 1]) < bound
    assert abs(grid.mean() - 0.5) < bound


def test_the_stream_stays_what_it_is() -> None:
    """A seed a person wrote down gives the same answer in the next release."""
    assert [uniform(0, 0), uniform(1, 2), uniform(2, 1)] == [
        0.8944747447011102,
        0.06638739106650182,
        0.17213913334682795,
    ]


@pytest.mark.parametrize(("point", "expected"), [(0.0, 1), (1 - 2.0**-53, 3)])
def test_tokens_without_a_share_are_not_drawn_at_the_ends(
    monkeypatch: pytest.MonkeyPatch, point: float, expected: int
) -> None:
    monkeypatch.setattr("kafila.shard.sample.uniform", lambda seed, position: point)
    assert draw(as_logits(-np.inf, 1, 1, 1, -np.inf), Sampling(temperature=1.0), 0) == expected


def test_ties_at_the_edge_of_top_k_keep_the_lower_ids() -> None:
    ids, _ = distribution(as_logits(1, 2, 1, 2, 1), Sampling(temperature=1.0, top_k=3))
    assert ids.tolist() == [0, 1, 3]


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    ids, probabilities = distribution(logits, Sampling(temperature=1.0, top_p=0.7))
    assert ids.tolist() == [0, 1]
    assert probabilities == pytest.approx([2 / 3, 1 / 3], rel=1e-6)


@pytest.mark.parametrize("logits", [as_logits(0, np.nan), as_logits(np.inf, 0), as_logits(-np.inf, -np.inf)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(logits: Logits, temperature: float) -> None:
    with pytest.raises(DeviceError, match="not a number"):
        draw(logits, Sampling(temperature=temperature), 0)


TOKENS = st.lists(st.integers(0, 40), max_size=12).map(tuple)


@given(LOGITS, TOKENS, TOKENS, st.sampled_from([0.5, 1.3, 2.0]))
def test_the_repetition_penalty_is_that_of_transformers(
    logits: Logits, prompt: tuple[int, ...], answer: tuple[int, ...], penalty: float
) -> None:
    ours = adjusted(logits, Sampling(repetition_penalty=penalty), History(prompt, answer))
    known = [token for token in (*prompt, *answer) if token < len(logits)]  # transformers wants ids of the vocabulary
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    theirs = processor(torch.tensor([known], dtype=torch.int64), torch.from_numpy(logits.copy())[None])
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6)


@given(LOGITS, TOKENS, TOKENS, st.sampled_from([-1.0, 0.0, 0.5]), st.sampled_from([-0.25, 0.0, 1.0]))
def test_presence_and_frequency_count_the_answer_alone(
    logits: Logits, prompt: tuple[int, ...], answer: tuple[int, ...], presence: float, frequency: float
) -> None:
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    expected = [
        logit - presence * (token in answer) - frequency * answer.count(token) for token, logit in enumerate(logits)
    ]
    np.testing.assert_allclose(adjusted(logits, sampling, History(prompt, answer)), expected, rtol=1e-6)


def test_a_bias_decides_and_leaves_the_logits_as_they_were() -> None:
    logits = as_logits(1, 2, 3)
    assert draw(logits, Sampling(logit_bias=((0, 100.0), (99, 1000.0), (-1, 1000.0))), 0) == 0
    assert logits.tolist() == [1, 2, 3]


@given(LOGITS, st.integers(1, 20))
def test_logprobs_are_the_models_own(logits: Logits, count: int) -> None:
    told = logprobs_of(logits, 0, count)
    reference = torch.log_softmax(torch.from_numpy(logits).double(), 0).clamp(min=LEAST_LOGPROB)
    assert told.logprob == pytest.approx(float(reference[0]))
    assert len(told.top) == min(count, len(logits))
    likeliest = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    assert [token for token, _ in told.top] == likeliest[:count]
    for token, logprob in told.top:
        assert logprob == pytest.approx(float(reference[token]))


def test_each_segment_draws_by_its_own_sampling_and_history() -> None:
    segments = (Segment(0, 3, 1, True), Segment(1, 0, 5, False), Segment(2, 7, 1, True))
    sampling = (Sampling(presence_penalty=5.0), Sampling(), Sampling(logprobs=1, presence_penalty=5.0))
    histories = (History((1,), (2,)), History(), History((2,), (1,)))
    draws = draw_all(np.array([[0, 1, 2]] * 2, dtype=np.float32), segments, sampling, histories)
    assert draws.tokens == (1, None, 2)
    first, second, third = draws.logprobs
    assert (first, second) == (None, None)
    assert third is not None
    assert third.token == third.top[0][0] == 2


@given(logits=LOGITS, data=st.data())
def test_the_better_of_two_parts_is_what_the_whole_draws(logits: Logits, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, max(1, len(logits) - 1)))
    parts = [(logits[:cut], 0), (logits[cut:], cut)]
    found = [best for part, first in parts if np.isfinite(part).any() for best in best_of(part[None], first)]
    assert all(logits[best.token] == np.float32(best.logit) == best.logit for best in found)
    assert min(found, key=lambda best: (-best.logit, best.token)).token == draw(logits, Sampling(), 0)


def test_the_best_of_rows_is_one_a_row() -> None:
    assert best_of(np.stack([as_logits(1, 3, 3), as_logits(0.1, -1, 0)]), 64) == (
        Best(3.0, 65),
        Best(float(np.float32(0.1)), 64),
    )


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_the_best_of_what_is_no_number_is_refused_as_a_draw_is(wrong: float) -> None:
    with pytest.raises(DeviceError, match="not a number"):
        best_of(np.stack([as_logits(1, 2), as_logits(0, wrong)]))
