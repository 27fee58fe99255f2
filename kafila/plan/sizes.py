"""A model's sizes from its config.json alone, for planning before anything is fetched.

Covers the decoders that share one shape: RMSNorm, rotary attention with grouped keys and values, a gated MLP or experts
that each are one. What a checkpoint really holds is measured from its file headers when it is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from kafila.errors import ModelIncomplete, UnsupportedModel
from kafila.plan.members import ModelManifest
from kafila.types import ExpertBytes

_QK_NORM = {"qwen3", "qwen3_moe", "gemma3_text"}
"""Families with a norm over each head's query and key."""
_QKV_BIAS = {"qwen2"}
"""Families whose query, key and value projections always have biases."""
_EXPERTS = {"qwen3_moe"}
"""Families whose blocks have a router and experts."""
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_SILENT: Mapping[str, Mapping[str, object]] = {
    "gemma2": {**_GEMMA, "max_position_embeddings": 8192},
    "gemma3_text": {**_GEMMA, "max_position_embeddings": 131_072},
}
"""What families mean where their configurations are silent, those which also have four norms a block and not two."""
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_DEFAULT_CONTEXT = 2048
"""What ``max_position_embeddings`` means when a Llama-style config leaves it out."""


def manifest_from_config(config: Mapping[str, object], name: str) -> ModelManifest:
    """Sizes of the model that ``config`` (a parsed config.json) describes, at its dtype, bfloat16 if it names none.

    Raises UnsupportedModel for another architecture or a quantized checkpoint, ModelIncomplete for a setting that is
    missing or wrong; each names it.
    """
    family = _family(config, name)
    config = {**_SILENT.get(family, {}), **config}
    shape = _shape(config, name)
    width = _dtype_bytes(config, name)
    vocabulary = _whole(config, "vocab_size", name) * shape.hidden
    tied = config.get("tie_word_embeddings") is True
    blocks = _whole(config, "num_hidden_layers", name)
    block_bytes = _block_weights(config, family, shape) * width
    experts = None
    if family in _EXPERTS:
        block_bytes, experts = _with_experts(config, name, blocks, block_bytes, shape, width)
    return ModelManifest(
        name=name,
        blocks=blocks,
        block_bytes=block_bytes,
        head_bytes=(vocabulary * (1 if tied else 2) + shape.hidden) * width,
        head_read_bytes=(vocabulary + shape.hidden) * width,
        kv_bytes_per_token_per_block=2 * shape.keys * width,
        hidden_bytes=shape.hidden * width,
        max_context=_whole(config, "max_position_embeddings", name, _DEFAULT_CONTEXT),
        experts=experts,
    )


class _Shape(NamedTuple):
    """Widths of one block's projections."""

    hidden: int
    inner: int
    head_dim: int
    queries: int
    keys: int


def _shape(config: Mapping[str, object], name: str) -> _Shape:
    hidden = _whole(config, "hidden_size", name)
    heads = _whole(config, "num_attention_heads", name)
    kv_heads = _whole(config, "num_key_value_heads", name, heads)
    head_dim = _whole(config, "head_dim", name, hidden // heads)
    inner = _whole(config, "intermediate_size", name)
    return _Shape(hidden, inner, head_dim, heads * head_dim, kv_heads * head_dim)


def _block_weights(config: Mapping[str, object], family: str, shape: _Shape) -> int:
    """Weights of one block: attention, gated MLP, norms, and what the family adds."""
    hidden, inner, head_dim, queries, keys = shape
    weights = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner + (4 if family in _SILENT else 2) * hidden
    if family in _QK_NORM:
        weights += 2 * head_dim
    if config.get("attention_bias") is True:
        weights += queries + 2 * keys + hidden
    elif family in _QKV_BIAS:
        weights += queries + 2 * keys
    if config.get("mlp_bias") is True:
        weights += 2 * inner + hidden
    return weights


def _with_experts(
    config: Mapping[str, object], name: str, blocks: int, plain_bytes: int, shape: _Shape, width: int
) -> tuple[int, ExpertBytes | None]:
    """Bytes of the largest block, and what is read of blocks; ``plain_bytes`` has a block with one MLP."""
    count = _whole(config, "num_local_experts", name, _whole(config, "num_experts", name, 128))
    step = _whole(config, "decoder_sparse_step", name, 1)
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, Collection):
        raise ModelIncomplete(f"{name}: config.json does not say 'mlp_only_layers' as a list of blocks")
    sparse = sum(index not in dense and (index + 1) % step == 0 for index in range(blocks))
    if not sparse:
        return plain_bytes, None
    router = count * shape.hidden * width
    experts = 3 * shape.hidden * _whole(config, "moe_intermediate_size", name, 768) * count * width
    mlp = 3 * shape.hidden * shape.inner * width
    shared = plain_bytes - mlp + (sparse * router + (blocks - sparse) * mlp) // blocks
    largest = max(plain_bytes - mlp + router + experts, plain_bytes if sparse < blocks else 0)
    active = _whole(config, "num_experts_per_tok", name, 8)
    return largest, ExpertBytes(count, min(active, count), shared, sparse * experts // blocks)


def _family(config: Mapping[str, object], name: str) -> str:
    family = config.get("model_type")
    if family not in SUPPORTED:
        raise UnsupportedModel(f"{name} is of the architecture {family!r}; supported are {', '.join(SUPPORTED)}")
    if config.get("quantization") or config.get("quantization_config"):
        raise UnsupportedModel(f"{name} is quantized: its sizes are not told by config.json alone")
    return str(family)


def _dtype_bytes(config: Mapping[str, object], name: str) -> int:
    dtype = config.get("dtype", config.get("torch_dtype")) or "bfloat16"
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise UnsupportedModel(f"{name} has the dtype {dtype!r}; supported are {', '.join(_BYTES)}")
    return _BYTES[dtype]


def _whole(config: Mapping[str, object], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelIncomplete(f"{name}: config.json does not say {key!r} as a whole number above 0")
    return value
