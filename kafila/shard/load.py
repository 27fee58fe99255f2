"""From a checkpoint's files to one member's shard: its own tensors are read, nothing else.

Tensors are read one fused matrix at a time, so the peak is the shard itself and the largest matrix on its way in. The
embedding is mapped rather than read: a token needs one row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from kafila.errors import ModelIncomplete
from kafila.shard.cache import KvCache
from kafila.shard.cache_folder import complete
from kafila.shard.config import DecoderConfig
from kafila.shard.decoder import Shard
from kafila.shard.experts import EXPERTS, ROUTER, STACKED, ExpertShape
from kafila.shard.heap import pages_of_their_own
from kafila.shard.manifest import (
    EMBEDDING,
    NORM,
    UNEMBEDDING,
    Checkpoint,
    divided_at,
    own_specs,
    rows_from,
    stacks_experts,
    unembedding,
    weight_format,
)
from kafila.shard.ops import (
    BlockWeights,
    Experts,
    HeadWeights,
    HostMatrix,
    HostTensor,
    Mlp,
    Norm,
    Ops,
    QuantizedTensor,
    ScoredRows,
)
from kafila.shard.pairs import pair_order
from kafila.shard.quantize import quantize, to_float32
from kafila.shard.stored import StoredBlocks
from kafila.shard.tensor_files import map_tensor, read_tensor
from kafila.types import BlockRange, TensorSpec

T = TypeVar("T")

Read = Callable[[Path, TensorSpec], HostTensor]
"""`read_tensor` or `map_tensor`."""
Progress = Callable[[int, int], None]
"""Called with blocks loaded and blocks in all. What it raises ends the loading."""


class Weights(Protocol):
    """Where a block's weights come from, by their names within the block."""

    def tensor(self, name: str) -> HostTensor:
        """A norm or a bias: ``self_attn.q_proj.bias``."""
        ...

    def matrix(self, module: str) -> HostMatrix:
        """A weight, quantized where the model's are: ``self_attn.q_proj``."""
        ...

    def expert(self, index: int, name: str) -> HostMatrix:
        """A weight of one expert, likewise: ``up_proj``."""
        ...


def load_shard(
    ops: Ops[T],
    checkpoint: Checkpoint,
    blocks: BlockRange,
    *,
    holds_head: bool,
    slots: int,
    context: int,
    kv_dtype: str = "",
    progress: Progress | None = None,
    scored_percent: int = 0,
    spare_bytes: int = 0,
) -> Shard[T]:
    """Read, convert and place everything one member holds, and reserve ``slots`` caches of ``context`` tokens.

    ``scored_percent`` and ``spare_bytes`` as in `kafila.backend.Duty`. Raises ModelIncomplete naming tensor and file,
    ProtocolError for a vocabulary that cannot be divided so, or what the backend raises when the device has no room.
    """
    config = checkpoint.config
    first = divided_at(config, scored_percent)
    own = own_specs(checkpoint, blocks, holds_head=holds_head, scored_percent=scored_percent)
    read = complete(checkpoint.folder, own)
    loaded, stored = [], StoredBlocks(checkpoint, spare_bytes)
    with read, pages_of_their_own(), ops.scope():
        # The caches first: when they do not fit, that is known before minutes of reading.
        cache = KvCache(ops, config, blocks, slots=slots, context=context, dtype=kv_dtype)
        for index in range(blocks.first, blocks.stop):
            if progress is not None:
                progress(index - blocks.first, blocks.stop - blocks.first)
            sparse = config.experts is not None and config.experts.sparse[index]
            weights = build_block(ops, config, BlockFiles(checkpoint, index), sparse=sparse)
            loaded.append(replace(weights, stored=stored.block(ops, index)))
        head = _load_head(ops, checkpoint, first) if holds_head else None
        scored = _load_scored(ops, checkpoint, first) if first and not holds_head else None
        return Shard(ops, config, blocks, loaded, head, cache, scored, stored)


def build_block(ops: Ops[T], config: DecoderConfig, weights: Weights, *, sparse: bool = False) -> BlockWeights[T]:
    """One block from its tensors, fused and reordered as `BlockWeights` says; ``sparse``: it has experts."""

    def matrix(names: Sequence[str], *, bias: bool, heads: Sequence[int] = ()) -> Callable[[T], T]:
        """``heads``: of how many heads the rows of the first matrices are, which then are put in pair order."""
        counts = (*heads, *(0 for _ in names[len(heads) :]))
        parts = [_matrix_in_pair_order(weights.matrix(name), count) for name, count in zip(names, counts, strict=True)]
        if not bias:
            return ops.matrix(parts, None)
        biases = [weights.tensor(f"{name}.bias") for name in names]
        return ops.matrix(parts, [pair_order(part, count) for part, count in zip(biases, counts, strict=True)])

    def norm(name: str) -> Norm[T]:
        return make_norm(ops, config, weights.tensor(f"{name}.weight"))

    attention = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    names = config.norms
    return BlockWeights(
        attention_norm=norm(names.attention),
        qkv=matrix(attention, bias=config.qkv_bias, heads=(config.heads, config.kv_heads)),
        qk_norm=_qk_norm(ops, config, weights) if config.qk_norm else None,
        o=matrix(["self_attn.o_proj"], bias=config.o_bias),
        mlp_norm=norm(names.mlp),
        mlp=Mlp(
            up_gate=matrix(["mlp.up_proj", "mlp.gate_proj"], bias=config.mlp_bias),
            down=matrix(["mlp.down_proj"], bias=config.mlp_bias),
            activation=config.activation,
        )
        if config.experts is None or not sparse
        else _experts(ops, config.experts, weights),
        attended_norm=norm(names.attended) if names.attended else None,
        mlp_out_norm=norm(names.mlp_out) if names.mlp_out else None,
    )


def make_norm(ops: Ops[T], config: DecoderConfig, weight: HostTensor) -> Norm[T]:
    """An RMSNorm of the model's; what is added to its weight is added in float32, as the reference does it."""
    if config.norm_offset:
        weight = HostTensor("F32", to_float32(weight) + np.float32(config.norm_offset))
    return ops.norm(weight, config.norm_eps)


def _experts(ops: Ops[T], shape: ExpertShape, weights: Weights) -> Experts[T]:
    """Read one after the other, as the backend takes them."""
    parts = (
        ([weights.expert(index, "up_proj"), weights.expert(index, "gate_proj")], weights.expert(index, "down_proj"))
        for index in range(shape.count)
    )
    router = ops.matrix([weights.matrix(ROUTER.removesuffix(".weight"))], None)
    return Experts(router, ops.expert_bank(parts, shape.count), shape.active, shape.normalised)


def _matrix_in_pair_order(matrix: HostMatrix, heads: int) -> HostMatrix:
    if isinstance(matrix, HostTensor):
        return pair_order(matrix, heads)
    return matrix.rows(pair_order(HostTensor("F32", np.arange(matrix.outputs)), heads).data)


def _qk_norm(ops: Ops[T], config: DecoderConfig, weights: Weights) -> Norm[T]:
    """Both norms as one, a row a head, so that q and k are normalised together. Both are of one dtype in practice."""
    q, k = (pair_order(weights.tensor(f"self_attn.{name}_norm.weight"), 1) for name in ("q", "k"))
    rows = [*(q for _ in range(config.heads)), *(k for _ in range(config.kv_heads))]
    if q.dtype != k.dtype:
        raise ModelIncomplete(f"the norms of q and k differ in dtype ({q.dtype}, {k.dtype}), which is not supported")
    return make_norm(ops, config, HostTensor(q.dtype, np.stack([row.data for row in rows])))


@dataclass(frozen=True, slots=True)
class BlockFiles:
    """A block's weights in a checkpoint's files."""

    checkpoint: Checkpoint
    index: int

    def tensor(self, name: str) -> HostTensor:
        """Read now."""
        return read_tensor(self.checkpoint.folder, self.checkpoint.tensors[f"model.layers.{self.index}.{name}"])

    def matrix(self, module: str) -> HostMatrix:
        """Read and, where that is asked for, quantized now."""
        return host_matrix(self.checkpoint, f"model.layers.{self.index}.{module}", read_tensor)

    def expert(self, index: int, name: str) -> HostMatrix:
        """A tensor of its own, or its part of one."""
        block = f"model.layers.{self.index}."
        if not stacks_experts(self.checkpoint.config):
            return host_matrix(self.checkpoint, f"{block}{EXPERTS}{index}.{name}", read_tensor)

        def read_part(folder: Path, whole: TensorSpec) -> HostTensor:
            return read_tensor(folder, part_of(whole, index))

        return host_matrix(self.checkpoint, f"{block}{STACKED}{name}", read_part)


def part_of(whole: TensorSpec, index: int) -> TensorSpec:
    """The tensor at ``index`` of the first axis."""
    size = (whole.end - whole.start) // whole.shape[0]
    start = whole.start + index * size
    return replace(whole, shape=whole.shape[1:], start=start, end=start + size)


def host_matrix(checkpoint: Checkpoint, module: str, read: Read) -> HostMatrix:
    """A weight as it is to be held: as stored, or quantized here."""

    def part(kind: str) -> HostTensor:
        return read(checkpoint.folder, checkpoint.tensors[f"{module}.{kind}"])

    quantization, affine = checkpoint.config.quantization, weight_format(checkpoint.config, f"{module}.weight")
    if quantization is None or affine is None:
        return part("weight")
    if not quantization.stored:
        return quantize(part("weight"), affine)
    return QuantizedTensor(part("weight").data, part("scales"), part("biases"), affine.bits, affine.group_size)


def _load_head(ops: Ops[T], checkpoint: Checkpoint, first: int) -> HeadWeights[T]:
    """``first``: of the rows that the last member scores as well; 0: there are none."""
    norm = _final_norm(ops, checkpoint)
    table = ops.table(_embedding(ops, checkpoint))
    weight = _unembedding(ops, checkpoint)
    if not first:
        return HeadWeights(table, norm, ops.tied_matrix(table) if weight is None else ops.matrix([weight], None))
    divided = ops.divided_tied_matrix(table, first) if weight is None else ops.divided_matrix(weight, first)
    return HeadWeights(table, norm, divided.whole, ScoredRows(norm, divided.own, 0))


def _unembedding(ops: Ops[T], checkpoint: Checkpoint) -> HostMatrix | None:
    """None: the table is what tokens are scored by."""
    config = checkpoint.config
    if not config.tied:
        return host_matrix(checkpoint, UNEMBEDDING, read_tensor)
    if config.quantization is not None and not ops.table_bytes(config.vocab, config.hidden):
        # Mapped for itself: what is read of it goes again, and the table keeps the rows that are looked up.
        return host_matrix(checkpoint, EMBEDDING, map_tensor)
    return None


def _load_scored(ops: Ops[T], checkpoint: Checkpoint, first: int) -> ScoredRows[T]:
    """The rows from ``first`` on, and no byte of the others."""

    def read(folder: Path, whole: TensorSpec) -> HostTensor:
        return read_tensor(folder, rows_from(whole, first))

    weight = host_matrix(checkpoint, unembedding(checkpoint.config), read)
    return ScoredRows(_final_norm(ops, checkpoint), ops.matrix([weight], None), first)


def _final_norm(ops: Ops[T], checkpoint: Checkpoint) -> Norm[T]:
    return make_norm(ops, checkpoint.config, read_tensor(checkpoint.folder, checkpoint.tensors[NORM]))


def _embedding(ops: Ops[T], checkpoint: Checkpoint) -> HostMatrix:
    """Mapped. What is to be quantized stays mapped and plain where that takes none of the device's memory."""
    config = checkpoint.config
    if _quantizes(config) and not ops.table_bytes(config.vocab, config.hidden):
        return map_tensor(checkpoint.folder, checkpoint.tensors[f"{EMBEDDING}.weight"])
    return host_matrix(checkpoint, EMBEDDING, map_tensor)


def _quantizes(config: DecoderConfig) -> bool:
    return config.quantization is not None and not config.quantization.stored
