"""Decoding in one process: against transformers' ``generate``, and against reading the weights and nothing else.

    python bench/decode.py [--json] [--model FOLDER] [--threads 1 2] [--dtypes bfloat16 float32] [--tokens N]
                           [--backends torch mlx] [--schemes int8 int4]

Tokens are taken in turns: each of transformers' is followed by one of ours and one pass of the floor, so that all three
meet the same machine; a figure is the median of their ratios. The floor is the shard's own matrices applied to one row,
in order, embedding and arithmetic between them left out; ``over_plain_floor`` compares with as many bytes read by
torch's ``linear``. What ``--quantize`` makes is compared with transformers in bfloat16 and with its own floor. MLX,
where it is installed, is compared with its own floor. ``handover_us`` is what it takes to give the device thread a job
that does nothing and to hear of it, on its thread.
"""

from __future__ import annotations

import kafila.shard  # noqa: F401  # isort: skip  - before torch: it says how threads wait

import platform
import queue
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
import transformers
from telling import command, tell
from torch import Tensor

from kafila.shard.config import DecoderConfig
from kafila.shard.decoder import Shard
from kafila.shard.load import load_shard
from kafila.shard.manifest import Checkpoint, open_checkpoint
from kafila.shard.ops import BlockWeights, Experts, HeadWeights, Matrix
from kafila.shard.schemes import SCHEMES, with_scheme
from kafila.shard.torch_ops import TorchOps
from kafila.shard.worker import Draws, Forward, Result, ShardWorker
from kafila.types import Best, BlockRange, Sampling, Segment

TARGETS = {"over_transformers": ">=1.5", "over_floor": ">=0.7"}
CONTEXT = 512
PROMPT = 32  # tokens before the first that is timed: a short question
WARM_UP = 4
HANDOVERS = 2000
SCHEME_TOKENS = 24
MLX_TOKENS = 16  # its CPU build takes a tenth of a second for each


def timed(work: Callable[[], object]) -> float:
    """Seconds ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@dataclass
class Ours:
    """A whole model in one shard, decoding greedily."""

    shard: Shard[Any]
    dtype: str
    position: int = 0
    token: int = 1

    def step(self) -> None:
        """One token, as a ring of one makes it."""
        segments = (Segment(0, self.position, 1, sample=True),)
        hidden = self.shard.forward(segments, (self.token,), None, self.dtype)
        (token,) = self.shard.sample(segments, (Sampling(),), hidden, self.dtype).tokens
        self.token = token or 0
        self.position += 1


def matrices_of(weights: BlockWeights[Any]) -> list[Matrix[Any]]:
    """A block's, in the order in which a token goes through them."""
    if isinstance(weights.mlp, Experts):
        raise SystemExit("give a model without experts: what a token reads of others is another each time")
    return [weights.qkv, weights.o, weights.mlp.up_gate, weights.mlp.down]


def floor_of(shard: Shard[Tensor], head: HeadWeights[Tensor], config: DecoderConfig) -> Callable[[], object]:
    """The shard's matrices, each applied to one row of its own."""
    widths = (config.hidden, config.heads * config.head_dim, config.hidden, config.intermediate)
    matrices = [matrix for w in shard.weights for matrix in matrices_of(w)]
    rows = [torch.randn(1, width) for width in widths]
    calls = [*zip(matrices, rows * len(shard.weights), strict=True), (head.unembedding, rows[0])]

    def floor() -> None:
        with torch.inference_mode():
            for matrix, row in calls:
                matrix(row)

    return floor


def plain_floor(checkpoint: Checkpoint, dtype: torch.dtype) -> Callable[[], object]:
    """The same bytes as ``torch.nn.functional.linear`` reads them."""
    config = checkpoint.config
    shapes = [
        ((config.heads + 2 * config.kv_heads) * config.head_dim, config.hidden),
        (config.hidden, config.heads * config.head_dim),
        (2 * config.intermediate, config.hidden),
        (config.hidden, config.intermediate),
    ] * config.blocks + [(config.vocab, config.hidden)]
    calls = [(torch.randn(1, width).to(dtype), torch.randn(rows, width).to(dtype)) for rows, width in shapes]

    def floor() -> None:
        with torch.inference_mode():
            for row, weight in calls:
                F.linear(row, weight)

    return floor


@dataclass
class Turns(transformers.generation.BaseStreamer):  # type: ignore[misc]  # transformers' types are not followed
    """Hears of every token that ``generate`` makes, and lets the others make theirs before the next."""

    others: dict[str, Callable[[], object]]
    times: dict[str, list[float]] = field(default_factory=dict)
    resumed_at: float = 0.0

    def put(self, value: Tensor) -> None:
        """A token came, or the prompt."""
        took = time.perf_counter() - self.resumed_at
        if value.numel() == 1:
            self.times.setdefault("transformers", []).append(took)
            for name, work in self.others.items():
                self.times.setdefault(name, []).append(timed(work))
        self.resumed_at = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to tell."""


def compare(checkpoint: Checkpoint, dtype: str, threads: int, tokens: int, scheme: str = "") -> dict[str, list[float]]:
    """Seconds a token of each, token by token; ``scheme`` is how ours is quantized."""
    config = with_scheme(checkpoint.config, scheme)
    checkpoint = replace(checkpoint, config=config)
    ops = TorchOps("cpu", dtype, threads=threads)
    shard = load_shard(ops, checkpoint, BlockRange(0, config.blocks), holds_head=True, slots=1, context=CONTEXT)
    if shard.head is None:
        raise SystemExit("the shard was to hold the head")
    ours = Ours(shard, dtype)
    for _ in range(PROMPT):
        ours.step()
    turns = Turns(
        {
            "ours": ours.step,
            "floor": floor_of(shard, shard.head, config),
            "plain_floor": plain_floor(checkpoint, getattr(torch, dtype)),
        }
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=getattr(torch, dtype))
    ids = torch.ones(1, PROMPT, dtype=torch.int64)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=WARM_UP + tokens, min_new_tokens=WARM_UP + tokens,
        do_sample=False, streamer=turns,
    )  # fmt: skip
    return {name: times[WARM_UP:] for name, times in turns.times.items()}


def mlx_figures(checkpoint: Checkpoint, dtype: str, tokens: int) -> dict[str, float]:
    """Tokens a second on the device MLX prefers, and the ratio to its matrices alone, in turns."""
    import mlx.core as mx  # noqa: PLC0415  - an extra that need not be installed

    from kafila.shard.mlx_ops import MlxOps  # noqa: PLC0415  - as above

    config, ops = checkpoint.config, MlxOps(dtype)
    shard = load_shard(ops, checkpoint, BlockRange(0, config.blocks), holds_head=True, slots=1, context=CONTEXT)
    if shard.head is None:
        raise SystemExit("the shard was to hold the head")
    widths = (config.hidden, config.heads * config.head_dim, config.hidden, config.intermediate)
    rows = [mx.random.normal((1, width)).astype(getattr(mx, dtype)) for width in widths]
    matrices = [matrix for w in shard.weights for matrix in matrices_of(w)]
    calls = [*zip(matrices, rows * len(shard.weights), strict=True), (shard.head.unembedding, rows[0])]
    ours = Ours(shard, dtype)
    for _ in range(PROMPT):
        ours.step()
    own, floor = [], []
    for _ in range(tokens):
        own.append(timed(ours.step))
        floor.append(timed(lambda: mx.eval([matrix(row) for matrix, row in calls])))
    key = f"mlx_{dtype}"
    return {
        f"{key}_tokens_per_s": round(1 / statistics.median(own), 1),
        f"{key}_quickest_tokens_per_s": round(1 / min(own), 1),
        f"{key}_over_floor": round(statistics.median(f / o for f, o in zip(floor, own, strict=True)), 3),
    }


def handover_us() -> float:
    """Median microseconds from giving a job to hearing of it."""

    class Nothing:
        device = "nothing"

        def forward(self, *_: object, **__: object) -> bytes:
            return b""

        def sample(self, *_: object) -> Draws:
            return Draws(())

        def score(self, *_: object) -> tuple[Best, ...]:
            return ()

        def sample_part(self, *_: object) -> tuple[Best, ...]:
            return ()

        def interrupt(self) -> None:
            pass

    heard: queue.SimpleQueue[tuple[Result, float]] = queue.SimpleQueue()
    worker = ShardWorker(Nothing, lambda result: heard.put((result, time.perf_counter())), inbox=1)
    worker.start()
    heard.get()
    job = Forward(0, (Segment(0, 0, 1, sample=False),), (1,), None, "bfloat16")
    took = []
    for _ in range(HANDOVERS):
        began = time.perf_counter()
        worker.submit(job)
        took.append(heard.get()[1] - began)
    worker.stop()
    return statistics.median(took) * 1e6


def quantized_figures(key: str, times: dict[str, list[float]]) -> dict[str, float]:
    """Tokens a second, and the ratios to transformers in bfloat16 and to the quantized matrices alone."""
    ours = times["ours"]
    over = {
        name: round(statistics.median(other / own for other, own in zip(times[name], ours, strict=True)), 3)
        for name in ("transformers", "floor")
    }
    return {
        f"{key}_tokens_per_s": round(1 / statistics.median(ours), 1),
        f"{key}_quickest_tokens_per_s": round(1 / min(ours), 1),
        f"{key}_over_transformers_bf16": over["transformers"],
        f"{key}_over_floor": over["floor"],
    }


def measure(
    checkpoint: Checkpoint, dtypes: Sequence[str], threads: Sequence[int], tokens: int, schemes: Sequence[str]
) -> dict[str, float]:
    """All figures; the two with targets are the worst of bfloat16's."""
    figures: dict[str, float] = {}
    for dtype in dtypes:
        for count in threads:
            times = compare(checkpoint, dtype, count, tokens)
            ours = times["ours"]
            ratios = {
                name: statistics.median(other / own for other, own in zip(times[name], ours, strict=True))
                for name in ("transformers", "floor", "plain_floor")
            }
            key = f"{dtype}_{count}t"
            figures[f"{key}_tokens_per_s"] = round(1 / statistics.median(ours), 1)
            figures[f"{key}_quickest_tokens_per_s"] = round(1 / min(ours), 1)
            figures |= {f"{key}_over_{name}": round(ratio, 3) for name, ratio in ratios.items()}
    for scheme in schemes:
        for count in threads:
            key = f"{scheme}_{count}t"
            figures |= quantized_figures(key, compare(checkpoint, "bfloat16", count, SCHEME_TOKENS, scheme))
    for target in TARGETS:
        found = [value for name, value in figures.items() if name.startswith("bfloat16") and name.endswith(target)]
        if found:
            figures[target] = min(found)
    figures["handover_us"] = round(handover_us(), 1)
    return figures


def main(arguments: Sequence[str]) -> None:
    """Print one JSON object, or a table."""
    parser = command(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--schemes", nargs="*", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--backends", nargs="+", default=["torch", "mlx"])
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    checkpoint = open_checkpoint(options.model)
    figures: dict[str, float] = {}
    if "torch" in options.backends:
        figures |= measure(checkpoint, options.dtypes, options.threads, options.tokens, options.schemes)
    if "mlx" in options.backends and find_spec("mlx") is not None:
        for dtype in options.dtypes:
            figures |= mlx_figures(checkpoint, dtype, min(options.tokens, MLX_TOKENS))
    context: dict[str, Any] = {
        "model": checkpoint.name,
        "tokens": options.tokens,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    tell("decode", figures, TARGETS, context, as_json=options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
