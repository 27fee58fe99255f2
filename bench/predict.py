"""Predicted stage times against measured ones: over every split of three models, on every backend installed here.

    python bench/predict.py [--json] [--model FOLDER] [--threads N] [--backends torch mlx] [--dtypes bfloat16 float32]

A split cuts a model in two, the first part with the head. The two stages take turns as in a ring, each with all other
weights read in between. Each prediction is equation (2) as the planner prices it, from rounds of the probe (random
weights of the model's shapes, nothing of the stage's own) taken between the very tokens that are measured, so that both
meet the same machine. ``median_error`` is over all stages, each |predicted - measured| / measured of medians. Besides
SmolLM2 two checkpoints of other shapes are made on the spot.
"""

from __future__ import annotations

import kafila.shard  # noqa: F401  # isort: skip  - before torch: it says how threads wait

import importlib.util
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from telling import command, tell

from kafila.plan.cost import Limits, Tier, price, to_seconds
from kafila.plan.members import Member
from kafila.shard.cache import KvCache
from kafila.shard.decoder import Shard
from kafila.shard.load import load_shard
from kafila.shard.manifest import Checkpoint, model_manifest, open_checkpoint
from kafila.shard.ops import Ops
from kafila.shard.probe import memory_of, summary
from kafila.shard.rig import Rig, Round, build_rig, cache_bytes, timed
from kafila.shard.torch_ops import TorchOps
from kafila.types import BlockRange, Capability, ModelManifest, NatClass, Sampling, Segment

TARGETS = {"median_error": "<=0.1", "stages": ">=60"}
CONTEXT = 256
PROMPT = 64  # tokens in the caches before the first that is timed: a short question
TOKENS = 9  # of each stage, after WARM_UP more
WARM_UP = 2
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-like": {
        "model_type": "qwen3", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 6,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "llama-like": {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 9,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 50000, "tie_word_embeddings": False,
    },
    "qwen3-moe-like": {
        "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
        "num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One stage, in seconds."""

    name: str
    head: bool
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the prediction, signed, over what was measured."""
        return self.predicted_s / self.measured_s - 1


def make_checkpoint(folder: Path, shape: dict[str, Any]) -> Checkpoint:
    """A checkpoint of that shape with random weights."""
    rest = dict(shape)
    config = transformers.AutoConfig.for_model(rest.pop("model_type"), max_position_embeddings=CONTEXT, **rest)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return open_checkpoint(folder)


@dataclass
class Ring:
    """A whole model cut after ``split`` blocks, decoding one token after the other."""

    first: Shard[Any]
    second: Shard[Any]
    dtype: str
    hidden: bytes
    position: int = PROMPT

    def token(self) -> tuple[float, float]:
        """Seconds that a token took at the head's stage and at the other."""
        segments = (Segment(0, self.position, 1, sample=True),)
        self.position += 1
        clock = time.perf_counter
        before = timed(lambda: self.first.forward(segments, (1,), None, self.dtype), clock)
        second = timed(lambda: self.second.forward(segments, None, self.hidden, self.dtype), clock)
        after = timed(lambda: self.first.sample(segments, (Sampling(),), self.hidden, self.dtype), clock)
        return before + after, second


def cut(ops: Ops[Any], checkpoint: Checkpoint, whole: Shard[Any], split: int) -> Ring:
    """The same weights as two stages, each with a cache that has held a short question."""
    config = checkpoint.config

    def stage(first: int, stop: int) -> Shard[Any]:
        held = BlockRange(first, stop)
        cache = KvCache(ops, config, held, slots=1, context=CONTEXT)
        cache.extend([Segment(0, 0, PROMPT, sample=False)])
        return Shard(ops, config, held, whole.weights[first:stop], None if first else whole.head, cache)

    hidden = model_manifest(checkpoint.name, config, ops.dtype).hidden_bytes
    return Ring(stage(0, split), stage(split, config.blocks), ops.dtype, bytes(hidden))


def predict(capability: Capability, manifest: ModelManifest, blocks: int, *, head: bool) -> float:
    """Equation (2) as the planner prices it."""
    member = Member.from_capability("here", capability, rtt_s=None, nat=NatClass.ORDINARY)
    device = price(member, manifest, Limits(blocks, blocks), Tier.COST)
    if device is None:
        raise SystemExit("the probe failed")
    stage = device.stage(is_head=head)
    return to_seconds(stage.fixed + blocks * stage.per_block)


def outcomes(ops: Ops[Any], checkpoint: Checkpoint, label: str) -> Iterator[Outcome]:
    """Every split's two stages."""
    config, clock = checkpoint.config, time.perf_counter
    manifest = model_manifest(checkpoint.name, config, ops.dtype)
    sized = memory_of(ops, config, context=CONTEXT, slots=1)
    rig: Rig[Any] = build_rig(ops, config, clock, cache_bytes())
    rig.chunk_s(clock)
    chunk_s = rig.chunk_s(clock)
    blocks = BlockRange(0, config.blocks)
    whole = load_shard(ops, checkpoint, blocks, holds_head=True, slots=1, context=CONTEXT)
    for split in range(1, config.blocks):
        ring = cut(ops, checkpoint, whole, split)
        rounds: list[Round] = []
        tokens: list[tuple[float, float]] = []
        for turn in range(WARM_UP + TOKENS):
            one, token = rig.round(clock), (ring.token(), ring.token())[1]
            if turn >= WARM_UP:
                rounds.append(one)
                tokens.append(token)
        capability = summary(sized, rig, rounds, chunk_s)
        took = [statistics.median(times) for times in zip(*tokens, strict=True)]
        for place, count in enumerate((split, config.blocks - split)):
            predicted_s = predict(capability, manifest, count, head=place == 0)
            yield Outcome(f"{label} {count} blocks", place == 0, predicted_s, took[place])


def backends(names: Sequence[str], threads: int | None) -> dict[str, Callable[[str], Ops[Any]]]:
    """Those of ``names`` that are installed."""
    made: dict[str, Callable[[str], Ops[Any]]] = {}
    if "torch" in names:
        made["torch"] = lambda dtype: TorchOps("cpu", dtype, threads=threads)
    if "mlx" in names and importlib.util.find_spec("mlx") is not None:
        from kafila.shard.mlx_ops import MlxOps  # noqa: PLC0415  - an extra that need not be installed

        made["mlx"] = MlxOps
    return made


def figures_of(found: Sequence[Outcome], groups: dict[str, list[Outcome]]) -> dict[str, float]:
    """Medians over everything, over heads and others, and by model and backend."""

    def error(some: Sequence[Outcome]) -> float:
        return round(statistics.median(abs(one.error) for one in some), 4)

    figures: dict[str, float] = {"stages": len(found), "median_error": error(found)}
    figures["head_median_error"] = error([one for one in found if one.head])
    figures["others_median_error"] = error([one for one in found if not one.head])
    figures["p90_error"] = round(statistics.quantiles([abs(one.error) for one in found], n=10)[-1], 4)
    figures["bias"] = round(statistics.median(one.error for one in found), 4)
    return figures | {f"{name}_median_error": error(some) for name, some in groups.items()}


def main(arguments: Sequence[str]) -> None:
    """Print one JSON object, or a table."""
    parser = command(__doc__)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--backends", nargs="+", default=["torch", "mlx"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--stages", action="store_true", help="print every stage")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    groups: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {"smollm2": open_checkpoint(options.model)}
        checkpoints |= {name: make_checkpoint(Path(folder) / name, shape) for name, shape in SHAPES.items()}
        for backend, make in backends(options.backends, options.threads).items():
            for dtype in options.dtypes:
                for name, checkpoint in checkpoints.items():
                    label = f"{name}_{backend}_{dtype}"
                    groups[label] = list(outcomes(make(dtype), checkpoint, label))
                    print(f"{label}: {len(groups[label])} stages", file=sys.stderr)
    found = [one for some in groups.values() for one in some]
    figures = figures_of(found, groups)
    context = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    if options.stages:
        for one in found:
            print(f"{one.name:44} {'head' if one.head else '':4} {one.predicted_s * 1e3:8.2f} ms predicted, "
                  f"{one.measured_s * 1e3:8.2f} ms measured, {one.error:+.1%}", file=sys.stderr)  # fmt: skip
    tell("predict", figures, TARGETS, context, as_json=options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
