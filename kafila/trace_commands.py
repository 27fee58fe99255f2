"""``kafila-node trace``: what a session measured, against what its plan predicted."""

from __future__ import annotations

from pathlib import Path

import click

from kafila.trace_plot import plot
from kafila.trace_reading import read_trace
from kafila.trace_report import report


def show_trace(path: Path, picture: Path | None) -> None:
    """Print the report, and draw the plot if one is wanted. Raises KafilaError."""
    trace = read_trace(path)
    click.echo(report(trace))
    if picture is not None:
        plot(trace, picture)
        click.echo(f"plot written to {picture}", err=True)
