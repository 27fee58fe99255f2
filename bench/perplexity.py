"""What few bits cost: perplexity of a fixed text, against the same model in bfloat16.

    python bench/perplexity.py [--json] [--model FOLDER] [--threads N] [--dtype bfloat16]

The text is ``perplexity.txt`` beside this file, read in windows of `WINDOW` tokens, every token judged by all before it
in its window. ``int8_loss`` and ``int4_loss`` are how much perplexity rises, as a share of bfloat16's. ``matched_grid``
is the share of the checkpoint's groups of 32 weights that hold no more than 16 different values: a model that was once
quantized to 4 bits in such groups (the demonstration model is) loses next to nothing when it is again, and a figure
with a grid near 1 so says little about others. ``int4_loss_off_grid`` is for those: the same model with its channels in
random orders, so that it answers the same and no group fits (not for families with biases or norms within heads).
``int4_groups_of_64_loss`` is for comparison: no group of 64 fits that grid.
"""

from __future__ import annotations

import kafila.shard  # noqa: F401  # isort: skip  - before torch: it says how threads wait

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from telling import command, tell
from tokenizers import Tokenizer
from torch import Tensor

from kafila.shard.config import DecoderConfig
from kafila.shard.decoder import logits_of
from kafila.shard.formats import Affine
from kafila.shard.load import load_shard
from kafila.shard.manifest import Checkpoint, model_manifest, open_checkpoint
from kafila.shard.quantize import to_float32
from kafila.shard.schemes import with_scheme
from kafila.shard.tensor_files import read_tensor
from kafila.shard.torch_ops import TorchOps
from kafila.types import BlockRange, Segment

TARGETS = {"int8_loss": "<=0.01", "int4_loss": "<=0.06", "int4_loss_off_grid": "<=0.06"}
TEXT = Path(__file__).with_name("perplexity.txt")
WINDOW = 512
ORDERS = range(2)
"""Seeds: what one order loses differs from what another does."""
_GRID_GROUP, _GRID_LEVELS = 32, 16


def perplexity(checkpoint: Checkpoint, tokens: Sequence[int], dtype: str, threads: int) -> float:
    """exp of the mean negative log-likelihood of each token after the first of its window."""
    ops = TorchOps("cpu", dtype, threads=threads)
    whole = BlockRange(0, checkpoint.config.blocks)
    shard = load_shard(ops, checkpoint, whole, holds_head=True, slots=1, context=WINDOW)
    if shard.head is None:
        raise SystemExit("the shard was to hold the head")
    loss = count = 0.0
    for start in range(0, len(tokens) - 1, WINDOW):
        window = tokens[start : start + WINDOW]
        hidden = shard.forward([Segment(0, 0, len(window), sample=False)], window, None, dtype)
        with ops.scope():
            rows = ops.from_bytes(hidden, dtype, checkpoint.config.hidden)
            logits = ops.to_numpy(logits_of(ops, shard.head, checkpoint.config.logit_cap, rows))
        expected = torch.tensor(window[1:])
        loss += float(torch.nn.functional.cross_entropy(torch.from_numpy(logits)[:-1], expected, reduction="sum"))
        count += len(expected)
    return math.exp(loss / count)


def in_groups_of_64(config: DecoderConfig) -> DecoderConfig:
    """``int4`` with larger groups in its blocks."""
    four = with_scheme(config, "int4")
    if four.quantization is None:
        raise SystemExit("int4 was to quantize")
    wider = {
        module: Affine(4, 64) if form is not None and form.bits == 4 else form
        for module, form in four.quantization.overrides.items()
    }
    return replace(four, quantization=replace(four.quantization, overrides=wider))


def matched_grid(checkpoint: Checkpoint) -> float:
    """See the module's text; of the first block's ``mlp.down_proj``."""
    spec = checkpoint.tensors["model.layers.0.mlp.down_proj.weight"]
    groups = np.sort(to_float32(read_tensor(checkpoint.folder, spec)).reshape(-1, _GRID_GROUP), axis=1)
    return float(((np.diff(groups, axis=1) > 0).sum(1) < _GRID_LEVELS).mean())


def _reordered(name: str, w: Tensor, hidden: Tensor, within: Sequence[Tensor]) -> Tensor:
    """A tensor whose channels come in other orders: ``hidden``'s, and ``within`` each block's MLP."""
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return w[within[int(name.split(".")[2])]][:, hidden]
    if name.endswith("down_proj.weight"):
        return w[hidden][:, within[int(name.split(".")[2])]]
    if name.endswith(("o_proj.weight", "norm.weight")):
        return w[hidden]
    return w[:, hidden] if w.dim() > 1 else w


def in_another_order(checkpoint: Checkpoint, seed: int, into: Path) -> Checkpoint:
    """The same model, its hidden and intermediate channels in a random order: what it answers stays, groups do not."""
    config, random = checkpoint.config, torch.Generator().manual_seed(seed)
    hidden = torch.randperm(config.hidden, generator=random)
    within = [torch.randperm(config.intermediate, generator=random) for _ in range(config.blocks)]
    tensors = {name: w for file in checkpoint.folder.glob("*.safetensors") for name, w in load_file(file).items()}
    tensors = {name: _reordered(name, w, hidden, within).contiguous() for name, w in tensors.items()}
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_text(checkpoint.config_text)
    return open_checkpoint(into)


def off_grid(checkpoint: Checkpoint, tokens: Sequence[int], dtype: str, threads: int) -> dict[str, float]:
    """``int8_loss_off_grid`` and ``int4_loss_off_grid``: the mean over `ORDERS`."""
    losses: dict[str, list[float]] = {scheme: [] for scheme in ("int8", "int4")}
    for seed in ORDERS:
        with tempfile.TemporaryDirectory() as folder:
            other = in_another_order(checkpoint, seed, Path(folder))
            plain = perplexity(other, tokens, dtype, threads)
            for scheme, found in losses.items():
                config = with_scheme(other.config, scheme)
                found.append(perplexity(replace(other, config=config), tokens, dtype, threads) / plain - 1)
    return {f"{scheme}_loss_off_grid": round(sum(found) / len(found), 5) for scheme, found in losses.items()}


def measure(checkpoint: Checkpoint, dtype: str, threads: int) -> dict[str, float]:
    """All figures."""
    tokens = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json")).encode(TEXT.read_text()).ids
    ways: dict[str, Callable[[DecoderConfig], DecoderConfig]] = {
        "int8": lambda config: with_scheme(config, "int8"),
        "int4": lambda config: with_scheme(config, "int4"),
        "int4_groups_of_64": in_groups_of_64,
    }
    plain = perplexity(checkpoint, tokens, dtype, threads)
    figures = {"tokens": float(len(tokens)), f"{dtype}_perplexity": round(plain, 3)}
    plain_bytes = model_manifest("m", checkpoint.config, dtype).block_bytes
    for name, way in ways.items():
        config = way(checkpoint.config)
        found = perplexity(replace(checkpoint, config=config), tokens, dtype, threads)
        figures[f"{name}_perplexity"] = round(found, 3)
        figures[f"{name}_loss"] = round(found / plain - 1, 5)
        figures[f"{name}_block_bytes_share"] = round(model_manifest("m", config, dtype).block_bytes / plain_bytes, 3)
    figures |= off_grid(checkpoint, tokens, dtype, threads)
    return figures | {"matched_grid": round(matched_grid(checkpoint), 3)}


def main(arguments: Sequence[str]) -> None:
    """Print one JSON object, or a table."""
    parser = command(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    checkpoint = open_checkpoint(options.model)
    figures = measure(checkpoint, options.dtype, options.threads)
    context: dict[str, Any] = {"model": checkpoint.name, "torch": torch.__version__, "window": WINDOW}
    tell("perplexity", figures, TARGETS, context, as_json=options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
