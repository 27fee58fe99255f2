"""What the pace decides, by what comes of it in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafila.ring.pace import CHUNKS, MAX_BATCHES, MAX_MEETING, MAX_STRETCH, Pace
from kafila.types import Segment
from tests.ring.pipeline import Fixed, Pipeline

Cost = Callable[[int], float]


def linear(read_s: float, row_s: float) -> Cost:
    """A stage that reads its weights once a batch and computes for every row."""
    return lambda rows: read_s + row_s * rows


costs = st.builds(linear, st.sampled_from([0.001, 0.01, 0.03]), st.sampled_from([0.0, 0.0002, 0.003, 0.02]))


def tokens_per_s(pipeline: Pipeline, users: int) -> float:
    """In steady state, after a warm-up in which the pace has seen what there is to see."""
    for n in range(users):
        pipeline.ask(f"user {n}", 20, 400)
    pipeline.run(lambda: all(len(times) >= 60 for times in pipeline.tokens.values()))
    began = pipeline.now
    before = sum(map(len, pipeline.tokens.values()))
    pipeline.run(lambda: all(len(times) >= 140 for times in pipeline.tokens.values()))
    return (sum(map(len, pipeline.tokens.values())) - before) / (pipeline.now - began)


@settings(max_examples=12)
@given(st.lists(costs, min_size=1, max_size=4), st.sampled_from([0.0, 0.002, 0.05]), st.integers(1, 8))
def test_the_ring_yields_what_the_best_fixed_number_of_batches_would(
    stages: list[Cost], hop_s: float, users: int
) -> None:
    ours = tokens_per_s(Pipeline(Pace(len(stages)), stages, hop_s), users)
    fixed = [tokens_per_s(Pipeline(Fixed(m), stages, hop_s), users) for m in range(1, users + 1)]
    assert ours >= 0.9 * max(fixed)


def test_one_batch_where_reading_is_all_and_the_stages_differ() -> None:
    pipeline = Pipeline(Pace(2), [linear(0.03, 0), linear(0.002, 0)])
    assert tokens_per_s(pipeline, 4) == pytest.approx(4 / 0.032, rel=0.05)
    assert pipeline.pace.batches(4) == 1


def test_a_batch_a_stage_where_every_row_costs_the_same() -> None:
    pipeline = Pipeline(Pace(2), [linear(0, 0.01), linear(0, 0.01)])
    assert tokens_per_s(pipeline, 4) == pytest.approx(100, rel=0.05)
    assert pipeline.pace.batches(4) >= 2


def test_more_batches_than_stages_where_links_are_long_and_rows_cost() -> None:
    pipeline = Pipeline(Pace(2), [linear(0.0005, 0.01)] * 2, hop_s=0.05)
    tokens_per_s(pipeline, 6)
    assert pipeline.pace.batches(6) > 2


@pytest.mark.parametrize("users", [2, 4])
def test_stages_that_slow_one_another_work_in_turns_where_that_is_quicker(users: int) -> None:
    """What two batches took side by side says too much of one; it is tried, and kept."""
    stages = [linear(0.012, 0.001)] * 2
    turns, pipeline = Pipeline(Fixed(1), stages, shared=0.4), Pipeline(Pace(2), stages, shared=0.4)
    together = Pipeline(Fixed(2), stages, shared=0.4)
    best = max(tokens_per_s(turns, users), tokens_per_s(together, users))
    assert tokens_per_s(pipeline, users) >= 0.97 * best
    assert pipeline.pace.batches(users) == 1


def stretch(pipeline: Pipeline, users: int, prompt_tokens: int) -> float:
    """The longest gap of so many running answers while a prompt is read in, over their median gap before."""
    for n in range(users):
        pipeline.ask(f"user {n}", 20, 8000)
    pipeline.run(lambda: all(len(pipeline.tokens[f"user {n}"]) >= 40 for n in range(users)))
    began = pipeline.now
    pipeline.ask("long", prompt_tokens, 1)
    pipeline.run(lambda: "long" in pipeline.finished)
    worst = 0.0
    for n in range(users):
        times = pipeline.tokens[f"user {n}"]
        gaps = [(later, later - earlier) for earlier, later in pairwise(times[10:])]
        usual = median(gap for at, gap in gaps if at <= began)
        worst = max(worst, max(gap for at, gap in gaps if at > began) / usual)
    return worst


stages_of_any_kind = st.lists(
    st.builds(linear, st.sampled_from([0.005, 0.02]), st.sampled_from([0.0001, 0.001, 0.004])), min_size=1, max_size=4
)


@settings(max_examples=12)
@given(stages_of_any_kind, st.sampled_from([0.0, 0.005, 0.05]), st.integers(1, 3))
def test_a_long_prompt_stretches_the_gaps_of_running_answers_at_most_fourfold(
    stages: list[Cost], hop_s: float, users: int
) -> None:
    assert stretch(Pipeline(Pace(len(stages)), stages, hop_s), users, 2048) <= 4


@settings(max_examples=12)
@given(st.integers(1, 4), st.sampled_from([0.0, 2e-6, 4e-6]), st.sampled_from([0.0, 1e-6, 3e-6]), st.integers(1, 3))
def test_so_it_does_where_attention_costs_more_the_further_the_prompt_has_come(
    stages: int, read_s: float, pair_s: float, users: int
) -> None:
    pipeline = Pipeline(Pace(stages), [linear(0.013, 0.001)] * stages, read_s=read_s, pair_s=pair_s)
    assert stretch(pipeline, users, 2048) <= (3.0 if users == 1 else 3.6)


def test_what_chunks_from_the_beginning_of_prompts_cost_misleads_nobody_at_the_end_of_one() -> None:
    pipeline = Pipeline(Pace(2), [linear(0.013, 0.001)] * 2, read_s=4e-6, pair_s=1e-6)
    for n, tokens in enumerate([1024, 1024, 12, 24, 48, 96, 192]):  # long chunks, and middling ones, at small places
        pipeline.ask(f"early {n}", tokens, 1)
        pipeline.run()
    assert stretch(pipeline, 1, 2048) <= MAX_STRETCH + 0.2


def test_a_prompt_is_read_in_even_where_no_chunk_fits() -> None:
    """One token of it costs more than the answers may be kept waiting for."""
    pipeline = Pipeline(Pace(2), [linear(0.005, 0.05)] * 2)
    pipeline.ask("talking", 20, 8000)
    pipeline.run(lambda: len(pipeline.tokens["talking"]) >= 40)
    began = pipeline.now
    pipeline.ask("long", 400, 1)
    pipeline.run(lambda: "long" in pipeline.finished)
    assert pipeline.finished["long"] - began <= 2 * 400 * 2 * (0.005 + 0.05 * 2)


def test_a_machine_that_slows_down_for_good_goes_on_reading_as_fast_as_it_can() -> None:
    slow = 1.0

    def stage(rows: int) -> float:
        return slow * (0.013 + 0.001 * rows)

    pipeline = Pipeline(Pace(2), [stage] * 2)
    pipeline.ask("talking", 20, 8000)
    pipeline.run(lambda: len(pipeline.tokens["talking"]) >= 40)
    began = pipeline.now
    pipeline.ask("quick", 2048, 1)
    pipeline.run(lambda: "quick" in pipeline.finished)
    quick_s, slow = pipeline.now - began, 4.0
    began = pipeline.now
    pipeline.ask("slow", 2048, 1)
    pipeline.run(lambda: "slow" in pipeline.finished)
    assert pipeline.now - began <= 1.5 * 4 * quick_s


@pytest.mark.parametrize("row_s", [0.0001, 0.0005, 0.002])
def test_a_prompt_on_two_stages_is_read_almost_twice_as_fast_as_on_one(row_s: float) -> None:
    one = Pipeline(Pace(1), [linear(0.026, 2 * row_s)])
    two = Pipeline(Pace(2), [linear(0.013, row_s)] * 2, hop_s=0.0005)
    first_token: dict[int, float] = {}
    for pipeline in (one, two):
        pipeline.ask("warm", 30, 30)
        pipeline.run()
        for n in range(3):  # the first long prompts teach what long chunks cost
            began = pipeline.now
            pipeline.ask(f"long {n}", 1024, 1)
            pipeline.run()
            first_token[len(pipeline.stage_s)] = pipeline.finished[f"long {n}"] - began
    # Chunks on their way through two stages take one chunk's time more than they keep a stage busy.
    best = min((-(-1024 // size) + 1) * (0.013 + row_s * size) for size in CHUNKS)
    assert first_token[2] <= 1.05 * best
    assert first_token[2] < 0.8 * first_token[1]


segments_of_any_kind = st.lists(
    st.builds(Segment, st.just(0), st.integers(0, 4000), st.integers(1, 600), st.booleans()), min_size=1, max_size=4
)


@given(
    st.lists(
        st.tuples(segments_of_any_kind, st.lists(st.floats(0, 10), min_size=3, max_size=3), st.floats(0, 40)),
        max_size=60,
    ),
    st.integers(0, 40),
    st.integers(1, 5000),
    st.integers(0, 5000),
)
def test_whatever_was_measured_the_decisions_can_be_followed(
    seen: list[tuple[list[Segment], list[float], float]], answers: int, prompt_tokens: int, start: int
) -> None:
    pace = Pace(3)
    for segments, stage_s, circuit_s in seen:
        pace.record(segments, stage_s, circuit_s)
    batches, (crowd, tokens) = pace.batches(answers), pace.reading(answers, prompt_tokens, start)
    assert 1 <= batches <= max(1, min(answers, MAX_BATCHES))
    assert crowd >= batches
    assert 0 <= tokens <= CHUNKS[-1]
    assert tokens or answers
    assert MAX_STRETCH < MAX_MEETING < 4
