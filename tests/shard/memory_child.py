"""Run as a process: serve a checkpoint as a whole ring of one, and say what that took of main memory.

    python -m tests.shard.memory_child FOLDER DTYPE SLOTS CONTEXT [SCHEME [KV_DTYPE [PERCENT [ROLE]]]]

SCHEME is what ``--quantize`` would be given; empty or absent, weights stay as they are. PERCENT of the vocabulary's
rows are the last member's to score, and ROLE is ``head`` or ``last``, whose blocks are all there are, or ``roomy``: a
head that has room for the checkpoint's file besides. Prints a JSON object: ``planned_bytes``, what a plan counts for it
and, where they are of use, what it leaves for pages of the file, and ``peak_bytes``, by how much the process's resident
memory rose at most after everything was imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kafila.plan import Member, Plan, Workload, plan_session
from kafila.plan.scoring import rows_bytes
from kafila.shard.decoder import Shard
from kafila.shard.load import load_shard
from kafila.shard.manifest import DTYPE_BYTES, Checkpoint, model_manifest, open_checkpoint
from kafila.shard.ops import Ops
from kafila.shard.probe import memory_of
from kafila.shard.schemes import with_scheme
from kafila.shard.stored import COMPILED_BYTES
from kafila.shard.torch_ops import TorchOps
from kafila.shard.workspace import PASS_ROWS, head_memory_bytes
from kafila.types import BlockRange, NatClass, Sampling, Segment

ANSWER_TOKENS = 3


def resident(field: str) -> int:
    """Bytes of a line of /proc/self/status: ``VmRSS`` now, ``VmHWM`` at most so far (Linux, proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) << 10


def forget_peak() -> None:
    """Begin counting the peak anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def planned_bytes(ops: Ops[Any], checkpoint: Checkpoint, slots: int, context: int, kv_dtype: str = "") -> int:
    """What the plan says that the only member holds."""
    capability = memory_of(ops, checkpoint.config, context=context, slots=slots)
    member = Member.from_capability("here", capability, rtt_s=None, nat=NatClass.ORDINARY)
    manifest = model_manifest(checkpoint.name, checkpoint.config, ops.dtype, kv_dtype)
    plan = plan_session([member], manifest, Workload(context, slots), anchor=0)
    assert isinstance(plan, Plan), plan
    return plan.stages[0].memory_used_bytes


def drive(shard: Shard[Any], segments: tuple[Segment, ...], dtype: str, row_bytes: int) -> None:
    """Once through the shard, and everything that it can find in the vocabulary."""
    rows = sum(segment.length for segment in segments)
    if shard.head is None:
        shard.score(segments, shard.forward(segments, None, bytes(rows * row_bytes), dtype), dtype)
        return
    hidden = shard.forward(segments, (1,) * rows, None, dtype)
    if shard.head.own is not None:
        shard.sample_part(segments, hidden, dtype)
    shard.sample(segments, (Sampling(temperature=0.7, top_p=0.9),) * len(segments), hidden, dtype)


def serve(go: Callable[[tuple[Segment, ...]], None], slots: int, context: int) -> None:
    """Short prompts in all slots but the last; there, the longest pass there is, last in its context and beside the
    other answers; then answers in all slots."""
    *others, last = range(slots)
    start = context - PASS_ROWS - ANSWER_TOKENS
    go(tuple(Segment(slot, 0, 2, sample=True) for slot in others))
    for first in range(0, start, PASS_ROWS):
        go((Segment(last, first, min(PASS_ROWS, start - first), sample=False),))
    answers = (Segment(slot, 2, 1, sample=True) for slot in others)
    go((*answers, Segment(last, start, PASS_ROWS, sample=True)))
    for turn in range(ANSWER_TOKENS):
        running = (Segment(slot, 3 + turn, 1, sample=True) for slot in others)
        go((*running, Segment(last, start + PASS_ROWS + turn, 1, sample=True)))


def read_prompts(go: Callable[[tuple[Segment, ...]], None], slots: int) -> None:
    """Of many lengths, each of which libraries may compile something for."""
    for length in range(33, PASS_ROWS, 15):
        go((Segment(slots - 1, 0, length, sample=True),))


def main(
    folder: Path,
    dtype: str,
    slots: int,
    context: int,
    scheme: str = "",
    kv_dtype: str = "",
    percent: str = "0",
    role: str = "head",
) -> None:
    """Measure and print."""
    ops = TorchOps("cpu", dtype, threads=1)
    checkpoint = open_checkpoint(folder)
    checkpoint = replace(checkpoint, config=with_scheme(checkpoint.config, scheme))
    planned = planned_bytes(ops, checkpoint, slots, context, kv_dtype)
    if role == "last":
        head = head_memory_bytes(ops, checkpoint.config)
        planned += rows_bytes(head, int(percent)) - head
    roomy = role == "roomy"
    if roomy and ops.takes_stored("BF16"):
        planned += COMPILED_BYTES
        planned += sum(
            spec.end - spec.start for name, spec in checkpoint.tensors.items() if name.endswith("_proj.weight")
        )
    forget_peak()
    before = resident("VmRSS")
    blocks = BlockRange(0, checkpoint.config.blocks)
    shard = load_shard(
        ops, checkpoint, blocks, holds_head=role != "last", slots=slots, context=context, kv_dtype=kv_dtype,
        scored_percent=int(percent), spare_bytes=planned if roomy else 0,
    )  # fmt: skip
    loaded = resident("VmHWM") - before
    row_bytes = checkpoint.config.hidden * DTYPE_BYTES[dtype]
    if roomy:
        read_prompts(lambda segments: drive(shard, segments, dtype, row_bytes), slots)
    serve(lambda segments: drive(shard, segments, dtype, row_bytes), slots, context)
    peak = resident("VmHWM") - before
    sys.stdout.write(json.dumps({"planned_bytes": planned, "loaded_bytes": loaded, "peak_bytes": peak}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
