"""What a share of a model takes of a device's memory besides what its numbers take in a file.

Weights are padded by some devices, loading needs room for the matrix on its way in, a pass for its activations. All of
it is known from the model's shapes, so that a plan admits what a member will really hold.
"""

from __future__ import annotations

from math import prod
from typing import TypeVar

from kafila.shard.config import DecoderConfig
from kafila.shard.manifest import block_tensors
from kafila.shard.ops import Ops

T = TypeVar("T")

PASS_ROWS = 256
"""Rows of the largest pass besides one a slot: a chunk of a prompt (``ring.schedule.PREFILL_CHUNK_TOKENS``)."""
LOADED_AT_ONCE = 1 << 26
"""Weights of a matrix that are converted at once, at most (``torch_ops``)."""
LIBRARY_BYTES = 48 << 20
"""A tensor library's own: its code as it is paged in by use, threads' buffers, compiled kernels."""
_FLOAT = 4


def block_memory_bytes(ops: Ops[T], config: DecoderConfig) -> int:
    """What one block's weights take on this device."""
    shapes = block_tensors(config, 0).values()
    matrices = sum(ops.matrix_bytes(*shape) for shape in shapes if len(shape) == 2)
    return matrices + sum(prod(shape) * _FLOAT for shape in shapes if len(shape) == 1)


def head_memory_bytes(ops: Ops[T], config: DecoderConfig) -> int:
    """What embedding, final norm and unembedding take. An embedding that is tied is counted once."""
    table = 0 if config.tied else ops.table_bytes(config.vocab, config.hidden)
    return table + config.hidden * _FLOAT + ops.matrix_bytes(config.vocab, config.hidden)


def workspace_bytes(config: DecoderConfig, *, context: int, slots: int) -> int:
    """What is needed for a while: loading, or the largest pass and the drawing after it, whichever takes more."""
    serving = _pass_bytes(config, context, slots) + _draw_bytes(config, slots)
    return LIBRARY_BYTES + _rope_bytes(config, context) + max(_loading_bytes(config), serving)


def _loading_bytes(config: DecoderConfig) -> int:
    """The largest matrix as it is read, and again in float32 on its way to where it is kept."""
    up_gate = 2 * config.intermediate * config.hidden
    head = config.vocab * config.hidden
    return max(up_gate * (2 + _FLOAT), min(head, LOADED_AT_ONCE) * _FLOAT + (0 if config.tied else 2 * head))


def _pass_bytes(config: DecoderConfig, context: int, slots: int) -> int:
    """Activations of one block in float32, a request's keys and values in it, and who sees whom."""
    rows = PASS_ROWS + slots
    heads = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    attention = 3 * heads + 2 * keys
    mlp = 3 * config.intermediate
    activations = rows * (4 * config.hidden + max(attention, mlp)) * _FLOAT
    seen = context * 2 * keys * _FLOAT
    masks = PASS_ROWS * context * (1 + _FLOAT)
    return activations + seen + masks


def _draw_bytes(config: DecoderConfig, slots: int) -> int:
    """Logits, and a copy while a token is drawn from them."""
    return 2 * slots * config.vocab * _FLOAT


def _rope_bytes(config: DecoderConfig, context: int) -> int:
    """Every position's rotation, kept, and as much again while it is made."""
    return 2 * context * config.head_dim * _FLOAT
