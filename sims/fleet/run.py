"""Sessions beside one another, as many as there are processors: a trial is one process's work and needs no other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from sims.fleet.session import run_trial
from sims.fleet.trial import Outcome, Refused, Trial


def sessions_of(trial: Trial, count: int) -> list[Trial]:
    """The same trial ``count`` times, each with a seed of its own."""
    return [replace(trial, seed=trial.seed * 1000 + number) for number in range(count)]


def run_all(
    trials: Sequence[Trial], jobs: int | None = None, tell: Callable[[int], None] = lambda _done: None
) -> list[Outcome | Refused]:
    """Every trial's outcome, in order. ``tell`` hears how many are done. Raises what `run_trial` raises."""
    jobs = min(jobs or os.cpu_count() or 1, len(trials))
    found = []
    if jobs == 1:
        for trial in trials:
            found.append(run_trial(trial))
            tell(len(found))
        return found
    # Not forked: a copy of a process with threads may hang.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for outcome in pool.map(run_trial, trials):
            found.append(outcome)
            tell(len(found))
    return found
