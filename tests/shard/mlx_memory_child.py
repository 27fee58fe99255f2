"""Run as a process: serve a checkpoint on MLX, and say what that took of main memory.

    python -m tests.shard.mlx_memory_child FOLDER DTYPE SLOTS CONTEXT

Prints what `tests.shard.memory_child` prints. MLX's CPU build takes a second for what torch does in a hundredth, so one
chunk of a prompt and an answer in every slot have to do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kafila.shard.load import load_shard
from kafila.shard.manifest import open_checkpoint
from kafila.shard.mlx_ops import MlxOps
from kafila.types import BlockRange, Sampling, Segment
from tests.shard.memory_child import forget_peak, planned_bytes, resident

CHUNK = 256


def main(folder: Path, dtype: str, slots: int, context: int) -> None:
    """Measure and print."""
    ops, checkpoint = MlxOps(dtype), open_checkpoint(folder)
    planned = planned_bytes(ops, checkpoint, slots, context)
    forget_peak()
    before = resident("VmRSS")
    blocks = BlockRange(0, checkpoint.config.blocks)
    shard = load_shard(ops, checkpoint, blocks, holds_head=True, slots=slots, context=context)
    for segments in (
        (Segment(0, 0, CHUNK, sample=True),),
        tuple(Segment(slot, 0 if slot else CHUNK, 1, sample=True) for slot in range(slots)),
    ):
        rows = sum(segment.length for segment in segments)
        hidden = shard.forward(segments, (1,) * rows, None, dtype)
        shard.sample(segments, (Sampling(temperature=0.7),) * len(segments), hidden, dtype)
    sys.stdout.write(json.dumps({"planned_bytes": planned, "peak_bytes": resident("VmHWM") - before}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
