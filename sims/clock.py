"""Virtual time: running in it the same way every time, and events between which it jumps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

import trio
from trio._core import _run
from trio.testing import MockClock

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")

_EVENTS_A_TURN = 1000
"""Instants in which no task is woken before Trio's loop has a turn again, and with it whoever presses Ctrl-C."""


def run_virtual(main: Callable[[*_Args], Awaitable[_Result]], *args: *_Args, seed: int = 0) -> _Result:
    """``trio.run`` under a clock that starts at zero and jumps over every wait.

    Tasks that are ready at the same instant are stepped in an order that ``seed`` decides.
    """
    with _steps_decided_by(seed):
        return trio.run(main, *args, clock=_plain_clock())


def _plain_clock() -> MockClock:
    """Trio's mock clock, which is asked for the time hundreds of thousands of times a run, without the real one that it
    would look at and multiply by zero each time."""
    clock = MockClock(autojump_threshold=0)
    now = 0.0

    def current_time() -> float:
        return now

    def jump(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock.current_time = current_time  # type: ignore[method-assign]  # the class is final
    clock.jump = jump  # type: ignore[method-assign]  # as above
    return clock


@contextmanager
def _steps_decided_by(seed: int) -> Iterator[None]:
    """Take the chance out of Trio's scheduling.

    Trio shuffles simultaneous tasks with a generator of its own, and offers its test plugin two private names to make
    that repeatable under Hypothesis; we set the same two.
    """
    before = _run._ALLOW_DETERMINISTIC_SCHEDULING
    state = _run._r.getstate()
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # declared Final; Trio itself sets it so
    _run._r.seed(seed)
    try:
        yield
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]  # as above
        _run._r.setstate(state)


@contextmanager
def events_between_jumps(next_event: Callable[[], float], run_events: Callable[[], None]) -> Iterator[None]:
    """Within the block the clock stops at every ``next_event()`` (infinite: there is none) on its way, and calls
    ``run_events``, once no task is left to take a step at that instant or before.

    A task that slept until its next event and then waited for all others to be blocked would be the same; but it would
    take four turns of Trio's loop an event, and packets are most of what a simulation does. Trio's own clock jumps
    where nothing is left to do, by a private method; that is what is put in place here. So ``run_events`` is no
    task's: it may not wait, and what it raises would end Trio. What it wakes takes its step in the same turn.

    Raises TypeError under another clock than Trio's own with ``autojump_threshold=0``.
    """
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, MockClock) or clock.autojump_threshold != 0:
        raise TypeError("the virtual network lives in virtual time: MockClock(autojump_threshold=0)")
    runner = _run.GLOBAL_RUN_CONTEXT.runner
    to_next_deadline = clock._autojump

    def jump() -> None:
        for _ in range(_EVENTS_A_TURN):
            event_at = next_event()
            if event_at >= runner.deadlines.next_deadline():
                to_next_deadline()
                runner.deadlines.expire(clock.current_time())
                return
            while (left := event_at - clock.current_time()) > 0:  # a second time where the first sum was rounded
                clock.jump(left)
            run_events()
            if runner.runq or runner.entry_queue.size():  # the latter: ``run_sync_soon``, as from a thread
                return

    clock._autojump = jump  # type: ignore[method-assign]  # that is the point
    try:
        yield
    finally:
        clock._autojump = to_next_deadline  # type: ignore[method-assign]  # as above
