"""Models by name or by config.json, as the planner needs them."""

from __future__ import annotations

import os
from pathlib import Path

from kafila.errors import UsageError
from kafila.plan import ModelManifest, manifest_from_config
from sims.reading import DATA, load_table

PAPER_MODELS = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")


def load_model(name: str) -> ModelManifest:
    """One of the paper's models by name, or the model of a config.json or of a folder that has one.

    Raises UsageError where there is none, UnsupportedModel or ModelIncomplete where it cannot be sized.
    """
    for known in PAPER_MODELS:
        if name.lower() == known.lower():
            return manifest_from_config(load_table(DATA / f"{known.lower()}.json"), known)
    path = Path(name)
    folder = os.path.isdir(path)
    config = path / "config.json" if folder else path
    if not os.path.exists(config):  # Path.exists raises where the name itself is impossible
        known = ", ".join(PAPER_MODELS)
        raise UsageError(f"{name}: neither a config.json, nor a folder with one, nor one of {known}")
    # A checkpoint's folder carries the model's name; its config.json mostly does not.
    return manifest_from_config(load_table(config), config.resolve().parent.name if folder else path.stem)
