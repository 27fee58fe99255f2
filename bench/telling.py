"""What every benchmark has: its options, and its figures as a table or as one JSON object (not run by itself)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from kafila.demo import default_folder


def command(doc: str | None, *, model: bool = True, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with ``--json``, and ``--model`` and ``--rounds`` where there are such; ``doc`` is the script's own."""
    parser = argparse.ArgumentParser(description=doc and doc.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if model:
        parser.add_argument("--model", type=Path, default=default_folder(), help="a checkpoint's folder")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="how often everything is measured")
    return parser


def tell(
    name: str,
    figures: Mapping[str, float],
    targets: Mapping[str, str],
    context: Mapping[str, object],
    *,
    as_json: bool,
) -> None:
    """Print the figures, each beside its target."""
    if as_json:
        print(json.dumps({"name": name, "figures": figures, "targets": targets, "context": context}))
        return
    for figure, value in figures.items():
        print(f"{figure:44} {value:12.4f}  {targets.get(figure, '')}")
