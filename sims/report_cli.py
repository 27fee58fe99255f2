"""``kafila-sim report``: the paper's evaluation, reproduced on one page."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from sims.fleet.run import run_all
from sims.fleets import PAPER_FLEETS
from sims.report.build import build
from sims.report.ours import tight_context
from sims.report.theirs import nat_pairs
from sims.report.work import TIGHT_FLEET, Results, cells_of, unrolled, work


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("kafila-report"),
    show_default=True,
    help="Where report.md, report.html and the plots go.",
)
@click.option(
    "--fleet", "fleets", type=click.Choice(PAPER_FLEETS), multiple=True, help="These alone.  [default: all three]"
)
@click.option("--sessions", type=click.IntRange(1, 100), default=5, show_default=True, help="Medians are over so many.")
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one a processor]")
@click.option("--json", "as_json", is_flag=True, help="Print one object with every figure.")
def report(out: Path, fleets: tuple[str, ...], sessions: int, jobs: int | None, as_json: bool) -> None:
    """Reproduce the paper's tables and figures, and write them as a page with plots."""
    began = time.perf_counter()
    cells = cells_of(fleets or PAPER_FLEETS)
    context = tight_context() if TIGHT_FLEET in (fleets or PAPER_FLEETS) else None
    wanted = work(cells, sessions, context)
    trials = unrolled(wanted)

    def tell(done: int) -> None:
        if done % 10 == 0 or done == len(trials):
            click.echo(f"{done} of {len(trials)} sessions, {time.perf_counter() - began:.0f} s", err=True)

    outcomes = dict(zip(trials, run_all(trials, jobs, tell), strict=True))
    page = build(cells, Results.of(wanted, outcomes), nat_pairs(), context)
    page.figures |= {"report_sessions": len(trials), "report_real_s": time.perf_counter() - began}
    files = page.write(out)
    if as_json:
        click.echo(json.dumps({"name": "report", "figures": page.figures, "files": [str(file) for file in files]}))
    else:
        click.echo("\n".join(str(file) for file in files))
