"""The head's part of serving: questions in, batches round, text out (sans-IO).

The head is the one member that knows the language. It renders a conversation into tokens, lets the scheduler compose
batches, sends each round the ring, draws tokens when it comes back, and streams text to whoever asked. An answer ends
by the scheduler's word (stop id, length, context, cancel) or because its text reached a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kafila.errors import KafilaError, ProtocolError, UsageError
from kafila.question import check
from kafila.ring import schedule
from kafila.ring.frames import Activation, Ask, Cancel, Edge, Scores, Stats, Text, decode_control, encode_control
from kafila.ring.pace import Pace
from kafila.ring.schedule import Batch, Finished, Request, Scheduler, Started, Token, Verdict
from kafila.rolling import Rolled, rolled
from kafila.scoring import SharedDraw, is_decode, is_shared
from kafila.serve import BatchDone, Lately, Place, Said, Send, Stage, median
from kafila.shard.worker import Forward, Forwarded, Result, Sample, Sampled
from kafila.types import FinishReason, NodeId, Question, Segment, SpelledLogprobs, TokenLogprobs, last_rows

STATS_EVERY_S = 1.0
"""How often members hear the head's measurements while something is being answered."""
_WAYS_OUT = "/reset it, leave out its oldest turns (/window on), or host with a larger --context"
_STATS_WINDOW = 64
"""Decode batches a median is taken over: a few seconds of one answer."""


class TextStream(Protocol):
    """One answer's tokens becoming text, whole characters at a time, up to a stop string."""

    def feed(self, token: int) -> str:
        """Text that is now certain."""
        ...

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been met; nothing more comes."""
        ...


class Language(Protocol):
    """The checkpoint's tokenizer and chat template."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """All end-of-turn ids."""
        ...

    def prompt(self, question: Question) -> Sequence[int]:
        """The conversation as token ids, ready for the answer, or the text to continue.

        Raises ModelError when the template refuses it, UsageError when it cannot be meant.
        """
        ...

    def opening(self, prompt: Sequence[int]) -> str:
        """What of the answer a conversation's prompt has written already: the tag that begins a model's thinking."""
        ...

    def spell(self, token: int) -> bytes:
        """The bytes that a token adds to a text, or the name of a special one."""
        ...

    def stream(self, stop: Sequence[str]) -> TextStream:
        """A fresh stream for one answer."""
        ...


@dataclass(slots=True)
class _Answer:
    ask: Ask
    text: TextStream
    opening: str
    """Text of the answer's that the prompt ended with, not yet told."""
    fitted: Rolled
    asked_at: float
    place: int = 0
    """In the queue, as it was told last."""
    started_at: float | None = None
    reused_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    answer_tokens: int = 0
    logprobs: list[SpelledLogprobs] = field(default_factory=list)
    """Not yet told."""


@dataclass(slots=True)
class _Circuit:
    """A batch on its way round."""

    batch: Batch
    back: tuple[Segment, ...]
    """What comes back of the batch's segments, one for one: all their rows, or each one's last."""
    began_at: float
    own_s: float = 0.0
    hop_us: tuple[int, ...] = ()
    shared: SharedDraw | None = None
    """Where the last member was asked for scores."""


class Head(Stage):
    """The member that holds the head, and its own blocks."""

    def __init__(self, place: Place, language: Language, now: float) -> None:
        super().__init__(place)
        self._only_last_back = place.last_rows or place.alone
        self._language = language
        self._pace = Pace(len(place.ring))
        self._scheduler = Scheduler(slots=place.slots, context=place.context, pace=self._pace)
        self._answers: dict[str, _Answer] = {}
        self._circuits: dict[int, _Circuit] = {}
        self._lately: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_STATS_WINDOW)
        self._stats_due = now
        self._drawn = 0
        self._guests: dict[NodeId, bool] = {}
        """Whether each takes :class:`Edge`."""

    # -- guests -------------------------------------------------------------------------------------------------------

    def guest_came(self, guest: NodeId, *, takes_edges: bool = False) -> None:
        """Somebody outside the ring may ask over a link of its own."""
        self._guests[guest] = takes_edges
        if takes_edges:
            self._sends.extend(Send(False, encode_control(edge), guest) for edge in self.edges)

    def guest_left(self, guest: NodeId, now: float) -> None:
        """Nobody reads a guest's answers any more: their slots are free at once."""
        self._guests.pop(guest, None)
        for answer in [answer for answer in self._answers.values() if answer.ask.asker == guest]:
            self._scheduler.cancel(answer.ask.request)
        self._pump(now)

    def receive_guest(self, guest: NodeId, data: bytes, now: float) -> None:
        """A message over a guest's link. It may ask for itself and cancel that; whatever else it says changes nothing,
        for nobody's session depends on a guest."""
        if guest not in self._guests:
            return
        try:
            message = decode_control(data)
        except ProtocolError:
            return
        if isinstance(message, Ask | Cancel) and message.asker == guest:
            self._to_head(message, now)

    def _tell_edge(self, edge: Edge) -> None:
        super()._tell_edge(edge)
        self._sends.extend(Send(False, encode_control(edge), guest) for guest, takes in self._guests.items() if takes)

    # -- questions ----------------------------------------------------------------------------------------------------

    def _to_head(self, message: Ask | Cancel, now: float) -> None:
        if isinstance(message, Cancel):
            answer = self._answers.get(message.request)
            if answer is not None and answer.ask.asker == message.asker:
                self._scheduler.cancel(message.request)
        else:
            self._ask(message, now)
        self._pump(now)

    def _ask(self, ask: Ask, now: float) -> None:
        try:
            check(ask.question)
            fitted = rolled(ask.question, self._language.prompt, self.place.context)
            if not fitted.prompt:
                raise UsageError("there is nothing to continue: the prompt is empty")
        except KafilaError as error:
            self._refuse(ask, FinishReason.ERROR, str(error))
            return
        question = ask.question
        stop_ids = self._language.stop_ids
        request = Request(ask.request, ask.asker, fitted.prompt, question.sampling, question.max_tokens, stop_ids)
        match self._scheduler.submit(request):
            case Verdict.ACCEPTED:
                opening = self._language.opening(fitted.prompt) if question.prompt is None else ""
                stream = self._language.stream(question.stop)
                self._answers[ask.request] = _Answer(ask, stream, opening, fitted, now)
                self._tell_place(self._answers[ask.request])
            case Verdict.TOO_LONG:
                text = (
                    f"the conversation is {len(fitted.prompt)} tokens, and the session holds {self.place.context}: "
                    f"{_WAYS_OUT}"
                )
                self._refuse(ask, FinishReason.CONTEXT, text)
            case Verdict.QUEUE_FULL:
                text = f"{schedule.MAX_WAITING} questions are waiting already: try again in a moment"
                self._refuse(ask, FinishReason.BUSY, text)
            case Verdict.DUPLICATE:
                self._refuse(ask, FinishReason.ERROR, "that question was asked already")

    def _refuse(self, ask: Ask, reason: FinishReason, note: str) -> None:
        self._say(ask, "", finish=reason, note=note)

    def _tell_place(self, answer: _Answer) -> None:
        """Who waits hears where in the queue, and again when that changes."""
        place = self._scheduler.position(answer.ask.request)
        if place is not None and place != answer.place:
            answer.place = place
            self._say(answer.ask, "", note=f"waiting: {place} in the queue")

    def _say(self, ask: Ask, delta: str, *, finish: FinishReason | None = None, note: str = "") -> None:
        self._emit(Text(ask.request, ask.asker, delta, finish, note))

    def _told_so_far(self, answer: _Answer, delta: str) -> Text:
        """A part of an answer, with what is known of it by now."""
        logprobs, answer.logprobs = tuple(answer.logprobs), []
        started = answer.asked_at if answer.started_at is None else answer.started_at
        first = started if answer.first_token_at is None else answer.first_token_at
        return Text(
            answer.ask.request,
            answer.ask.asker,
            delta,
            prompt_tokens=len(answer.fitted.prompt),
            reused_tokens=answer.reused_tokens,
            answer_tokens=answer.answer_tokens,
            queue_s=started - answer.asked_at,
            prefill_s=first - started,
            decode_s=max(answer.last_token_at - first, 0.0),
            logprobs=logprobs,
            left_out=answer.fitted.left_out,
        )

    def _emit(self, text: Text) -> None:
        if text.asker == self.place.me:
            self._events.append(Said(text))
        elif text.asker in self._guests:
            self._sends.append(Send(False, encode_control(text), text.asker))
        elif text.asker in self.place.ring:  # and not a guest that has gone
            self._send_control(text)

    def _pump(self, now: float) -> None:
        """Tell what the scheduler has to tell, then send round what it has ready."""
        while (event := self._scheduler.next_event()) is not None:
            self._told(event, now)
        while (batch := self._scheduler.next_batch()) is not None:
            back = last_rows(batch.segments) if self._only_last_back else batch.segments
            self._circuits[batch.number] = _Circuit(batch, back, now)
            alone, dtype = self.place.alone, self.place.dtype
            self._jobs.append(Forward(batch.number, batch.segments, batch.tokens, None, dtype, last_only=alone))
        if self._lately and (now >= self._stats_due or self._scheduler.idle):
            self._stats_due = now + STATS_EVERY_S
            self._tell_stats()

    def _told(self, event: schedule.Event, now: float) -> None:
        answer = self._answers.get(event.name)
        if answer is None:
            return
        match event:
            case Started(_, reused):
                answer.started_at, answer.reused_tokens = now, reused
                for waiting in self._answers.values():
                    self._tell_place(waiting)
            case Token(_, token):
                self._token(answer, token, now)
            case Finished():
                self._finished(answer, event)

    def _token(self, answer: _Answer, token: int, now: float) -> None:
        self._drawn += 1
        answer.answer_tokens += 1
        if answer.first_token_at is None:
            answer.first_token_at = now
        answer.last_token_at = now
        delta, answer.opening = answer.opening + answer.text.feed(token), ""
        if delta or answer.logprobs:
            self._emit(self._told_so_far(answer, delta))
        if answer.text.stopped:
            self._scheduler.cancel(answer.ask.request, FinishReason.STOP)

    def _finished(self, answer: _Answer, event: Finished) -> None:
        del self._answers[event.name]
        full = f"the session's context of {self.place.context} tokens is full: {_WAYS_OUT}"
        note = full if event.reason is FinishReason.CONTEXT else ""
        self._emit(replace(self._told_so_far(answer, answer.text.finish()), finish=event.reason, note=note))

    def result(self, result: Result, now: float) -> None:
        """What the worker finished; a drawn token may end an answer and start the next batch."""
        if isinstance(result, Sampled):
            circuit = self._circuits[result.batch]
            if circuit.shared is None:
                self._sampled(result, now)
                self._pump(now)
            else:
                circuit.shared.sampled = result
                self._draw_shared(circuit.shared, now)
        else:
            super().result(result, now)

    def _forwarded(self, result: Forwarded) -> None:
        circuit = self._circuits[result.batch]
        circuit.own_s += result.stage_s
        place = self.place
        if place.alone:
            self._sample(circuit, result.hidden)
            return
        if place.scored_percent and is_shared(circuit.batch, len(self._circuits)):
            circuit.shared = SharedDraw.of(place.vocab, place.scored_percent)
        segments, score = circuit.batch.segments, circuit.shared is not None
        self._send_activation(
            Activation(place.epoch, result.batch, result.dtype, place.hidden, segments, result.hidden, score=score)
        )

    def _activation(self, frame: Activation) -> None:
        circuit = self._circuits.get(frame.batch)
        due = None if circuit is None else (circuit.back, circuit.shared is not None)
        if circuit is None or (frame.segments, frame.score) != due or circuit.hop_us:
            raise ProtocolError("a batch came back that was not sent, or not as it was sent")
        if len(frame.hop_us) != len(self.place.ring) - 1:
            raise ProtocolError(f"a batch came back after {len(frame.hop_us)} members instead of all")
        circuit.hop_us = frame.hop_us
        self._sample(circuit, frame.payload)

    def _sample(self, circuit: _Circuit, hidden: bytes) -> None:
        batch, dtype, partial = circuit.batch, self.place.dtype, circuit.shared is not None
        self._jobs.append(
            Sample(batch.number, circuit.back, batch.sampling, hidden, dtype, batch.histories, partial=partial)
        )

    def _scores(self, scores: Scores, now: float) -> None:
        circuit = self._circuits.get(scores.batch)
        if circuit is None or circuit.shared is None:
            raise ProtocolError("scores came that were not asked for")
        circuit.shared.scored(scores.best, circuit.batch)
        self._draw_shared(circuit.shared, now)

    def _draw_shared(self, shared: SharedDraw, now: float) -> None:
        if (whole := shared.whole()) is not None:
            self._sampled(whole, now)
            self._pump(now)

    def _sampled(self, result: Sampled, now: float) -> None:
        circuit = self._circuits.pop(result.batch)
        batch = circuit.batch
        stage_s = (circuit.own_s + result.stage_s, *(hop / 1e6 for hop in circuit.hop_us))
        decode = is_decode(batch)
        rows_back = sum(segment.length for segment in circuit.back)
        done = BatchDone(batch.number, len(batch.tokens), rows_back, decode, stage_s, now - circuit.began_at)
        self._events.append(done)
        self._pace.record(batch.segments, stage_s, done.circuit_s)
        if decode:
            self._lately.append((stage_s, done.circuit_s))
        for name, logprobs in zip(self._scheduler.riders(result.batch), result.logprobs, strict=False):
            if logprobs is not None and logprobs.token not in self._language.stop_ids and name in self._answers:
                self._answers[name].logprobs.append(self._spelled(logprobs))
        self._scheduler.completed(result.batch, result.tokens)

    def _spelled(self, logprobs: TokenLogprobs) -> SpelledLogprobs:
        spell = self._language.spell
        top = tuple((spell(token), logprob) for token, logprob in logprobs.top)
        return SpelledLogprobs(spell(logprobs.token), logprobs.logprob, top)

    def _tell_stats(self) -> None:
        stages = zip(*(stage_s for stage_s, _ in self._lately), strict=True)
        circuit_s = median([circuit for _, circuit in self._lately])
        stage_s = tuple(median(times) for times in stages)
        running, waiting = self._scheduler.running, self._scheduler.waiting
        stats = Stats(self.place.me, stage_s, circuit_s, running, waiting, self._drawn)
        self._events.append(Lately(stats))
        if not self.place.alone:
            self._send_control(stats)
        self._sends.extend(Send(False, encode_control(stats), guest) for guest in self._guests)
        if self._scheduler.idle:
            self._lately.clear()
