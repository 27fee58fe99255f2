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


def run_virtual(main: Callable[[*_Args], Awaitable[_Result]], *args: *_Args, seed: int = 0) -> _Result:
    """``trio.run`` under a clock that starts at zero and jumps over every wait.

    Tasks that are ready at the same instant are stepped in an order that ``seed`` decides.
    """
    with _steps_decided_by(seed):
        return trio.run(main, *args, clock=MockClock(autojump_threshold=0))


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
    where nothing is left to do, by a private method; that is what is put in place here.

    Raises TypeError under another clock than Trio's own with ``autojump_threshold=0``.
    """
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, MockClock) or clock.autojump_threshold != 0:
        raise TypeError("the virtual network lives in virtual time: MockClock(autojump_threshold=0)")
    to_next_deadline = clock._autojump

    def jump() -> None:
        event_at = next_event()
        if event_at >= _run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline():
            to_next_deadline()
            return
        while (left := event_at - clock.current_time()) > 0:  # a second time where the first sum was rounded
            clock.jump(left)
        run_events()

    clock._autojump = jump  # type: ignore[method-assign]  # that is the point
    try:
        yield
    finally:
        clock._autojump = to_next_deadline  # type: ignore[method-assign]  # as above
