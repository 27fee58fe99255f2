"""Runs a scenario in virtual time, the same way every time."""

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
