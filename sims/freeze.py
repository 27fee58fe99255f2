"""Machines that sleep: their tasks take no step until they wake."""

from __future__ import annotations

import contextvars
from collections import deque

import trio
from trio._core import _run

current_machine: contextvars.ContextVar[str | None] = contextvars.ContextVar("current_machine", default=None)
"""The machine a task runs on. Trio hands it down to every task that a task starts."""


class Freezer(trio.abc.Instrument):
    """Keeps the tasks of sleeping machines from running.

    Trio has one clock a run and no way to stop some tasks, so this takes a frozen task out of Trio's run queue the
    moment it becomes runnable (its timer went off, say) and puts it back on thawing. To Trio it looks blocked
    meanwhile. The run queue is private to Trio: with the seeding in `sims.clock`, the simulator's one
    liberty of the kind.
    """

    def __init__(self) -> None:
        self._frozen: dict[str, list[trio.lowlevel.Task]] = {}

    def freeze(self, machine: str) -> None:
        """From now on no task of ``machine`` runs. Called while all of them are blocked."""
        if not self._frozen:
            trio.lowlevel.add_instrument(self)
        self._frozen.setdefault(machine, [])

    def thaw(self, machine: str) -> None:
        """Let ``machine``'s tasks go on where they were."""
        held = self._frozen.pop(machine, [])
        if not self._frozen:
            trio.lowlevel.remove_instrument(self)
        _run_queue().extend(held)

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        """Trio has put ``task`` at the end of its run queue."""
        machine = task.context.get(current_machine)
        if machine in self._frozen:
            _run_queue().remove(task)
            self._frozen[machine].append(task)


def _run_queue() -> deque[trio.lowlevel.Task]:
    return _run.GLOBAL_RUN_CONTEXT.runner.runq
