"""The device thread, with stages that wait for the test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kafila.errors import DeviceError, KafilaError, ModelIncomplete, ProtocolError
from kafila.shard.load import load_shard
from kafila.shard.manifest import open_checkpoint
from kafila.shard.torch_ops import TorchOps
from kafila.shard.worker import (
    Draws,
    Failed,
    Forward,
    Forwarded,
    Loaded,
    Result,
    Sample,
    Sampled,
    Score,
    Scored,
    ShardWorker,
    Stage,
)
from kafila.types import Best, BlockRange, History, Sampling, Segment
from tests.shard.checkpoints import make_checkpoint, reference_answer

ONE = (Segment(0, 0, 1, sample=True),)
PATIENCE_S = 30.0
"""A test that would hang fails instead; nothing that passes waits this long."""


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1
        return self._now


class FakeStage:
    """Answers at once, raises what it is told to, or holds on to a job until it is interrupted or let go."""

    device = "fake"

    def __init__(self) -> None:
        self.raises: BaseException | None = None
        self.raises_scoring: BaseException | None = None
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()
        self.interrupted = False
        self.last_only: list[bool] = []
        self.threads: set[int] = set()

    def forward(
        self,
        segments: Sequence[Segment],
        tokens: Sequence[int] | None,
        hidden: bytes | None,
        dtype: str,
        *,
        last_only: bool = False,
    ) -> bytes:
        self.last_only.append(last_only)
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.may_go.wait(PATIENCE_S)
        if self.raises is not None:
            raise self.raises
        return (hidden or b"") + dtype.encode()

    def sample(
        self,
        segments: Sequence[Segment],
        sampling: Sequence[Sampling],
        hidden: bytes,
        dtype: str,
        histories: Sequence[History] = (),
    ) -> Draws:
        return Draws((len(hidden),))

    def score(self, segments: Sequence[Segment], hidden: bytes, dtype: str) -> tuple[Best, ...]:
        self.threads.add(threading.get_ident())
        if self.raises_scoring is not None:
            raise self.raises_scoring
        return (Best(2.5, 90 + len(hidden)),) * sum(segment.sample for segment in segments)

    def sample_part(self, segments: Sequence[Segment], hidden: bytes, dtype: str) -> tuple[Best, ...]:
        if self.raises_scoring is not None:
            raise self.raises_scoring
        return (Best(0.5, len(hidden)),) * sum(segment.sample for segment in segments)

    def interrupt(self) -> None:
        self.interrupted = True
        self.may_go.set()


class Results:
    """What the worker says, readable from the test."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.threads: set[int] = set()

    def __call__(self, result: Result) -> None:
        self.threads.add(threading.get_ident())
        self._queue.put(result)

    def next(self) -> Result:
        return self._queue.get(timeout=PATIENCE_S)

    @property
    def empty(self) -> bool:
        return self._queue.empty()


@pytest.fixture
def stage() -> FakeStage:
    return FakeStage()


@pytest.fixture
def results() -> Results:
    return Results()


@pytest.fixture
def start(results: Results) -> Callable[[Callable[[], Stage]], ShardWorker]:
    def start(load: Callable[[], Stage]) -> ShardWorker:
        worker = ShardWorker(load, results, inbox=3, clock=Clock())
        worker.start()
        return worker

    return start


Start = Callable[[Callable[[], Stage]], ShardWorker]


def _forward(batch: int) -> Forward:
    return Forward(batch, ONE, None, b"abc", "float16")


def test_jobs_are_done_in_order_on_one_thread(stage: FakeStage, results: Results, start: Start) -> None:
    worker = start(lambda: stage)
    assert results.next() == Loaded("fake", 1.0)
    worker.submit(_forward(1))
    worker.submit(Sample(2, ONE, (Sampling(),), b"abcd", "float16"))
    worker.submit(_forward(3))
    assert results.next() == Forwarded(1, b"abcfloat16", "float16", 1.0)
    assert results.next() == Sampled(2, (4,), 1.0)
    assert results.next() == Forwarded(3, b"abcfloat16", "float16", 1.0)
    worker.stop()
    assert stage.threads == results.threads
    assert threading.get_ident() not in stage.threads


def test_a_stage_is_told_whether_last_rows_are_all_that_is_wanted(
    stage: FakeStage, results: Results, start: Start
) -> None:
    worker = start(lambda: stage)
    results.next()
    worker.submit(_forward(1))
    worker.submit(replace(_forward(2), last_only=True))
    assert [results.next(), results.next()] == [Forwarded(n, b"abcfloat16", "float16", 1.0) for n in (1, 2)]
    assert stage.last_only == [False, True]


@pytest.mark.parametrize(
    ("raised", "type_", "said"),
    [
        (
            RuntimeError("CUDA error: out of memory\nmore lines"),
            DeviceError,
            "fake failed at batch 1: CUDA error: out of memory",
        ),
        (MemoryError(), DeviceError, "fake failed at batch 1: MemoryError"),
        (IndexError("x"), DeviceError, "fake failed at batch 1: x"),
        (AssertionError(), DeviceError, "fake failed at batch 1: AssertionError"),
        (ProtocolError("slot 7 of 3"), ProtocolError, "fake: slot 7 of 3"),
        (KafilaError("odd"), DeviceError, "fake failed at batch 1: odd"),
    ],
)
def test_a_job_that_raises_fails_alone(
    raised: Exception, type_: type[KafilaError], said: str, stage: FakeStage, results: Results, start: Start
) -> None:
    stage.raises = raised
    worker = start(lambda: stage)
    results.next()
    worker.submit(_forward(1))
    failed = results.next()
    assert isinstance(failed, Failed)
    assert failed.batch == 1
    assert type(failed.error) is type_
    assert str(failed.error) == said
    stage.raises = None
    worker.submit(_forward(2))
    assert isinstance(results.next(), Forwarded)
    worker.stop()


@pytest.mark.parametrize("raised", [ModelIncomplete("w is missing"), RuntimeError("no room"), OSError(28, "No space")])
def test_loading_that_fails_is_said_once(raised: Exception, results: Results, start: Start) -> None:
    def load() -> Stage:
        raise raised

    worker = start(load)
    failed = results.next()
    assert isinstance(failed, Failed)
    assert failed.batch is None
    assert isinstance(failed.error, ModelIncomplete if isinstance(raised, ModelIncomplete) else DeviceError)
    worker.stop()
    assert results.empty


def test_the_inbox_is_bounded(stage: FakeStage, results: Results, start: Start) -> None:
    stage.may_go.clear()
    worker = start(lambda: stage)
    results.next()
    worker.submit(_forward(0))
    assert stage.entered.wait(PATIENCE_S)
    for batch in (1, 2, 3):
        worker.submit(_forward(batch))
    with pytest.raises(DeviceError, match="fake: more than 3 jobs"):
        worker.submit(_forward(4))
    stage.may_go.set()
    assert [results.next() for _ in range(4)] == [Forwarded(n, b"abcfloat16", "float16", 1.0) for n in range(4)]
    worker.stop()


def test_stopping_while_busy_gives_up_what_runs_and_drops_what_waits(
    stage: FakeStage, results: Results, start: Start
) -> None:
    stage.may_go.clear()
    worker = start(lambda: stage)
    results.next()
    worker.submit(_forward(1))
    worker.submit(_forward(2))
    assert stage.entered.wait(PATIENCE_S)
    worker.stop()
    assert stage.interrupted
    assert results.empty
    assert not worker.alive


def test_stopping_while_loading(results: Results, start: Start) -> None:
    stage, go, loading = FakeStage(), threading.Event(), threading.Event()

    def load() -> Stage:
        loading.set()
        assert go.wait(PATIENCE_S)
        return stage

    worker = start(load)
    assert loading.wait(PATIENCE_S)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    go.set()
    stopper.join(PATIENCE_S)
    assert results.empty or isinstance(results.next(), Loaded)
    assert results.empty


def test_stopping_what_never_started_or_twice(stage: FakeStage, results: Results, start: Start) -> None:
    ShardWorker(lambda: stage, results, inbox=1).stop()
    worker = start(lambda: stage)
    results.next()
    worker.stop()
    worker.stop()


def test_the_owner_may_stop_it_from_the_callback(stage: FakeStage) -> None:
    done = threading.Event()

    def on_result(result: Result) -> None:
        worker.stop()
        done.set()

    worker = ShardWorker(lambda: stage, on_result, inbox=1)
    worker.start()
    assert done.wait(PATIENCE_S)


def test_with_a_real_shard(tmp_path: Path, results: Results, start: Start) -> None:
    folder = make_checkpoint(tmp_path, "llama", tied=True)

    def load() -> Stage:
        ops = TorchOps("cpu", "float32", threads=1)
        return load_shard(ops, open_checkpoint(folder), BlockRange(0, 4), holds_head=True, slots=1, context=32)

    worker = start(load)
    assert results.next() == Loaded("cpu (1 thread)", 1.0)
    prompt = (4, 9, 100, 3)
    segments = (Segment(0, 0, 4, sample=True),)
    worker.submit(Forward(1, segments, prompt, None, "float32"))
    forwarded = results.next()
    assert isinstance(forwarded, Forwarded)
    worker.submit(Sample(2, segments, (Sampling(),), forwarded.hidden, "float32"))
    sampled = results.next()
    assert isinstance(sampled, Sampled)
    assert list(sampled.tokens) == reference_answer(folder, prompt, 1)
    worker.submit(Forward(3, (Segment(0, 0, 33, sample=True),), (1,) * 33, None, "float32"))
    refused = results.next()
    assert isinstance(refused, Failed)
    assert "32 are reserved" in str(refused.error)
    worker.stop()


TWO = (Segment(0, 3, 1, sample=True), Segment(2, 5, 1, sample=False), Segment(1, 4, 1, sample=True))


def test_scores_are_jobs_like_others(stage: FakeStage, results: Results, start: Start) -> None:
    worker = start(lambda: stage)
    results.next()
    worker.submit(Score(1, TWO, b"abc", "float16"))
    worker.submit(_forward(2))
    assert results.next() == Scored(1, (Best(2.5, 93), Best(2.5, 93)), 1.0)
    assert results.next() == Forwarded(2, b"abcfloat16", "float16", 1.0)
    worker.stop()
    assert results.empty
    assert stage.threads == results.threads


def test_scoring_that_fails_fails_the_batch_and_no_other(stage: FakeStage, results: Results, start: Start) -> None:
    stage.raises_scoring = RuntimeError("out of memory")
    worker = start(lambda: stage)
    results.next()
    worker.submit(Score(1, TWO, b"abc", "float16"))
    worker.submit(_forward(2))
    failed = results.next()
    assert isinstance(failed, Failed)
    assert failed.batch == 1
    assert str(failed.error) == "fake failed at batch 1: out of memory"
    assert isinstance(results.next(), Forwarded)
    worker.stop()


def test_a_partial_draw_gives_the_best_of_its_rows(stage: FakeStage, results: Results, start: Start) -> None:
    worker = start(lambda: stage)
    results.next()
    worker.submit(Sample(1, TWO, (Sampling(),) * 3, b"abcd", "float16", partial=True))
    assert results.next() == Sampled(1, (4, None, 4), 1.0, (), (Best(0.5, 4), Best(0.5, 4)))
    stage.raises_scoring = DeviceError("not a number")
    worker.submit(Sample(2, TWO, (Sampling(),) * 3, b"abcd", "float16", partial=True))
    failed = results.next()
    assert isinstance(failed, Failed)
    assert failed.batch == 2
    worker.stop()
