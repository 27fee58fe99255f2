"""The heart of the virtual network: one heap of future events, run between tasks, and what all parts share.

Order is a matter of structure, never of luck. Events at the same instant run by *rank* (each link has its own, given
when the topology is built) and, within a rank, in the order they were made. An instant's events run
only once every task is blocked, so the order in which Trio happened to step the machines' tasks does not show.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import ParamSpec

import outcome
import trio

from sims.clock import events_between_jumps
from sims.packet import Drop, Packet
from sims.trace import Record, Sink, What

_P = ParamSpec("_P")

_CONTROL_RANK = 0
"""Scheduled changes to the network come before the packets of the same instant."""

Event = tuple[float, int, int, Callable[[float], None]]
"""When, rank, serial within the rank, and what to do; it is told its own time."""


class Fabric:
    """Clock, events, trace sinks, counters and seeded randomness shared by every part of one virtual network."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drops: Counter[Drop] = Counter()
        self.instants = 0
        """At how many times something happened: an idle network costs none."""
        self.sinks: list[Sink] = []
        self._heap: list[Event] = []
        self._ranks = _CONTROL_RANK
        self._control_serial = 0
        self._event_time: float | None = None

    def random(self, name: str) -> Random:
        """A generator of its own for the part called ``name``: adding a part never changes another's draws."""
        return Random(f"{self.seed}/{name}")

    def new_rank(self) -> int:
        """The next place in the order of simultaneous events."""
        self._ranks += 1
        return self._ranks

    @property
    def now(self) -> float:
        """The time of the event being run, or the clock's."""
        return trio.current_time() if self._event_time is None else self._event_time

    def push(self, time_s: float, rank: int, serial: int, action: Callable[[float], None]) -> None:
        """Run ``action(time_s)`` at ``time_s``. (rank, serial) must be unique among events of one time."""
        heapq.heappush(self._heap, (time_s, rank, serial, action))

    def at(self, time_s: float, action: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Do something at an instant of the Trio clock (a mock clock starts at zero); the past means at once."""

        def run(_now: float) -> None:
            action(*args, **kwargs)

        self._control_serial += 1
        self.push(time_s, _CONTROL_RANK, self._control_serial, run)

    async def run(self) -> None:
        """Deliver until cancelled. Exactly one task does this for a network; it raises what an event raises."""
        task = trio.lowlevel.current_task()

        def run_due() -> None:
            ran = outcome.capture(self._run_due, trio.current_time())
            if isinstance(ran, outcome.Error):
                trio.lowlevel.reschedule(task, ran)

        def leave(_raise_cancel: object) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED

        with events_between_jumps(self._next_event, run_due):
            await trio.lowlevel.wait_task_rescheduled(leave)

    def _next_event(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The network delivers within this block."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.run)
            yield
            nursery.cancel_scope.cancel()

    def _run_due(self, now: float) -> None:
        self.instants += 1
        try:
            while self._heap and self._heap[0][0] <= now:
                self._event_time, _, _, action = heapq.heappop(self._heap)
                action(self._event_time)
        finally:
            self._event_time = None

    def drop(self, where: str, why: Drop, packet: Packet, now: float) -> None:
        """Count a packet that goes no further, and say why to whoever listens."""
        self.drops[why] += 1
        if self.sinks:
            self.record(now, where, What.DROPPED, packet, why.value)

    def note(self, where: str, words: str) -> None:
        """Something that is no packet."""
        if self.sinks:
            self.record(self.now, where, What.NOTE, None, words)

    def record(self, now: float, where: str, what: What, packet: Packet | None, detail: str = "") -> None:
        """Tell every sink. Callers on a hot path ask ``if fabric.sinks`` first."""
        record = Record(now, where, what, packet, detail)
        for sink in self.sinks:
            sink(record)
