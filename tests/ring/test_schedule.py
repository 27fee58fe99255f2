"""The scheduler against an exact stand-in for a ring: integer "models" whose next token depends on the whole history.

The stand-in keeps a cache a slot, as the members do, and refuses to run when the scheduler's positions and its cache
disagree. So an answer that comes out right proves that the right tokens met the right cache.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kafila.ring.schedule import (
    MAX_WAITING,
    Batch,
    Finished,
    Request,
    Scheduler,
    Started,
    Token,
    Verdict,
)
from kafila.types import FinishReason, History, NodeId, Sampling, Segment
from tests.ring.pipeline import Fixed

STOP_ID = 0
CONTEXT = 24
ASKERS = [NodeId(bytes([n] * 8)) for n in range(3)]


def next_token(history: list[int], sampling: Sampling, looked_at: History = History()) -> int:  # noqa: B008  - frozen
    """A pure function of the whole history, the request's own sampling, and where its prompt ends if the draw looks
    back; about one in nine draws is the stop id."""
    return random.Random(repr((history, sampling, looked_at))).randrange(9)


def solo_answer(request: Request) -> tuple[list[int], FinishReason]:
    """What the request must yield alone, computed without a scheduler."""
    history, answer = list(request.prompt), list[int]()
    while True:
        looked_at = History(request.prompt, tuple(answer)) if request.sampling.looks_back else History()
        token = next_token(history, request.sampling, looked_at)
        if token in request.stop_ids:
            return answer, FinishReason.STOP
        history.append(token)
        answer.append(token)
        if len(answer) == request.max_tokens:
            return answer, FinishReason.LENGTH
        if len(history) >= CONTEXT:
            return answer, FinishReason.CONTEXT


@dataclass
class StandInRing:
    """Processes batches in the order sent, like stages joined by ordered links; results return in that order."""

    caches: dict[int, list[int]] = field(default_factory=dict)
    on_their_way: deque[Batch] = field(default_factory=deque)

    def send(self, batch: Batch) -> None:
        self.on_their_way.append(batch)

    def turn(self) -> tuple[int, list[int | None]]:
        batch = self.on_their_way.popleft()
        results: list[int | None] = []
        tokens = iter(batch.tokens)
        histories = batch.histories or (History(),) * len(batch.segments)
        for segment, sampling, looked_at in zip(batch.segments, batch.sampling, histories, strict=True):
            cache = self.caches.setdefault(segment.slot, [])
            assert segment.start <= len(cache), "positions the cache does not have"
            del cache[segment.start :]
            cache += [next(tokens) for _ in range(segment.length)]
            results.append(next_token(cache, sampling, looked_at) if segment.sample else None)
        assert next(tokens, None) is None
        return batch.number, results


class Mix(RuleBasedStateMachine):
    """Any mix of requests, in any order, with any cancellation: every answer is its solo answer or a prefix of it."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(slots=2, context=CONTEXT, pace=Fixed(2, 4))
        self.ring = StandInRing()
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.asked: dict[str, Request] = {}

    @rule(
        target=requests,
        asker=st.sampled_from(ASKERS),
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=CONTEXT - 1),
        seed=st.integers(0, 3),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        max_tokens=st.integers(0, 6),
    )
    def submit(self, asker: NodeId, prompt: list[int], seed: int, presence_penalty: float, max_tokens: int) -> object:
        sampling = Sampling(seed=seed, presence_penalty=presence_penalty)
        request = Request(f"r{len(self.asked)}", asker, tuple(prompt), sampling, max_tokens, frozenset({STOP_ID}))
        self.asked[request.name] = request
        if self.scheduler.submit(request) is Verdict.QUEUE_FULL:
            del self.asked[request.name]
            return multiple()
        self.answers[request.name] = []
        return request.name

    @rule(name=requests)
    def cancel(self, name: str) -> None:
        self.scheduler.cancel(name)

    @rule()
    def dispatch(self) -> None:
        if (batch := self.scheduler.next_batch()) is not None:
            self.ring.send(batch)

    @rule()
    def complete(self) -> None:
        if self.ring.on_their_way:
            self.scheduler.completed(*self.ring.turn())

    @invariant()
    def events_make_sense(self) -> None:
        while (event := self.scheduler.next_event()) is not None:
            assert event.name not in self.ended
            match event:
                case Token(name, token):
                    self.answers[name].append(token)
                case Started(name, reused):
                    assert reused < len(self.asked[name].prompt)
                case Finished(name, reason, answer_tokens):
                    self.ended[name] = reason
                    assert answer_tokens == len(self.answers[name])
        awaited = [batch for batch in self.ring.on_their_way if any(segment.sample for segment in batch.segments)]
        assert len(awaited) <= 2
        assert len(self.ring.on_their_way) <= 2 + 2  # chunks may be on their way before them

    def teardown(self) -> None:
        for _ in range(10_000):
            while (batch := self.scheduler.next_batch()) is not None:
                self.ring.send(batch)
            if not self.ring.on_their_way:
                break
            self.scheduler.completed(*self.ring.turn())
        self.events_make_sense()
        assert self.scheduler.idle
        for name, request in self.asked.items():
            answer, reason = solo_answer(request)
            if self.ended[name] is FinishReason.CANCELLED:
                assert answer[: len(self.answers[name])] == self.answers[name]
            else:
                assert (self.answers[name], self.ended[name]) == (answer, reason)


TestMix = Mix.TestCase


def ask(name: str, prompt_tokens: int, asker: NodeId = ASKERS[0], *, max_tokens: int = 0) -> Request:
    return Request(name, asker, tuple(range(1, prompt_tokens + 1)), max_tokens=max_tokens)


def run_one(scheduler: Scheduler, token: int = 5) -> Batch:
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.completed(batch.number, [token if segment.sample else None for segment in batch.segments])
    return batch


def test_a_prompt_is_prefilled_in_chunks_that_follow_one_another_without_waiting() -> None:
    scheduler = Scheduler(slots=1, context=64, pace=Fixed(3, 4))
    scheduler.submit(ask("a", 10))
    batches = [scheduler.next_batch() for _ in range(3)]
    segments = [batch.segments[0] for batch in batches if batch is not None]
    assert [(s.start, s.length, s.sample) for s in segments] == [(0, 4, False), (4, 4, False), (8, 2, True)]


def test_a_running_answer_rides_along_with_every_chunk_of_another_prompt() -> None:
    scheduler = Scheduler(slots=2, context=64, pace=Fixed(1, 4))
    scheduler.submit(ask("talking", 1))
    run_one(scheduler)
    scheduler.submit(ask("long", 20, ASKERS[1]))
    for _ in range(5):
        lengths = [segment.length for segment in run_one(scheduler).segments]
        assert lengths == [1, 4]


def test_a_prompt_that_comes_while_an_answer_is_on_its_way_waits_for_it_and_follows_it() -> None:
    scheduler = Scheduler(slots=2, context=64, pace=Fixed(2, 4))
    scheduler.submit(ask("talking", 1))
    talking = scheduler.next_batch()
    assert talking is not None
    scheduler.submit(ask("long", 20, ASKERS[1]))
    assert scheduler.next_batch() is None  # the answer would come back to a chunk before it
    scheduler.completed(talking.number, [5])
    batches = [scheduler.next_batch() for _ in range(3)]
    assert [batch and [segment.length for segment in batch.segments] for batch in batches] == [[1, 4], [4], None]


def test_beside_an_answer_a_batch_has_chunks_of_no_prompt_that_has_come_further_than_the_first() -> None:
    scheduler = Scheduler(slots=3, context=64, pace=Fixed(1, 4))
    scheduler.submit(ask("far", 20))
    run_one(scheduler)
    scheduler.submit(ask("talking", 1, ASKERS[1]))
    run_one(scheduler)
    scheduler.submit(ask("short", 3, ASKERS[2]))
    starts = [[(segment.start, segment.length) for segment in run_one(scheduler).segments] for _ in range(2)]
    assert [start for start, length in starts[0] if length > 1] == [8]
    assert [length for _, length in starts[1]] == [1, 3]


def test_two_answers_travel_in_two_batches_so_that_two_stages_work() -> None:
    scheduler = Scheduler(slots=2, context=64, pace=Fixed(2))
    scheduler.submit(ask("a", 1))
    scheduler.submit(ask("b", 1, ASKERS[1]))
    first, second = scheduler.next_batch(), scheduler.next_batch()
    assert first is not None
    assert second is not None
    assert len(first.segments) == len(second.segments) == 1


def test_a_second_turn_prefills_only_what_is_new() -> None:
    scheduler = Scheduler(slots=1, context=64, pace=Fixed(1))
    scheduler.submit(ask("turn 1", 10, max_tokens=2))
    run_one(scheduler, token=11)
    run_one(scheduler, token=12)
    scheduler.submit(ask("turn 2", 20))  # 1..20 begins with the first turn and its answer 11, 12
    assert run_one(scheduler).segments[0].start == 11  # the answer's last token was never fed back


@given(st.integers(2, 20))
def test_nobody_reuses_the_cache_of_another_person(prompt_tokens: int) -> None:
    scheduler = Scheduler(slots=1, context=64, pace=Fixed(1))
    scheduler.submit(ask("mine", prompt_tokens, max_tokens=1))
    run_one(scheduler)
    scheduler.submit(ask("yours", prompt_tokens, ASKERS[1]))
    assert run_one(scheduler).segments[0].start == 0


def test_a_cancelled_answer_gives_its_slot_to_who_waits_in_the_next_batch() -> None:
    scheduler = Scheduler(slots=1, context=64, pace=Fixed(2))
    scheduler.submit(ask("mine", 5))
    scheduler.submit(ask("yours", 3, ASKERS[1]))
    on_its_way = scheduler.next_batch()
    scheduler.cancel("mine")
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.segments == (Segment(0, 0, 3, True),)
    assert on_its_way is not None
    scheduler.completed(on_its_way.number, [7])
    scheduler.completed(batch.number, [5])
    events = []
    while (event := scheduler.next_event()) is not None:
        events.append(event)
    assert Finished("mine", FinishReason.CANCELLED, 0) in events
    assert [event for event in events if isinstance(event, Token)] == [Token("yours", 5)]


def test_askers_take_turns_at_the_slots() -> None:
    scheduler = Scheduler(slots=1, context=64, pace=Fixed(1))
    for n in range(3):
        scheduler.submit(ask(f"greedy {n}", 1, max_tokens=1))
    scheduler.submit(ask("patient", 1, ASKERS[1], max_tokens=1))
    started = []
    for _ in range(4):
        run_one(scheduler)
        while (event := scheduler.next_event()) is not None:
            started += [event.name] if isinstance(event, Started) else []
    assert started == ["greedy 0", "patient", "greedy 1", "greedy 2"]


def test_whoever_has_the_fewest_slots_comes_first() -> None:
    scheduler = Scheduler(slots=3, context=64, pace=Fixed(1))
    for n in range(5):
        scheduler.submit(ask(f"greedy {n}", 1, max_tokens=1 if n < 2 else 9))
    scheduler.submit(ask("second", 1, ASKERS[1], max_tokens=9))
    scheduler.submit(ask("third", 1, ASKERS[2], max_tokens=9))
    run_one(scheduler)  # two of the greedy one's three are done, and two slots free
    started = []
    while (event := scheduler.next_event()) is not None:
        started += [event.name] if isinstance(event, Started) else []
    assert started[3:] == ["second", "third"]


def test_what_cannot_be_served_is_told_at_once() -> None:
    scheduler = Scheduler(slots=1, context=8, pace=Fixed(1))
    assert scheduler.submit(ask("too long", 8)) is Verdict.TOO_LONG
    assert scheduler.submit(ask("empty", 0)) is Verdict.TOO_LONG
    assert scheduler.submit(ask("a", 1)) is Verdict.ACCEPTED
    assert scheduler.submit(ask("a", 1)) is Verdict.DUPLICATE
    for n in range(MAX_WAITING):
        assert scheduler.submit(ask(f"waiting {n}", 1)) is Verdict.ACCEPTED
    assert scheduler.position("waiting 1") == 2
    assert scheduler.position("a") is None
    assert scheduler.submit(ask("one more", 1)) is Verdict.QUEUE_FULL


def test_a_batch_reported_twice_changes_nothing() -> None:
    scheduler = Scheduler(slots=1, context=8, pace=Fixed(1))
    scheduler.submit(ask("a", 1))
    batch = run_one(scheduler)
    scheduler.completed(batch.number, [])
    second = scheduler.next_batch()
    assert second is not None
    assert second.tokens == (5,)
