"""MLX takes what the plan admitted and no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shard.backends import needs_mlx
from tests.shard.test_workspace import large_checkpoint


@needs_mlx
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_nothing_takes_more_than_the_plan_admitted_and_little_less(tmp_path: Path) -> None:
    folder = large_checkpoint(tmp_path, 4, tied=False, hidden=256)
    command = [sys.executable, "-m", "tests.shard.mlx_memory_child", str(folder), "bfloat16", "48", "2048"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0.85 * found["planned_bytes"] <= found["peak_bytes"] <= found["planned_bytes"], found
