"""What a configuration says of experts: blocks whose MLP is many small ones, of which a token goes through a few."""

from __future__ import annotations

from dataclasses import dataclass

from kafila.errors import ModelIncomplete
from kafila.shard.keys import Keys

ROUTER = "mlp.gate.weight"
"""Within a block: (experts, hidden)."""
EXPERTS = "mlp.experts."
"""Followed by an expert's number and ``.up_proj.weight``: as transformers writes them."""
STACKED = "mlp.switch_mlp."
"""Followed by ``up_proj.weight``: as MLX writes them."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts: a router chooses some of them for each token and says how much each counts."""

    count: int
    active: int
    """How many of them a token goes through."""
    intermediate: int
    """Of one expert."""
    normalised: bool
    """The weights of the chosen add up to 1."""
    sparse: tuple[bool, ...]
    """By block: whether it has experts, or one MLP like other families."""


def parse_experts(config: Keys, blocks: int) -> ExpertShape | None:
    """Qwen3-MoE's keys; None where no block has experts.

    transformers 5 writes ``num_local_experts``, 4 ``num_experts``. Every ``decoder_sparse_step``-th block has them
    unless ``mlp_only_layers`` lists it. Raises ModelIncomplete for what makes no sense.
    """
    key = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise ModelIncomplete(f"{config.file}: mlp_only_layers is not a list of blocks")
    step = config.count("decoder_sparse_step", 1)
    shape = ExpertShape(
        count=config.count(key, 128),
        active=config.count("num_experts_per_tok", 8),
        intermediate=config.count("moe_intermediate_size", 768),
        normalised=config.flag("norm_topk_prob"),
        sparse=tuple(index not in dense and (index + 1) % step == 0 for index in range(blocks)),
    )
    if shape.active > shape.count:
        raise ModelIncomplete(f"{config.file}: a token cannot go through {shape.active} of {shape.count} experts")
    return shape if any(shape.sparse) else None


def expert_tensors(shape: ExpertShape, hidden: int, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Name within the block and shape of the router's and the experts' tensors; ``stacked``: as MLX writes them, the
    experts' matrices in one tensor (experts, outputs, inputs)."""
    inner = shape.intermediate
    matrices = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {ROUTER: (shape.count, hidden)}
    if stacked:
        return shapes | {f"{STACKED}{name}.weight": (shape.count, *size) for name, size in matrices.items()}
    return shapes | {
        f"{EXPERTS}{index}.{name}.weight": size for index in range(shape.count) for name, size in matrices.items()
    }
