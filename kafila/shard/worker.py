"""The one thread that touches the device: jobs in, results out, in order.

Results are handed to a callback *on this thread*; whoever owns an event loop hops over itself (no Trio here). Handing
a job over costs one C-implemented queue put and a wake-up; see ``bench/decode.py`` (``handover_us``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kafila.errors import DeviceError, KafilaError, ModelError, ProtocolError
from kafila.types import Best, History, Sampling, Segment, TokenLogprobs

STOP_WITHIN_S = 1.0
"""How long `ShardWorker.stop` waits. A stage notices between blocks; what is longer than that is left to a daemon
thread, which no result is heard of again."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Run this member's blocks over a ragged batch.

    Rows are the segments' tokens in order, ``sum(segment.length)`` of them. At the head ``tokens`` names them and
    ``hidden`` is None; elsewhere ``hidden`` holds them row-major in ``dtype``. ``dtype`` is also the answer's.
    """

    batch: int
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...] | None
    hidden: bytes | None
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``."""
    last_only: bool = False
    """Where the model's last block is: of the rows after it, only each segment's last are wanted
    (:func:`kafila.types.last_rows`)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Head only: final norm and unembedding of the last row of each segment that wants a token, then draw.

    ``hidden`` has all rows of the segments in ``dtype``; ``sampling`` has one entry a segment.
    """

    batch: int
    segments: tuple[Segment, ...]
    sampling: tuple[Sampling, ...]
    hidden: bytes
    dtype: str
    histories: tuple[History, ...] = ()
    """One entry a segment, empty where the draw does not look back; no entries: none does."""
    partial: bool = False
    """Greedily, and only from the rows that the last member does not score."""


@dataclass(frozen=True, slots=True)
class Score:
    """The last member: the best of its rows of the vocabulary, for each segment that wants a token.

    ``hidden`` has all rows of the segments in ``dtype``, as they travel to the head.
    """

    batch: int
    segments: tuple[Segment, ...]
    hidden: bytes
    dtype: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The shard is ready; always the first result unless loading failed."""

    device: str
    """For people: ``cpu (2 threads)``."""
    load_s: float


@dataclass(frozen=True, slots=True)
class Coming:
    """Before `Loaded`: how much of the shard has been fetched from the checkpoint's source."""

    done_bytes: int
    wanted_bytes: int


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A `Forward`'s rows after this member's blocks."""

    batch: int
    hidden: bytes
    dtype: str
    stage_s: float
    """From taking the job to having the bytes, by the worker's clock."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What came of a `Score`."""

    batch: int
    best: tuple[Best, ...]
    """One for each segment that wants a token, in order."""
    score_s: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """A `Sample`'s tokens, one a segment, None where none was asked for."""

    batch: int
    tokens: tuple[int | None, ...]
    stage_s: float
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One entry a segment, None where none were asked for; no entries: nobody asked."""
    best: tuple[Best, ...] = ()
    """Of a partial draw: one for each segment that wants a token, in order."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A job that could not be done. The worker goes on with the next."""

    batch: int | None
    """None: the shard could not be loaded, and the thread has ended."""
    error: KafilaError


class Draws(NamedTuple):
    """What `Stage.sample` returns: the fields of `Sampled`."""

    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()


Job = Forward | Sample | Score
Result = Loaded | Coming | Forwarded | Scored | Sampled | Failed


class Stage(Protocol):
    """What the thread runs: `kafila.shard.decoder.Shard`, or a stand-in for it in a test."""

    @property
    def device(self) -> str:
        """For people."""
        ...

    def forward(
        self,
        segments: Sequence[Segment],
        tokens: Sequence[int] | None,
        hidden: bytes | None,
        dtype: str,
        *,
        last_only: bool = False,
    ) -> bytes:
        """`Forward`."""
        ...

    def sample(
        self,
        segments: Sequence[Segment],
        sampling: Sequence[Sampling],
        hidden: bytes,
        dtype: str,
        histories: Sequence[History] = (),
    ) -> Draws:
        """`Sample`."""
        ...

    def score(self, segments: Sequence[Segment], hidden: bytes, dtype: str) -> tuple[Best, ...]:
        """`Score`: one for each segment that wants a token, in order."""
        ...

    def sample_part(self, segments: Sequence[Segment], hidden: bytes, dtype: str) -> tuple[Best, ...]:
        """A partial `Sample`: one for each segment that wants a token, in order."""
        ...

    def interrupt(self) -> None:
        """From another thread: give up what is being done, soon, by raising DeviceError."""
        ...


DEVICE_FAULTS = (
    RuntimeError,  # torch, its out-of-memory errors included
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    MemoryError,
    OSError,
)
"""What a backend raises when it cannot do the work. Named one by one so that an interrupt or an exit is never eaten."""


class ShardWorker:
    """Owns the device thread. ``load`` and every job run on it, and so does ``on_result``, which must not raise."""

    def __init__(
        self,
        load: Callable[[], Stage],
        on_result: Callable[[Result], None],
        *,
        inbox: int,
        clock: Callable[[], float] = time.perf_counter,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing starts here. ``inbox`` is the most jobs that may wait; ``clock`` counts seconds; ``give_up`` ends a
        loading that is of no use any more, from another thread."""
        self._give_up = give_up
        self._load = load
        self._on_result = on_result
        self._limit = inbox
        self._clock = clock
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = False
        self._stage: Stage | None = None
        self._device = "this member's device"
        self._thread = threading.Thread(target=self._run, name="kafila-shard", daemon=True)

    def start(self) -> None:
        """Begin loading; `Loaded` or a `Failed` without a batch is the first result."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises DeviceError when ``inbox`` jobs wait already: the caller asked for too much at once."""
        if self._jobs.qsize() >= self._limit:
            raise DeviceError(f"{self._device}: more than {self._limit} jobs wait for it")
        self._jobs.put(job)

    def stop(self) -> None:
        """Drop what waits, give up what runs, and return within `STOP_WITHIN_S`. No result is heard afterwards."""
        self._stopping = True
        self._give_up()
        if (stage := self._stage) is not None:
            stage.interrupt()
        self._jobs.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_WITHIN_S)

    def _run(self) -> None:
        began = self._clock()
        try:
            self._stage = stage = self._load()
            self._device = stage.device
            self._tell(Loaded(stage.device, self._clock() - began))
        except (KafilaError, *DEVICE_FAULTS) as error:
            self._tell(Failed(None, self._explain(error, "loading its share of the model")))
            return
        while not self._stopping and (job := self._jobs.get()) is not None:
            self._tell(self._do(stage, job))

    def _do(self, stage: Stage, job: Job) -> Result:
        try:
            match job:
                case Forward():
                    return self._forward(stage, job)
                case Sample():
                    return self._sample(stage, job)
                case Score():
                    return self._score(stage, job)
        except (KafilaError, *DEVICE_FAULTS) as error:
            return Failed(job.batch, self._explain(error, f"batch {job.batch}"))

    def _forward(self, stage: Stage, job: Forward) -> Forwarded:
        began = self._clock()
        hidden = stage.forward(job.segments, job.tokens, job.hidden, job.dtype, last_only=job.last_only)
        return Forwarded(job.batch, hidden, job.dtype, self._clock() - began)

    def _score(self, stage: Stage, job: Score) -> Scored:
        began = self._clock()
        best = stage.score(job.segments, job.hidden, job.dtype)
        return Scored(job.batch, best, self._clock() - began)

    def _sample(self, stage: Stage, job: Sample) -> Sampled:
        began = self._clock()
        if not job.partial:
            draws = stage.sample(job.segments, job.sampling, job.hidden, job.dtype, job.histories)
            return Sampled(job.batch, draws.tokens, self._clock() - began, draws.logprobs)
        best = stage.sample_part(job.segments, job.hidden, job.dtype)
        found = iter(best)
        tokens = tuple(next(found).token if segment.sample else None for segment in job.segments)
        return Sampled(job.batch, tokens, self._clock() - began, best=best)

    def _tell(self, result: Result) -> None:
        # Whoever stopped us may have closed the event loop that the callback leads to.
        if not self._stopping:
            self._on_result(result)

    def _explain(self, error: BaseException, doing: str) -> KafilaError:
        """The error as one of ours that names the device; a model's or a peer's fault stays what it is."""
        first_line = (str(error).splitlines() or [""])[0] or type(error).__name__
        if isinstance(error, ModelError):
            return error
        if isinstance(error, ProtocolError):
            return ProtocolError(f"{self._device}: {first_line}")
        return DeviceError(f"{self._device} failed at {doing}: {first_line}")
