"""The report from outcomes that are made up: every section is there, and figures are what the outcomes say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kafila.plan import Allocation
from kafila.types import PathKind
from sims.fleet.place import Net
from sims.fleet.trial import Edge, Outcome, Refused, Trial
from sims.report.build import build
from sims.report.ours import tight_context
from sims.report.work import Cell, Results, cells_of, unrolled, work
from sims.scenarios.grid import Cell as NatPair

BOTH = cells_of(["lan", "intercontinental"])
LAN = Cell("lan", "Qwen3-8B")


def edge(source: str, target: str) -> Edge:
    return Edge(source, target, PathKind.RELAYED, 0.3, None, 0.1)


def outcome(trial: Trial) -> Outcome:
    rate = {Allocation.KAFILA: 20.0, Allocation.MEMORY: 10.0, Allocation.UNIFORM: 8.0}[trial.allocation]
    rate += trial.seed % 1000
    return Outcome(
        names=("a", "b"),
        counts=(1, 2),
        predicted_s=(0.009, None),
        stage_s=(0.010, 0.005),
        circuit_s=0.02,
        edges=(edge("a", "b"), edge("b", "a")),
        formed_s=1.0,
        first_token_s=0.1,
        one_user=rate,
        all_users=4 * rate,
        virtual_s=10.0,
        real_s=1.0,
    )


def made_up(wanted: Mapping[Trial, int]) -> Results:
    refused = Refused("M3 Pro is too small")
    outcomes: dict[Trial, Outcome | Refused] = {
        trial: refused if trial.context > 5000 and trial.allocation is Allocation.UNIFORM else outcome(trial)
        for trial in unrolled(wanted)
    }
    return Results.of(wanted, outcomes)


PAIRS = [NatPair("x", "y", "direct", "none" if n == 8 else "direct", 0.06, 0.1, None) for n in range(9)]


def test_every_session_is_run_once_with_a_seed_of_its_own() -> None:
    wanted = work(BOTH, 5, 27_454)
    trials = unrolled(wanted)
    assert len(set(trials)) == len(trials) == sum(wanted.values())
    assert wanted[LAN.papers(Allocation.UNIFORM)] == 5
    assert trials[0].fleet == "intercontinental"


def test_figures_are_what_the_outcomes_say() -> None:
    page = build(BOTH, made_up(work(BOTH, 3, 30_000)), PAIRS, 30_000)
    figures = page.figures
    assert figures["lan_Qwen3-8B_kafila_tokens_per_s"] == 21  # the median of 20, 21 and 22
    assert figures["lan_Qwen3-8B_kafila_half_range"] == 1
    assert figures["lan_Qwen3-8B_kafila_over_paper"] == pytest.approx(21 / 21.5)
    assert figures["table_iv_worst_off"] == pytest.approx(21 / 1.9 - 1)
    assert figures["fig_2_lan_kafila_four_user_gain"] == 4
    assert figures["cost_model_median_error"] == pytest.approx(0.1)
    assert figures["ours_lan_Qwen3-8B_over_uniform_one_user"] == pytest.approx(21 / 9)
    assert figures["setup_lan_paths_link_up_s"] == 0.3
    assert figures["setup_intercontinental_geography_relayed_edges"] == 2
    assert figures["table_iii_our_prediction_wrong"] == 1
    assert figures["tight_uniform_declined"] == figures["tight_uniform_names_the_laptop"] == 1
    assert figures["tight_ours_serves"] == 1


def test_every_section_is_there_in_both_formats() -> None:
    page = build(BOTH, made_up(work(BOTH, 1, 30_000)), PAIRS, 30_000)
    for text in (page.markdown(), page.html()):
        for part in ("Table III", "Table IV", "Fig. 2", "cost model", "relayed first", "Ours", "hop by hop"):
            assert part in text
        assert "M3 Pro is too small" in text
    assert {"table-iv", "fig-2", "networks"} <= {getattr(block, "name", "") for block in page.blocks}


def test_a_declined_division_is_said_in_the_table() -> None:
    wanted = work([LAN], 1, None)
    outcomes: dict[Trial, Outcome | Refused] = {trial: outcome(trial) for trial in unrolled(wanted)}
    declined = replace(LAN.papers(Allocation.UNIFORM), seed=0)
    outcomes[declined] = Refused("A40 is too small")
    page = build([LAN], Results.of(wanted, outcomes), PAIRS, None)
    assert "declined: A40 is too small" in page.markdown()


def test_the_context_that_no_uniform_split_holds() -> None:
    # The M3 Pro has 17.1 GB and 13 of 64 blocks, each of 0.975 GB and a cache of 4 x context x 4,096 bytes.
    assert tight_context() == 20_764


def test_networks_of_a_cell_differ() -> None:
    assert LAN.trial(Net.PATHS) != LAN.trial(Net.GEOGRAPHY)
    assert LAN.ours(1) != LAN.ours(4)
