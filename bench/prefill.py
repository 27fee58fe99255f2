"""A long prompt in one process: against transformers' forward pass over the same tokens.

    python bench/prefill.py [--json] [--model FOLDER] [--threads N ...] [--dtypes bfloat16 float32] [--tokens N]

Ours goes through the model in the scheduler's chunks, as in a ring, and draws a token at the end; transformers' takes
all tokens at once and computes the last one's logits alone. Both hold keys and values afterwards. They take turns; a
figure is the median of their ratios. A ``tight`` one is of a member whose plan leaves no room for the checkpoint's
file, where that makes a difference.
"""

from __future__ import annotations

import kafila.shard  # noqa: F401  # isort: skip  - before torch: it says how threads wait

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from telling import command, tell

from kafila.ring.pace import Pace
from kafila.shard.decoder import Shard
from kafila.shard.load import load_shard
from kafila.shard.manifest import Checkpoint, open_checkpoint
from kafila.shard.stored import COMPILED_BYTES
from kafila.shard.torch_ops import TorchOps
from kafila.types import BlockRange, Sampling, Segment, last_rows

TARGETS = {"over_transformers": ">=1.0"}
TURNS = 4
STRIDE = 7919  # a prime: the prompt goes through the vocabulary without repeating itself


def timed(work: Callable[[], object]) -> float:
    """Seconds ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def chunk_tokens(prompt: int) -> int:
    """As the scheduler cuts a prompt for a ring of one before it has measured anything."""
    return Pace(1).reading(0, prompt, 0).tokens


def ours(shard: Shard[Any], tokens: Sequence[int], dtype: str) -> None:
    """The prompt in chunks, then a token."""
    size = chunk_tokens(len(tokens))
    for start in range(0, len(tokens), size):
        chunk = tuple(tokens[start : start + size])
        last = start + len(chunk) == len(tokens)
        segments = (Segment(0, start, len(chunk), sample=last),)
        hidden = shard.forward(segments, chunk, None, dtype, last_only=True)
        if last:
            shard.sample(last_rows(segments), (Sampling(),), hidden, dtype)


def theirs(model: Any, tokens: Sequence[int]) -> None:
    """The prompt in one pass."""
    with torch.inference_mode():
        model(torch.tensor([tokens]), logits_to_keep=1, use_cache=True).logits.argmax()


def shard_of(checkpoint: Checkpoint, dtype: str, threads: int, count: int, *, tight: bool = False) -> Shard[Any]:
    """A whole model."""
    ops, blocks = TorchOps("cpu", dtype, threads=threads), BlockRange(0, checkpoint.config.blocks)
    spare = 0 if tight else COMPILED_BYTES + sum(spec.end - spec.start for spec in checkpoint.tensors.values())
    return load_shard(ops, checkpoint, blocks, holds_head=True, slots=1, context=count, spare_bytes=spare)


def compare(checkpoint: Checkpoint, dtype: str, threads: int, count: int, turns: int) -> dict[str, list[float]]:
    """Seconds a prompt of each, turn by turn."""
    tokens = [index * STRIDE % checkpoint.config.vocab for index in range(count)]
    shard = shard_of(checkpoint, dtype, threads, count)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=getattr(torch, dtype))
    work = {"ours": lambda: ours(shard, tokens, dtype), "transformers": lambda: theirs(model, tokens)}
    if any(weights.stored for weights in shard.weights):
        without = shard_of(checkpoint, dtype, threads, count, tight=True)
        work["tight"] = lambda: ours(without, tokens, dtype)
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 1):
        for name, do in work.items():
            took = timed(do)
            if turn:  # the first compiles and faults pages in
                times[name].append(took)
    return times


def ratio(times: dict[str, list[float]], name: str) -> float:
    """Of transformers' seconds and those of ``name``, the median."""
    return statistics.median(other / own for other, own in zip(times["transformers"], times[name], strict=True))


def measure(checkpoint: Checkpoint, options: argparse.Namespace) -> dict[str, float]:
    """All figures; the target's is the worst of them."""
    figures: dict[str, float] = {}
    ratios = []
    for dtype in options.dtypes:
        for threads in options.threads:
            times = compare(checkpoint, dtype, threads, options.tokens, options.turns)
            key = f"{dtype}_{threads}t"
            figures[f"{key}_tokens_per_s"] = round(options.tokens / statistics.median(times["ours"]), 1)
            figures[f"{key}_over_transformers"] = round(ratio(times, "ours"), 3)
            ratios.append(ratio(times, "ours"))
            if "tight" in times:
                figures[f"{key}_tight_over_transformers"] = round(ratio(times, "tight"), 3)
    figures["over_transformers"] = round(min(ratios), 3)
    return figures


def main(arguments: Sequence[str]) -> None:
    """Print one JSON object, or a table."""
    parser = command(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    checkpoint = open_checkpoint(options.model)
    figures = measure(checkpoint, options)
    context = {
        "model": checkpoint.name,
        "tokens": options.tokens,
        "chunk_tokens": chunk_tokens(options.tokens),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }
    tell("prefill", figures, TARGETS, context, as_json=options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
