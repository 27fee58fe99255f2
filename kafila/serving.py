"""Serving at one member: the stage, its worker and the people who ask here (Trio)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

import trio

from kafila.backend import Backend, Duty
from kafila.errors import DeviceError
from kafila.head import Head
from kafila.mailbox import Mailbox
from kafila.mesh import Mesh
from kafila.question import check
from kafila.ring.agreement import ModelOffer
from kafila.ring.frames import ITEM_BYTES, Ask, Edge, Stats, Text
from kafila.serve import BatchDone, Broken, Event, Lately, Place, Said, Stage
from kafila.shard.worker import Coming, Failed, Loaded, Result
from kafila.trace import Recorder
from kafila.types import FinishReason, NodeId, Question
from kafila.visit import Visit

EDGE_LOOK_S = 1.0
"""How often a member looks how its link to the next travels. :meth:`ServingRing.drain` is called at least as often, for
the links' heartbeats."""


class ServingRing:
    """This member's share of the ring. :meth:`drain` moves what has happened; the node calls it around every flush.

    ``poke`` makes the node's endpoint send what was queued; ``on_broken`` hears, once, that this member cannot go on,
    and ``on_coming`` how much of its shard has been fetched.
    """

    def __init__(
        self,
        place: Place,
        mesh: Mesh,
        recorder: Recorder,
        *,
        poke: Callable[[], None],
        on_broken: Callable[[str], None],
        on_coming: Callable[[Coming], None],
    ) -> None:
        self.stats: Stats | None = None
        """What the head measured lately."""
        self.loaded = trio.Event()
        """Set once the worker holds its shard."""
        self._place = place
        self._before, self._after = place.before, place.after  # asked for with every message
        self._mesh = mesh
        self._recorder = recorder
        self._poke = poke
        self._on_broken = on_broken
        self._on_coming = on_coming
        self._stage: Stage | None = Visit(place) if place.visiting else None  # the head may have spoken already
        self._guests: dict[NodeId, bool] = {}
        self._edge_due = inf
        self._mailboxes: dict[str, Mailbox] = {}
        self._numbers = itertools.count(1)
        self._running = False

    async def visit(self) -> None:
        """A guest's: nothing to load, and no worker."""
        self.loaded.set()
        await trio.sleep_forever()

    async def run(self, backend: Backend, offer: ModelOffer, duty: Duty) -> None:
        """Load the shard, then serve until cancelled; the worker is stopped on the way out."""
        token = trio.lowlevel.current_trio_token()

        def on_result(result: Result) -> None:
            # On the worker's thread. Straight to where it is used: waking a task that waits for results would put
            # another turn of the event loop between every two stages.
            token.run_sync_soon(self._take, result)

        if duty.holds_head:
            self._stage = head = Head(self._place, await backend.language(offer), trio.current_time())
            for guest, takes_edges in self._guests.items():
                head.guest_came(guest, takes_edges=takes_edges)
        else:
            self._stage = Stage(self._place)
        self._worker = await backend.worker(offer, duty, on_result)
        self._running = True
        self._worker.start()
        try:
            await trio.sleep_forever()
        finally:
            self._running = False
            self._worker.stop()

    def _take(self, result: Result) -> None:
        if not self._running:
            return  # finished while we were leaving
        if isinstance(result, Loaded):
            self.loaded.set()
        elif isinstance(result, Coming):
            self._on_coming(result)
        elif isinstance(result, Failed) and not self.loaded.is_set():
            self._on_broken(str(result.error))
        elif self._stage is not None:
            self._stage.result(result, trio.current_time())
        self._poke()

    def receive(self, sender: NodeId, data: bytes, *, bulk: bool) -> None:
        """A message of a ring neighbour's, or of a guest's. In a ring of two the neighbour is both the one before and
        the one after."""
        if self._stage is not None and sender == self._before:
            self._stage.receive(bulk, data, trio.current_time())
        elif isinstance(self._stage, Head) and not bulk:
            self._stage.receive_guest(sender, data, trio.current_time())

    def guest_came(self, guest: NodeId, *, takes_edges: bool) -> None:
        """At the head: a guest is linked, and may ask once the ring serves."""
        self._guests[guest] = takes_edges
        if isinstance(self._stage, Head):
            self._stage.guest_came(guest, takes_edges=takes_edges)

    def guest_left(self, guest: NodeId) -> None:
        """At the head: a guest is gone."""
        self._guests.pop(guest, None)
        if isinstance(self._stage, Head):
            self._stage.guest_left(guest, trio.current_time())
        self._poke()

    def begin_telling_edges(self) -> None:
        """Everybody serves, and so hears what is told round the ring."""
        if not self._place.visiting and not self._place.alone:
            self._edge_due = trio.current_time()

    def edge_from(self, member: NodeId) -> Edge | None:
        """What is known of the link from a member of the ring to the next; None: nothing."""
        return None if self._stage is None else self._stage.edges.of(member)

    def _look_at_edge(self, stage: Stage, now: float) -> None:
        self._edge_due = now + EDGE_LOOK_S
        if (state := self._mesh.link_state(self._after)) is not None:
            stage.edge_seen(state.kind, state.rtt_s, now)

    def drain(self) -> None:
        """Give jobs to the worker, messages to the link and events to whom they are for."""
        stage = self._stage
        if stage is None:
            return
        if (now := trio.current_time()) >= self._edge_due:
            self._look_at_edge(stage, now)
        while (job := stage.next_job()) is not None:
            try:
                self._worker.submit(job)
            except DeviceError as error:
                self._on_broken(str(error))
        while (send := stage.next_send()) is not None:
            self._mesh.send(send.guest or self._after, send.data, bulk=send.bulk)
        while (event := stage.next_event()) is not None:
            self._heard(event)

    def _heard(self, event: Event) -> None:
        match event:
            case Said(text):
                if (mailbox := self._mailboxes.get(text.request)) is not None:
                    mailbox.put(text)
                if text.finish is not None:
                    self._recorder.record("answer", trio.current_time(), _answer_facts(text))
            case Lately(stats):
                self.stats = stats
            case Broken(text):
                self._on_broken(text)
            case BatchDone():
                self._recorder.record("batch", trio.current_time(), _batch_facts(event, self._place))

    @asynccontextmanager
    async def answer(self, question: Question) -> AsyncIterator[Mailbox]:
        """Ask the ring; the answer's parts as they come. Leaving early cancels it: its slot is free in a circuit.

        Raises UsageError for a question that cannot be meant, DeviceError before this member serves.
        """
        check(question)
        await trio.lowlevel.checkpoint()
        stage = self._stage
        if stage is None:
            raise DeviceError("this member is still loading its share of the model: ask again when it serves")
        request = f"{self._place.me.hex()}-{next(self._numbers)}"
        mailbox = self._mailboxes[request] = Mailbox()
        stage.ask(Ask(request, self._place.me, question), trio.current_time())
        self._poke()
        try:
            yield mailbox
        finally:
            del self._mailboxes[request]
            if not mailbox.finished:
                stage.cancel(request, trio.current_time())
                self._poke()

    def end_answers(self, note: str) -> None:
        """The session is over: everybody who waits here keeps what they have and is told."""
        for request, mailbox in self._mailboxes.items():
            mailbox.put(Text(request, self._place.me, "", FinishReason.MEMBER_LEFT, note))


def _answer_facts(text: Text) -> dict[str, object]:
    return {
        "finish": text.finish.value if text.finish else "",
        "prompt_tokens": text.prompt_tokens,
        "answer_tokens": text.answer_tokens,
        "reused_tokens": text.reused_tokens,
        "first_token_s": round(text.queue_s + text.prefill_s, 6),
        "queue_s": round(text.queue_s, 6),
        "rest_s": round(text.decode_s, 6),
    }


def _batch_facts(done: BatchDone, place: Place) -> dict[str, object]:
    row_bytes = 0 if place.alone else place.hidden * ITEM_BYTES[place.dtype]
    return {
        "batch": done.batch,
        "rows": done.rows,
        "phase": "decode" if done.decode else "prefill",
        "stage_s": [round(stage, 6) for stage in done.stage_s],
        "circuit_s": round(done.circuit_s, 6),
        "hop_bytes": done.rows * row_bytes,
        "back_bytes": done.rows_back * row_bytes,
    }
