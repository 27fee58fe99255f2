"""``kafila-sim nat``: the deployed network stack in situations that networks put it in."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kafila.errors import UsageError
from sims.nat import FilterScope
from sims.pcapng import PcapngTrace
from sims.scenarios import runner
from sims.scenarios.catalogue import SCENARIOS, find
from sims.scenarios.grid import CLASSES
from sims.scenarios.matrix import PAPER_FIRST_BYTE_S, Matrix, run_row
from sims.scenarios.scenario import Scenario
from sims.scenarios.world import RENDEZVOUS_RTT_S
from sims.topology import DEFAULT_RTT_S
from sims.trace import Sink, TextTrace


@click.command(
    epilog="SCENARIO is a name that --list shows, or a beginning with a star ('grid-*'); without any, all run. "
    "'matrix' prints the paper's Table III and every pair of the nine NAT classes."
)
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO...]")
@click.option("--list", "listing", is_flag=True, help="Name the scenarios and run none.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each, seeds 1 to N.")
@click.option("--seed", "one_seed", type=int, help="This one seed instead, as a failure names it.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Packets as pcapng, or as text.")
@click.option("--json", "as_json", is_flag=True, help="One object with the figures and their targets.")
def nat(
    scenarios: tuple[str, ...], listing: bool, seeds: int, one_seed: int | None, trace: Path | None, as_json: bool
) -> None:
    """Run the deployed network stack behind emulated NATs, over bad links, through faults; in virtual time.

    Figures are shown as median/95th percentile over all samples of all seeds, with their targets in brackets. Exits
    with 1 when a scenario fails. A trace is of one scenario and one seed; a name ending in .pcapng is for Wireshark.
    """
    if listing:
        for scenario in SCENARIOS.values():
            click.echo(f"{scenario.name:<34} {scenario.sentence}")
        return
    chosen = range(1, seeds + 1) if one_seed is None else range(one_seed, one_seed + 1)
    if scenarios == ("matrix",):
        _matrix(chosen[0], as_json=as_json)
        return
    found = find(scenarios)
    if trace is not None:
        _run_traced(found, chosen, trace, as_json=as_json)
        return
    summaries = []
    for summary in runner.run_all(found, chosen):
        summaries.append(summary)
        if not as_json:
            click.echo(summary.line())
    _conclude(summaries, as_json=as_json, seeds=len(chosen))


def _run_traced(found: list[Scenario], seeds: range, file: Path, *, as_json: bool) -> None:
    if len(found) != 1 or len(seeds) != 1:
        raise UsageError("a trace is of one run: name one scenario, and one seed with --seed")
    with _sink(file) as sink:
        summary = runner.Summary(found[0], [runner.run_once(found[0], seeds[0], sink)])
    if not as_json:
        click.echo(summary.line())
    _conclude([summary], as_json=as_json, seeds=1)


@contextmanager
def _sink(file: Path) -> Iterator[Sink]:
    """Writes into ``file`` in the format of its suffix. Raises UsageError where it cannot be written."""
    try:
        if file.suffix == ".pcapng":
            with file.open("wb") as binary:
                yield PcapngTrace(binary)
        else:
            with file.open("w") as text:
                yield TextTrace(text)
    except OSError as error:
        raise UsageError(f"the trace cannot be written to {file}: {error.strerror}") from error


def _conclude(summaries: list[runner.Summary], *, as_json: bool, seeds: int) -> None:
    failed = [summary for summary in summaries if not summary.is_as_expected]
    known = [summary for summary in summaries if summary.failures and summary.is_as_expected]
    passed = len(summaries) - len(failed) - len(known)
    if as_json:
        _print_json("nat", runner.figures_of(summaries), runner.targets_of(summaries), _verdicts(summaries, seeds))
    else:
        click.echo(f"{passed} passed, {len(failed)} failed" + (f", {len(known)} known to fail" if known else ""))
    if failed:
        raise SystemExit(1)


def _verdicts(summaries: list[runner.Summary], seeds: int) -> dict[str, object]:
    return {
        "seeds": seeds,
        "passed": [summary.scenario.name for summary in summaries if not summary.failures],
        "failed": {s.scenario.name: s.failures for s in summaries if s.failures and not s.scenario.known_failure},
        "known_failures": {s.scenario.name: s.scenario.known_failure for s in summaries if s.scenario.known_failure},
        "rendezvous_rtt_s": RENDEZVOUS_RTT_S,
        "direct_rtt_s": DEFAULT_RTT_S,
    }


def _print_json(name: str, figures: dict[str, float], targets: dict[str, float], context: dict[str, object]) -> None:
    click.echo(json.dumps({"name": name, "figures": figures, "targets": targets, "context": context}))


def _matrix(seed: int, *, as_json: bool) -> None:
    began = time.monotonic()
    jobs = [(scope.value, row, seed) for scope in FilterScope for row in CLASSES]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        rows = pool.map(run_row, jobs, chunksize=1)
    matrix = Matrix(
        {scope: [cell for kind, cells in rows if kind == scope.value for cell in cells] for scope in FilterScope}
    )
    if as_json:
        context: dict[str, object] = {
            "seed": seed,
            "rendezvous_rtt_s": RENDEZVOUS_RTT_S,
            "direct_rtt_s": DEFAULT_RTT_S,
            "wrong": matrix.wrong,
            "took_s": time.monotonic() - began,
        }
        _print_json("nat matrix", matrix.figures(), {"cells_wrong": 0}, context)
    else:
        _print_matrix(matrix)
    if matrix.wrong:
        raise SystemExit(1)


def _print_matrix(matrix: Matrix) -> None:
    click.echo("The paper's Table III, its rule beside our prediction and what the deployed engine achieved")
    click.echo(f"({RENDEZVOUS_RTT_S * 1e3:.0f} ms to the rendezvous, {DEFAULT_RTT_S * 1e3:.0f} ms between members)\n")
    click.echo(matrix.table_iii())
    click.echo(
        f"\nThe paper's edges took {PAPER_FIRST_BYTE_S[True]} s direct and {PAPER_FIRST_BYTE_S[False]} s relayed."
    )
    for scope in FilterScope:
        click.echo(f"\nMapping/filtering, row to column; filters remember per {scope.value}\n")
        click.echo(matrix.grid(scope))
    for line in matrix.wrong:
        click.echo(f"not as predicted: {line}")
    figures = matrix.figures()
    click.echo(f"\n{figures['cells'] - figures['cells_wrong']:.0f} passed, {figures['cells_wrong']:.0f} failed")
