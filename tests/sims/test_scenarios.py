"""Every scenario of ``kafila-sim nat`` with one seed: what must hold holds, and what is known to fail still does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from kafila.errors import UsageError
from sims.scenarios.catalogue import SCENARIOS, find
from sims.scenarios.runner import Run, Summary, run_once
from sims.scenarios.scenario import Outcome, Scenario, Target, Unmet, expect
from sims.topology import VirtualNetwork

SEED = 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario(name: str) -> None:
    summary = Summary(SCENARIOS[name], [run_once(SCENARIOS[name], SEED)])
    assert summary.is_as_expected, summary.line()


def test_the_truth_is_the_predictors() -> None:
    ours = Path(__file__).parents[2] / "sims" / "data" / "pair_matrix.json"
    theirs = Path(__file__).parents[1] / "nat" / "data" / "pair_matrix.json"
    assert json.loads(ours.read_text()) == json.loads(theirs.read_text())


async def _measures(_net: VirtualNetwork) -> Outcome:
    return Outcome({"wait_ms": [10.0, 30.0]})


async def _fails(_net: VirtualNetwork) -> Outcome:
    raise Unmet("the cat is out")


def test_a_figure_beyond_its_target_fails_and_says_so() -> None:
    tight = Scenario("tight", "", _measures, {"wait_ms": Target(median=25, p95=29)})
    summary = Summary(tight, [run_once(tight, SEED)])
    assert summary.failures == ["wait_ms: p95 30, to be at most 29"]
    assert summary.line().startswith("FAILED")


def test_a_figure_with_a_target_that_nobody_measured_fails() -> None:
    absent = Scenario("absent", "", _measures, {"other_ms": Target(1, 1)})
    assert Summary(absent, [run_once(absent, SEED)]).failures


def test_what_does_not_hold_is_told_with_its_seed() -> None:
    broken = Scenario("broken", "", _fails)
    summary = Summary(broken, [run_once(broken, 7)])
    assert summary.failures == ["seed 7: the cat is out"]
    assert not summary.is_as_expected


def test_a_known_failure_is_shown_as_one_and_its_passing_is_a_surprise() -> None:
    known = Scenario("known", "", _fails, known_failure="cats will be cats")
    failing = Summary(known, [run_once(known, SEED)])
    assert failing.is_as_expected
    assert failing.line().startswith("known failure")
    assert "cats will be cats" in failing.line()
    passing = Summary(known, [Run("known", SEED, None, Outcome(), 0.0)])
    assert not passing.is_as_expected


def test_a_run_that_waits_in_vain_fails_and_the_others_go_on() -> None:
    async def waits(_net: VirtualNetwork) -> Outcome:
        with trio.fail_after(3):
            await trio.sleep_forever()

    run = run_once(Scenario("waits", "", waits), SEED)
    assert run.failure == "something that was waited for did not happen in time"


def test_a_seed_repeats_its_run() -> None:
    first, again = (run_once(SCENARIOS["loss-bursts"], 5).outcome.figures["direct_ms"] for _ in range(2))
    assert first == again


def test_expect_raises_only_what_does_not_hold() -> None:
    expect(True, "never said")
    with pytest.raises(Unmet, match="nothing here"):
        expect([], "nothing here")


def test_names_are_found_by_their_beginning_and_unknown_ones_named() -> None:
    assert find([]) == list(SCENARIOS.values())
    assert {scenario.name for scenario in find(["grid-endpoint-*"])} == {n for n in SCENARIOS if "grid-endpoint" in n}
    with pytest.raises(UsageError, match="'grid-nowhere'"):
        find(["grid-nowhere"])
