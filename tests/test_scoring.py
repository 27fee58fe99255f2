"""A draw that two members share: which draws are, both orders of its halves, and halves that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import DeviceError, ProtocolError
from kafila.ring.frames import (
    Activation,
    Scores,
    decode_activation,
    decode_scores,
    encode_activation,
    encode_scores,
    is_scores,
)
from kafila.ring.pace import Pace
from kafila.ring.schedule import Batch
from kafila.scoring import SharedDraw, better, is_shared, vocabulary_of
from kafila.serve import Broken, Send, Stage
from kafila.shard.worker import Failed, Forward, Forwarded, Job, Result, Sample, Sampled, Score, Scored
from kafila.types import Best, FinishReason, Sampling, Segment, scored_from
from tests.standin import StandInShard
from tests.test_serve import SLOTS, Ring, ask, solo

PERCENT = 50
WORDS_ASKED = "c d e"


class Noting(StandInShard):
    """Remembers its jobs."""

    def __init__(self, salt: int, percent: int) -> None:
        super().__init__(salt, percent)
        self.jobs: list[Job] = []

    def do(self, job: Job) -> Result:
        self.jobs.append(job)
        return super().do(job)

    @property
    def asked(self) -> list[bool]:
        """For each batch of decoding that came by, whether it was scored."""
        scored = {job.batch for job in self.jobs if isinstance(job, Score)}
        decoding = {
            job.batch
            for job in self.jobs
            if isinstance(job, Forward) and all(s.length == 1 and s.sample for s in job.segments)
        }
        assert scored <= decoding
        return [batch in scored for batch in sorted(decoding)]


def noted(ring: Ring) -> list[Noting]:
    shards = [Noting(n, PERCENT) for n in range(ring.members)]
    ring.shards = list(shards)
    return shards


# -- which draws are shared -------------------------------------------------------------------------------------------


def test_the_last_member_alone_scores_while_one_greedy_answer_is_decoded() -> None:
    ring = Ring(3, percent=PERCENT)
    head, middle, last = noted(ring)
    ring.stages[1].ask(ask(0, 1, WORDS_ASKED), 0.0)
    ring.run()
    assert ring.answer("1-0") == solo(WORDS_ASKED, 3, Sampling(), 0)
    assert len(last.asked) > 2, "choose other words"
    assert all(last.asked)
    assert not any(head.asked + middle.asked)
    draws = [job.partial for job in head.jobs if isinstance(job, Sample)]
    assert draws == [False, *[True] * len(last.asked)]  # the prompt's token is the head's alone
    assert len(ring.batches) == len(draws)
    assert {batch.stage_s for batch in ring.batches} == {(1.1e-3, 1e-3, 1e-3)}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(presence_penalty=1.0),
        Sampling(frequency_penalty=0.5),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias=((3, 1.0),)),
        Sampling(logprobs=1),
    ],
)
def test_whatever_else_is_wanted_is_drawn_by_the_head_alone(sampling: Sampling) -> None:
    ring = Ring(3, percent=PERCENT)
    head, _, last = noted(ring)
    ring.stages[1].ask(ask(0, 1, WORDS_ASKED, sampling=sampling), 0.0)
    ring.run()
    assert last.asked, "choose other words"
    assert not any(last.asked)
    assert not any(job.partial for job in head.jobs if isinstance(job, Sample))
    assert ring.answer("1-0") == solo(WORDS_ASKED, 3, sampling, 0)


def test_one_that_shares_a_batch_with_a_draw_of_another_kind_is_the_heads() -> None:
    greedy = (Segment(0, 5, 1, True), Segment(1, 7, 1, True))
    batch = Batch(0, greedy, (1, 2), (Sampling(), Sampling()))
    assert is_shared(batch, 1)
    assert not is_shared(replace(batch, sampling=(Sampling(), Sampling(temperature=0.5))), 1)
    assert not is_shared(replace(batch, segments=(greedy[0], Segment(1, 7, 2, True)), tokens=(1, 2, 3)), 1)
    assert not is_shared(replace(batch, segments=(greedy[0], Segment(1, 7, 1, False))), 1)
    assert not is_shared(batch, 2)


def test_with_two_batches_on_their_way_nobody_scores_for_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "batches", lambda self, answers: 2)
    ring = Ring(2, percent=PERCENT)
    _, last = noted(ring)
    for n in range(2):
        ring.stages[1].ask(ask(n, 1, WORDS_ASKED, max_tokens=6), 0.0)
    ring.run()
    together = [job for job in last.jobs if isinstance(job, Forward) and len(job.segments) == 1]
    assert together, "the two have shared every batch"
    assert not all(last.asked)
    assert [ring.answer(f"1-{n}") for n in range(2)] == [solo(WORDS_ASKED, 2, Sampling(), 6)] * 2


@pytest.mark.parametrize("members", [1, 2])
def test_without_a_division_nobody_scores(members: int) -> None:
    ring = Ring(members, percent=0 if members == 2 else PERCENT)
    shards = noted(ring)
    ring.stages[-1].ask(ask(0, members - 1, WORDS_ASKED), 0.0)
    ring.run()
    assert not any(shards[-1].asked)
    assert ring.answer(f"{members - 1}-0") == solo(WORDS_ASKED, members, Sampling(), 0)


# -- the two halves ---------------------------------------------------------------------------------------------------


def halves(ring: Ring) -> tuple[Sampled, Scores]:
    """Play a ring of two on until the head has to draw in part, and take both halves before it has either."""
    for _ in range(100):
        for stage, shard in zip(ring.stages, ring.shards, strict=True):
            while (job := stage.next_job()) is not None:
                result = shard.do(job)
                if isinstance(job, Sample) and job.partial:
                    assert isinstance(result, Sampled)
                    return result, _others(ring)
                stage.result(result, ring.now)
        ring.collect()
        n = 1 if ring.wires[1] else 0
        send = ring.wires[n].popleft()
        ring.stages[n].receive(send.bulk, send.data, ring.now)
    raise AssertionError("no draw was shared")


def _others(ring: Ring) -> Scores:
    """What the last member scores, now that its rows have left."""
    ring.collect()
    if not ring.wires[0]:
        job = ring.stages[1].next_job()
        assert isinstance(job, Score)
        ring.stages[1].result(ring.shards[1].do(job), ring.now)
        ring.collect()
    return decode_scores(ring.wires[0].popleft().data)


def between() -> tuple[Ring, Sampled, Scores]:
    """A ring of two whose head has got neither half of a draw."""
    ring = Ring(2, percent=PERCENT)
    ring.stages[1].ask(ask(0, 1, WORDS_ASKED), 0.0)
    return ring, *halves(ring)


def in_turn(head: Stage, sampled: Sampled, scores: Scores, head_first: bool) -> Sequence[Callable[[], None]]:
    """What hands the head its halves."""
    both = [partial(head.result, sampled, 1.0), partial(head.receive, True, encode_scores(scores), 2.0)]
    return both if head_first else both[::-1]


@pytest.mark.parametrize("head_first", [True, False])
def test_the_halves_come_in_either_order(head_first: bool) -> None:
    ring, sampled, scores = between()
    told, done = len(ring.texts.get("1-0", ())), len(ring.batches)
    head = ring.stages[0]
    first, second = in_turn(head, sampled, scores, head_first)
    first()
    ring.collect()
    assert (len(ring.texts.get("1-0", ())), len(ring.batches)) == (told, done)
    assert not ring.wires[1]
    second()
    ring.run()
    assert len(ring.batches) > done
    assert ring.answer("1-0") == solo(WORDS_ASKED, 2, Sampling(), 0)
    assert not ring.broken


@pytest.mark.parametrize("head_first", [True, False])
def test_an_answer_may_be_cancelled_between_the_halves(head_first: bool) -> None:
    ring, sampled, scores = between()
    head = ring.stages[0]
    first, second = in_turn(head, sampled, scores, head_first)
    first()
    ring.stages[1].cancel("1-0", 1.5)
    ring.stages[1].ask(ask(1, 1, "f g"), 1.6)
    ring.collect()
    for send in list(ring.wires[0]):
        head.receive(send.bulk, send.data, 1.7)
    ring.wires[0].clear()
    second()
    ring.run()
    assert ring.finish("1-0") is FinishReason.CANCELLED
    assert ring.answer("1-1") == solo("f g", 2, Sampling(), 0)
    assert not ring.broken


def test_a_stop_string_in_a_shared_draw_ends_the_answer() -> None:
    whole = solo(WORDS_ASKED, 2, Sampling(), 0)
    ring = Ring(2, percent=PERCENT)
    ring.stages[1].ask(ask(0, 1, WORDS_ASKED, stop=(whole[2],)), 0.0)
    ring.run()
    assert ring.answer("1-0") == whole[: whole.index(whole[2])]
    assert ring.finish("1-0") is FinishReason.STOP


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epoch": 2}, "epoch 2"),
        ({"batch": 77}, "not asked for"),
        ({"best": (Best(0.0, 9), Best(0.0, 9))}, "2 scores came for 1"),
    ],
)
@pytest.mark.parametrize("head_first", [True, False])
def test_scores_that_cannot_be_are_refused(change: dict[str, object], words: str, head_first: bool) -> None:
    ring, sampled, scores = between()
    if head_first:
        ring.stages[0].result(sampled, 1.0)
    wrong = replace(scores, **change)  # type: ignore[arg-type]  # fields by name
    ring.stages[0].receive(True, encode_scores(wrong), 1.0)
    ring.collect()
    (blame,) = ring.broken
    assert words in blame


def test_scores_come_once_and_are_not_taken_after_their_batch() -> None:
    ring, sampled, scores = between()
    head = ring.stages[0]
    for _ in range(2):
        head.receive(True, encode_scores(scores), 1.0)
    head.result(sampled, 1.0)
    head.receive(True, encode_scores(scores), 1.0)
    ring.collect()
    assert ["twice" in blame for blame in ring.broken] == [True, False]
    assert "not asked for" in ring.broken[1]


def test_scores_of_a_batch_that_asked_for_none_are_refused() -> None:
    ring = Ring(2, percent=PERCENT)
    ring.stages[0].ask(ask(0, 0, WORDS_ASKED), 0.0)
    ring.step()
    ring.stages[0].receive(True, encode_scores(Scores(1, 0, (Best(0.0, 9),))), 0.0)
    ring.collect()
    assert "not asked for" in ring.broken[0]


def test_scores_are_for_the_head_alone() -> None:
    for ring, place in ((Ring(2, percent=PERCENT), 1), (Ring(1, guests=1), 1)):
        ring.stages[place].receive(True, encode_scores(Scores(1, 0, (Best(0.0, 9),))), 0.0)
        ring.collect()
        assert len(ring.broken) == 1


@pytest.mark.parametrize(("token", "is_known"), [(63, False), (64, True), (127, True), (128, False)])
def test_a_score_is_of_a_row_that_the_last_member_has(token: int, is_known: bool) -> None:
    batch = Batch(0, (Segment(0, 5, 1, True),), (1,), (Sampling(),))
    draw = SharedDraw.of(128, PERCENT)
    if is_known:
        draw.scored([Best(1.0, token)], batch)
    else:
        with pytest.raises(ProtocolError, match="does not score"):
            draw.scored([Best(1.0, token)], batch)
    SharedDraw.of(0, PERCENT).scored([Best(1.0, token)], batch)  # of a model that has no vocabulary all is believed


logits = st.lists(st.sampled_from([-1.5, 0.0, 0.0, 2.0]), min_size=130, max_size=300)


@given(logits, st.integers(10, 75))
def test_the_better_half_is_what_the_whole_gives(row: list[float], percent: int) -> None:
    cut = scored_from(len(row), percent)
    parts = [range(cut), range(cut, len(row))] if cut else [range(len(row))]
    whole, *found = (
        min((Best(row[token], token) for token in part), key=lambda best: (-best.logit, best.token))
        for part in [range(len(row)), *parts]
    )
    assert better(found[0], found[-1]) == better(found[-1], found[0]) == whole


def test_every_request_of_a_batch_has_its_better_token() -> None:
    batch = Batch(0, (Segment(0, 5, 1, True), Segment(1, 5, 1, True)), (1, 2), (Sampling(), Sampling()))
    draw = SharedDraw.of(0, PERCENT)
    assert draw.whole() is None
    draw.sampled = Sampled(0, (3, 4), 0.5, best=(Best(1.0, 3), Best(1.0, 4)))
    assert draw.whole() is None
    draw.scored([Best(2.0, 90), Best(1.0, 91)], batch)
    assert draw.whole() == Sampled(0, (90, 4), 0.5)


# -- the members between ----------------------------------------------------------------------------------------------

ASKING = Activation(1, 3, "float32", 1, (Segment(0, 4, 1, True),), bytes(4), (9,), score=True)


def test_a_middle_member_passes_the_wish_on_and_scores_nothing() -> None:
    ring = Ring(3, percent=PERCENT)
    middle = ring.stages[1]
    middle.receive(True, encode_activation(replace(ASKING, hop_us=())), 0.0)
    job = middle.next_job()
    assert isinstance(job, Forward)
    middle.result(Forwarded(3, bytes(4), "float32", 1e-3), 0.0)
    send = middle.next_send()
    assert send is not None
    assert decode_activation(send.data) == replace(ASKING, hop_us=(1000,))
    assert middle.next_job() is None


def test_the_last_member_sends_its_rows_on_before_it_scores() -> None:
    last = Ring(3, percent=PERCENT).stages[2]
    last.receive(True, encode_activation(ASKING), 0.0)
    assert last.next_job() == Forward(3, ASKING.segments, None, bytes(4), "float32", last_only=True)
    last.result(Forwarded(3, bytes(4), "float32", 1e-3), 0.0)
    assert last.next_job() is None
    send = last.next_send()
    assert send is not None
    assert decode_activation(send.data) == replace(ASKING, hop_us=(9, 1000))
    assert last.next_send() is None
    assert last.next_job() == Score(3, ASKING.segments, bytes(4), "float32")
    last.result(Scored(3, (Best(1.5, 9),), 1e-4), 0.0)
    assert last.next_send() == Send(True, encode_scores(Scores(1, 3, (Best(1.5, 9),))))
    with pytest.raises(KeyError):  # a bug that shows
        last.result(Scored(3, (Best(1.5, 9),), 1e-4), 0.0)


def test_a_last_member_that_cannot_score_says_so() -> None:
    last = Ring(2, percent=PERCENT).stages[1]
    last.receive(True, encode_activation(replace(ASKING, hop_us=())), 0.0)
    last.result(Forwarded(3, bytes(4), "float32", 1e-3), 0.0)
    last.result(Failed(3, DeviceError("cpu failed: out of memory")), 0.0)
    assert last.next_event() == Broken("cpu failed: out of memory")


def test_nobody_is_asked_for_what_the_plan_has_not_given() -> None:
    for place in range(2):
        ring = Ring(2)
        ring.stages[place].receive(True, encode_activation(replace(ASKING, hop_us=())), 0.0)
        ring.collect()
        assert "head alone" in ring.broken[0]
        assert ring.stages[place].next_job() is None


@pytest.mark.parametrize("score", [True, False])
def test_a_batch_comes_back_as_it_was_sent(score: bool) -> None:
    ring = Ring(2, percent=PERCENT)
    ring.stages[1].ask(ask(0, 1, WORDS_ASKED), 0.0)
    frame = replace(ASKING, score=not score)
    while frame.score != score:
        ring.step()
        ring.collect()
        for send in ring.wires[0]:
            frame = decode_activation(send.data) if send.bulk and not is_scores(send.data) else frame
    ring.stages[0].receive(True, encode_activation(replace(frame, score=not score)), 0.0)
    ring.collect()
    assert "not as it was sent" in ring.broken[0]


def test_what_a_configuration_says_of_the_vocabulary() -> None:
    shape = (
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2, '
        '"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 321}'
    )
    assert vocabulary_of(shape) == 321
    assert vocabulary_of("{}") == vocabulary_of("nonsense") == 0


def test_answers_that_share_a_batch_share_its_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "batches", lambda self, answers: 1)
    ring = Ring(2, percent=PERCENT)
    _, last = noted(ring)
    for n in range(SLOTS):
        ring.stages[1].ask(ask(n, 1, WORDS_ASKED), 0.0)
    ring.run()
    assert all(ring.answer(f"1-{n}") == solo(WORDS_ASKED, 2, Sampling(), 0) for n in range(SLOTS))
    assert any(len(job.segments) > 1 for job in last.jobs if isinstance(job, Score))
