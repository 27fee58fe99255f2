"""The demonstration model, turned once from the GGUF file it comes in into an ordinary checkpoint folder.

Nothing else of Kafila reads GGUF: after ``python -m kafila.demo`` the model is a checkpoint like any other.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"


def default_folder() -> Path:
    """Where the demonstration checkpoint lies in the user's cache (it need not exist yet)."""
    if sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        # The XDG base directory specification: an empty value counts as unset, a relative one is ignored.
        named = os.environ.get("XDG_CACHE_HOME", "")
        cache = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return cache / "kafila" / "models" / MODEL_NAME
