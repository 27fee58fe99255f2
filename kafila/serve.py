"""One member's place in the ring while a session serves (sans-IO).

A :class:`Stage` turns what the previous neighbour sends and what the worker finishes into jobs for the worker, sends to
the next neighbour and events for the person at this member. The head's :class:`Head` adds the scheduler and the
language: it turns questions into batches and tokens into text.

    ask (local or from the ring) --> Head: render, schedule --> Forward job --> activation --> ... round the ring ...
        --> Sample job --> token --> text --> round the ring to whoever asked

Where the plan divides the vocabulary, an activation may ask the last member for scores (:mod:`kafila.scoring`): it
sends the activation on as ever, and what it scored behind it.

Everything travels forward to the next neighbour. In a ring of one, next is the member itself and nothing is encoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kafila.errors import ProtocolError
from kafila.ring.frames import (
    Activation,
    Ask,
    Cancel,
    Control,
    Edge,
    Scores,
    Stats,
    Text,
    decode_activation,
    decode_control,
    decode_scores,
    encode_activation,
    encode_control,
    encode_scores,
    is_scores,
)
from kafila.ring.ringedges import RingEdges
from kafila.shard.worker import Failed, Forward, Forwarded, Job, Result, Score, Scored
from kafila.types import NodeId, PathKind, last_rows

MAX_PENDING_BATCHES = 64
"""Batches a member may hold for its worker. The head keeps one a stage on their way, so only a faulty or hostile
neighbour comes near this."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member stands in the ring and what frames must look like there."""

    me: NodeId
    ring: tuple[NodeId, ...]
    """In order, the head first."""
    epoch: int
    hidden: int
    """Numbers in one row."""
    dtype: str
    slots: int
    context: int
    telling_edges: frozenset[NodeId] = frozenset()
    """Members that take and pass on :class:`Edge`."""
    scored_percent: int = 0
    """Of the vocabulary's last rows, which the last member may be asked to score; 0: it never is."""
    vocab: int = 0
    """Rows of the vocabulary; 0: not known (a simulated model), and nothing is checked against it."""
    last_rows: bool = False
    """The last member sends back only each segment's last row (:data:`kafila.ring.agreement.LAST_ROWS`)."""

    @property
    def position(self) -> int:
        """0 for the head."""
        return self.ring.index(self.me)

    @property
    def visiting(self) -> bool:
        """Whether this member is a guest, linked with the head alone."""
        return self.me not in self.ring

    @property
    def before(self) -> NodeId:
        """Whom messages come from."""
        return self.ring[0 if self.visiting else self.position - 1]

    @property
    def after(self) -> NodeId:
        """Whom messages go to."""
        return self.ring[0 if self.visiting else (self.position + 1) % len(self.ring)]

    @property
    def last(self) -> bool:
        """Whether what this member sends reaches the head next, and is not the head's."""
        return not self.visiting and 0 < self.position == len(self.ring) - 1

    @property
    def alone(self) -> bool:
        """Whether this member is the whole ring."""
        return len(self.ring) == 1


@dataclass(frozen=True, slots=True)
class Send:
    """A message for the next neighbour, or, at the head, for a guest."""

    bulk: bool
    data: bytes
    guest: NodeId | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the person at this member."""

    text: Text


@dataclass(frozen=True, slots=True)
class Lately:
    """What the head measured lately."""

    stats: Stats


@dataclass(frozen=True, slots=True)
class BatchDone:
    """Head only, for the trace: one batch has been round.

    ``stage_s`` by ring position (the head's own is embedding, blocks and sampling together), ``circuit_s`` from its
    first job to its tokens, ``rows`` in it, of which ``rows_back`` came back from the last member, ``decode`` whether
    every segment was one token.
    """

    batch: int
    rows: int
    rows_back: int
    decode: bool
    stage_s: tuple[float, ...]
    circuit_s: float


@dataclass(frozen=True, slots=True)
class Broken:
    """This member cannot go on: one line for people."""

    text: str


Event = Said | Lately | BatchDone | Broken


class Stage:
    """A member that holds blocks and no head."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.edges = RingEdges(place.me, place.ring)
        self._cuts = place.last_rows and place.last
        self._jobs: deque[Job] = deque()
        self._jobs_later: deque[Score] = deque()
        """For when nothing waits to be sent."""
        self._sends: deque[Send] = deque()
        self._events: deque[Event] = deque()
        self._passing: dict[int, Activation] = {}
        self._scoring: set[int] = set()
        """Batches that the worker has yet to tell the scores of."""

    def receive(self, bulk: bool, data: bytes, now: float) -> None:
        """A message from the previous neighbour. What the protocol does not allow is an event that names the fault."""
        try:
            if bulk and is_scores(data):
                self._scores(self._of_this_epoch(decode_scores(data)), now)
            elif bulk:
                self._activation(self._checked(decode_activation(data)))
            else:
                self._control(decode_control(data), now)
        except ProtocolError as error:
            self._events.append(Broken(f"the previous member of the ring sent nonsense: {error}"))

    def _checked(self, frame: Activation) -> Activation:
        """Refuse a frame that does not fit this place, before it comes near the device."""
        place = self.place
        if (frame.epoch, frame.hidden, frame.dtype) != (place.epoch, place.hidden, place.dtype):
            raise ProtocolError(
                f"a frame of epoch {frame.epoch}, {frame.hidden} x {frame.dtype} where epoch {place.epoch}, "
                f"{place.hidden} x {place.dtype} was agreed"
            )
        if any(s.slot >= place.slots or s.start + s.length > place.context for s in frame.segments):
            raise ProtocolError("a frame names a cache slot or a position beyond what the plan reserved")
        if frame.score and not place.scored_percent:
            raise ProtocolError("a frame asks for scores, and the plan gives the vocabulary to the head alone")
        return frame

    def _of_this_epoch(self, scores: Scores) -> Scores:
        if scores.epoch != self.place.epoch:
            raise ProtocolError(f"scores of epoch {scores.epoch} where epoch {self.place.epoch} was agreed")
        return scores

    def _scores(self, scores: Scores, now: float) -> None:  # noqa: ARG002  - the head's needs them
        raise ProtocolError("scores are for the head, and were sent to another")

    def _activation(self, frame: Activation) -> None:
        if frame.batch in self._passing or len(self._passing) >= MAX_PENDING_BATCHES:
            raise ProtocolError("more batches at once than the head may have on their way")
        self._passing[frame.batch] = frame
        self._jobs.append(Forward(frame.batch, frame.segments, None, frame.payload, frame.dtype, last_only=self._cuts))

    def _control(self, message: Control, now: float) -> None:
        match message:
            case Text(asker=asker) if asker == self.place.me:
                self._events.append(Said(message))
            case Stats(origin=origin) if origin == self.place.me:
                pass  # it has been round
            case Stats():
                self._events.append(Lately(message))
                self._send_control(message)
            case Text(asker=asker) if asker in self.place.ring:
                self._send_control(message)
            case Edge():
                if self.edges.heard(message):
                    self._tell_edge(message)
            case Ask(asker=asker) | Cancel(asker=asker) if asker in self.place.ring and asker != self.place.me:
                self._to_head(message, now)
            case _:
                raise ProtocolError("a message is from or for somebody who is not in the ring")

    def _to_head(self, message: Ask | Cancel, now: float) -> None:  # noqa: ARG002  - the head's needs the time
        self._send_control(message)

    def ask(self, question: Ask, now: float) -> None:
        """A question typed at this member."""
        self._to_head(question, now)

    def cancel(self, request: str, now: float) -> None:
        """The person at this member no longer wants the answer."""
        self._to_head(Cancel(request, self.place.me), now)

    def edge_seen(self, path: PathKind, rtt_s: float | None, now: float) -> None:
        """How the link to the next member travels now. The others hear when that is news; ask about once a second."""
        if (news := self.edges.seen(path, rtt_s, now)) is not None:
            self._tell_edge(news)

    def _tell_edge(self, edge: Edge) -> None:
        if self.place.after in self.place.telling_edges:
            self._send_control(edge)

    def result(self, result: Result, now: float) -> None:  # noqa: ARG002  - as above
        """What the worker finished."""
        if isinstance(result, Failed):
            self._events.append(Broken(str(result.error)))
        elif isinstance(result, Forwarded):
            self._forwarded(result)
        elif isinstance(result, Scored):
            self._scored(result)

    def _forwarded(self, result: Forwarded) -> None:
        frame = self._passing.pop(result.batch)
        hop_us = (*frame.hop_us, microseconds(result.stage_s))
        segments = last_rows(frame.segments) if self._cuts else frame.segments
        self._send_activation(
            Activation(
                frame.epoch, frame.batch, frame.dtype, frame.hidden, segments, result.hidden, hop_us, frame.score
            )
        )
        if frame.score and self.place.last:
            self._scoring.add(frame.batch)
            self._jobs_later.append(Score(frame.batch, segments, result.hidden, frame.dtype))

    def _scored(self, result: Scored) -> None:
        self._scoring.remove(result.batch)
        self._sends.append(Send(True, encode_scores(Scores(self.place.epoch, result.batch, result.best))))

    def _send_activation(self, frame: Activation) -> None:
        self._sends.append(Send(True, encode_activation(frame)))

    def _send_control(self, message: Control) -> None:
        self._sends.append(Send(False, encode_control(message)))

    def next_job(self) -> Job | None:
        """Work for the worker, in order, or None.

        Scores are begun once the rows have left: a worker that begins at once takes the interpreter, and perhaps the
        processor, from the thread that sends them, and the head waits a millisecond longer.
        """
        if self._jobs_later and not self._sends:
            self._jobs.append(self._jobs_later.popleft())
        return self._jobs.popleft() if self._jobs else None

    def next_send(self) -> Send | None:
        """A message for the next neighbour, or None."""
        return self._sends.popleft() if self._sends else None

    def next_event(self) -> Event | None:
        """What happened, or None."""
        return self._events.popleft() if self._events else None


def microseconds(duration_s: float) -> int:
    """As a frame carries it: whole microseconds, at most what four bytes hold."""
    return min(max(round(duration_s * 1e6), 0), 2**32 - 1)


def median(values: Sequence[float]) -> float:
    """The middle value (the upper one of two); 0 for none."""
    return sorted(values)[len(values) // 2] if values else 0.0
