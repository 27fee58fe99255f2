"""Runs scenarios, each seed in virtual time of its own, on as many processes as there are processors."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from kafila.errors import KafilaError
from sims.clock import run_virtual
from sims.scenarios.catalogue import SCENARIOS
from sims.scenarios.scenario import Figures, Outcome, Scenario, Target, Unmet
from sims.topology import VirtualNetwork
from sims.trace import Sink

_NICENESS = 5
"""A run takes every processor for minutes; whatever else the machine does goes first."""

_COLLECT_EVERY = 50_000
"""New objects before the garbage collector looks: a tenth of a second's, and a few megabytes."""


@dataclass(frozen=True, slots=True)
class Run:
    """One scenario with one seed."""

    name: str
    seed: int
    failure: str | None
    outcome: Outcome
    took_s: float
    """Of this process's processor time."""


@dataclass(slots=True)
class Summary:
    """One scenario with all its seeds."""

    scenario: Scenario
    runs: list[Run] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Why it failed: seeds in which something did not hold, and figures beyond their targets."""
        found = [f"seed {run.seed}: {run.failure}" for run in self.runs if run.failure is not None]
        for name, target in self.scenario.targets.items():
            samples = self.figures().get(name, [])
            for what, value, limit in zip(("median", "p95"), _median_p95(samples), target, strict=True):
                if not samples or value > limit:
                    found.append(f"{name}: {what} {value:.4g}, to be at most {limit:g}")
        return found

    @property
    def is_as_expected(self) -> bool:
        """Passed; or failed, and known to."""
        return bool(self.failures) == (self.scenario.known_failure is not None)

    def figures(self) -> Figures:
        """The samples of all seeds together."""
        pooled: Figures = {}
        for run in self.runs:
            for name, samples in run.outcome.figures.items():
                pooled.setdefault(name, []).extend(samples)
        return pooled

    def line(self) -> str:
        """One line for a person."""
        if not self.failures:
            verdict = "passed" if self.scenario.known_failure is None else "PASSED, and was not expected to"
        else:
            verdict = "FAILED" if self.scenario.known_failure is None else "known failure"
        figures = ", ".join(_show(n, s, self.scenario.targets.get(n)) for n, s in self.figures().items() if s)
        words = [f"{verdict:<14} {self.scenario.name:<34} {figures}".rstrip()]
        words += [f"        {failure}" for failure in self.failures[:3]]
        if self.failures and self.scenario.known_failure is not None:
            words.append(f"        known: {self.scenario.known_failure}")
        return "\n".join(words)


def _median_p95(samples: Sequence[float]) -> tuple[float, float]:
    if not samples:
        return float("nan"), float("nan")
    ordered = sorted(samples)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]


def _show(name: str, samples: Sequence[float], target: Target | None) -> str:
    median, p95 = _median_p95(samples)
    shown = f"{median:.4g}" if median == p95 else f"{median:.4g}/{p95:.4g}"
    return f"{name} {shown}" + (f" (<= {target.median:g}/{target.p95:g})" if target else "")


def figures_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """Medians and 95th percentiles, by ``scenario.figure.median``."""
    found: dict[str, float] = {}
    for summary in summaries:
        for name, samples in summary.figures().items():
            if samples:
                found[f"{summary.scenario.name}.{name}.median"], found[f"{summary.scenario.name}.{name}.p95"] = (
                    _median_p95(samples)
                )
    return found


def targets_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """The limits of those figures that have some, under the same names."""
    return {
        f"{summary.scenario.name}.{name}.{what}": limit
        for summary in summaries
        for name, target in summary.scenario.targets.items()
        for what, limit in zip(("median", "p95"), target, strict=True)
    }


def run_once(scenario: Scenario, seed: int, sink: Sink | None = None) -> Run:
    """One scenario, one seed, in virtual time. Not to be called inside Trio."""
    began = time.process_time()
    outcome, failures = Outcome(), list[str]()
    try:
        outcome = run_virtual(_in_network, scenario, seed, sink, seed=seed)
    except* (Unmet, KafilaError, AssertionError) as group:
        failures += [f"{_kind(error)}{error}" for error in _leaves(group)]
    except* trio.TooSlowError:
        failures.append("something that was waited for did not happen in time")
    return Run(scenario.name, seed, "; ".join(failures) or None, outcome, time.process_time() - began)


def _kind(error: BaseException) -> str:
    return "" if isinstance(error, Unmet) else f"{type(error).__name__}: "


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _in_network(scenario: Scenario, seed: int, sink: Sink | None) -> Outcome:
    net = VirtualNetwork(seed)
    if sink is not None:
        net.fabric.sinks.append(sink)
    return await scenario.body(net)


def run_all(scenarios: Sequence[Scenario], seeds: Sequence[int]) -> Iterator[Summary]:
    """Every scenario with every seed; a summary as soon as a scenario's last seed is done."""
    jobs = [(scenario.name, seed) for scenario in scenarios for seed in seeds[: scenario.max_seeds]]
    processes = min(os.cpu_count() or 1, len(jobs))
    summaries = {scenario.name: Summary(scenario) for scenario in scenarios}
    with _runs(jobs, processes) as runs:
        for run in runs:
            summary = summaries[run.name]
            summary.runs.append(run)
            if len(summary.runs) == len(seeds[: summary.scenario.max_seeds]):
                yield summary


@contextmanager
def _runs(jobs: Sequence[tuple[str, int]], processes: int) -> Iterator[Iterator[Run]]:
    """The runs of all jobs, in their order."""
    if processes == 1:
        yield map(_job, jobs)
        return
    # Spawned, not forked: a forked child would share the parent's Trio and the state of its libraries.
    with multiprocessing.get_context("spawn").Pool(processes, _prepare) as pool:
        yield pool.imap(_job, jobs)


def _prepare() -> None:
    """Make a process fit for hundreds of runs: modest, and without a collector that looks through the libraries again
    and again."""
    os.nice(_NICENESS)
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY)


def _job(job: tuple[str, int]) -> Run:
    name, seed = job
    return run_once(SCENARIOS[name], seed)
