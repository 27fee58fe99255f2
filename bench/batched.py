"""llama.cpp's batched-bench on the same machine and model, to print beside (not run by itself).

It is one process with all the threads, and its weights have fewer bits than Kafila's: a peer to compare gains with, not
rates. See ``tools/batched-bench`` in llama.cpp for what its JSON lines mean.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kafila.demo.source import installed_gguf
from kafila.errors import ModelNotFound

PROGRAM = "llama-batched-bench"
_TIMEOUT_S = 600.0


def peer(
    program: str | None,
    gguf: Path | None,
    users: Sequence[int],
    *,
    prompt_tokens: int,
    answer_tokens: int,
    threads: int,
) -> tuple[dict[str, float], str]:
    """``llama_tokens_per_s_N_users`` for every number of them, and which program and model that was; or no figures and
    why there are none. ``program`` and ``gguf`` None: the one on the path, the demonstration model's."""
    found = shutil.which(program or PROGRAM)
    if found is None:
        return {}, f"{program or PROGRAM} was not found: llama.cpp is not measured beside"
    try:
        model = gguf or installed_gguf()
    except ModelNotFound as error:
        return {}, f"llama.cpp is not measured beside: {error}"
    room = max(users) * (prompt_tokens + answer_tokens)
    lengths = ["-npp", str(prompt_tokens), "-ntg", str(answer_tokens), "-npl", ",".join(map(str, users))]
    command = [found, "-m", str(model), "-c", str(room), "-t", str(threads), *lengths, "--output-format", "jsonl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"llama.cpp is not measured beside: {error}"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        return {}, f"llama.cpp is not measured beside: {found} ended with {done.returncode}: {last}"
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {f"llama_tokens_per_s_{row['pl']}_users": row["speed_tg"] for row in rows}, f"{found}, {model.name}"


def gains(rates: dict[str, float]) -> dict[str, float]:
    """``llama_gain_N_users``: as the ring's, over one user."""
    alone = rates.get("llama_tokens_per_s_1_users", 0.0)
    if alone <= 0:
        return {}
    return {
        name.replace("tokens_per_s", "gain"): rate / alone for name, rate in rates.items() if "_1_users" not in name
    }
