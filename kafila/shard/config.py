"""What a checkpoint's ``config.json`` says of its decoder, in one form for all families and both dialects.

transformers 4 writes ``rope_theta``, ``rope_scaling`` and ``torch_dtype``; transformers 5 writes ``rope_parameters``
and ``dtype``. Defaults for absent keys are those of transformers' configuration classes. Standard library only: the
planner reads sizes where no tensor library is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kafila.errors import ModelIncomplete, UnsupportedModel
from kafila.shard.experts import ExpertShape, parse_experts
from kafila.shard.formats import Quantization, parse_quantization
from kafila.shard.keys import Json, Keys, load_keys
from kafila.shard.rope import Rope, parse_rope


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and constants of a decoder-only transformer. Everything the one decoder block varies in is here."""

    family: str
    """The architecture's name in ``config.json``: ``LlamaForCausalLM``."""
    dtype: str
    """The checkpoint's own: ``bfloat16``, ``float16`` or ``float32``."""
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    """By block: how positions turn queries and keys."""
    tied: bool
    """The unembedding is the embedding."""
    qk_norm: bool
    """RMSNorm over each head of q and k before RoPE (Qwen3)."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """By block: how many positions a token sees, itself included; None for all before it."""
    max_context: int
    eos_ids: tuple[int, ...]
    """Every id that ends a turn: ``generation_config.json``'s where there are any, else ``config.json``'s."""
    quantization: Quantization | None = None
    """How matrices are held in few bits; None: all plainly."""
    experts: ExpertShape | None = None
    """None: every block has one MLP."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture differs where its config is silent. ``None``: the config's own flag decides."""

    qk_norm: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    head_dim: int | None = None
    sliding: bool = False
    """Has windows, where ``use_sliding_window`` says so."""
    window: int | None = None
    """Has windows in every block, of this size where ``sliding_window`` is absent (``null`` is none)."""
    experts: bool = False
    """Has experts, and windows in every block where it has any."""


_FAMILIES = {
    "LlamaForCausalLM": _Family(),  # Llama 2 and 3, SmolLM2, and many that took its shape
    "MistralForCausalLM": _Family(qkv_bias=False, o_bias=False, mlp_bias=False, window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, o_bias=False, mlp_bias=False, sliding=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True, mlp_bias=False, head_dim=128, sliding=True),
    "Qwen3MoeForCausalLM": _Family(qk_norm=True, mlp_bias=False, sliding=True, experts=True),
}
SUPPORTED = tuple(_FAMILIES)
_DTYPES = ("bfloat16", "float16", "float32")
_DEFAULT_THETA = 10_000.0  # LlamaConfig, Qwen2Config and Qwen3Config of transformers agree


def parse_config(text: str | bytes, generation_text: str | bytes | None = None) -> DecoderConfig:
    """The decoder that ``config.json`` describes; ``generation_text`` is ``generation_config.json`` where there is one.

    Raises UnsupportedModel for what we do not implement, ModelIncomplete for what is missing or makes no sense.
    """
    config = load_keys("config.json", text)
    generation = load_keys("generation_config.json", "{}" if generation_text is None else generation_text)
    family_name, family = _family(config)
    _refuse_variants(config, family_name)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    attention_bias = config.flag("attention_bias")
    blocks = config.count("num_hidden_layers")
    decoder = DecoderConfig(
        family=family_name,
        dtype=_dtype(config),
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        kv_heads=config.count("num_key_value_heads", heads),
        head_dim=config.count("head_dim", family.head_dim or hidden // heads),
        intermediate=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        ropes=(parse_rope(config, family_name, _DEFAULT_THETA),) * blocks,
        tied=config.flag("tie_word_embeddings"),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=config.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        windows=_windows(config, family, blocks),
        max_context=config.count("max_position_embeddings", 2048),
        eos_ids=_eos_ids(generation.values) or _eos_ids(config.values),
        quantization=parse_quantization(config.get("quantization")),
        experts=parse_experts(config, blocks) if family.experts else None,
    )
    if decoder.heads % decoder.kv_heads or decoder.head_dim % 2:
        raise ModelIncomplete(
            f"config.json: {decoder.heads} heads of {decoder.head_dim} do not divide into "
            f"{decoder.kv_heads} key/value heads"
        )
    return decoder


def _family(config: Keys) -> tuple[str, _Family]:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) and architectures else [config.get("model_type")]
    for name in names:
        if isinstance(name, str) and name in _FAMILIES:
            return name, _FAMILIES[name]
    raise UnsupportedModel(f"architecture {names[0]!r} is not supported; these are: {', '.join(SUPPORTED)}")


def _refuse_variants(config: Keys, family: str) -> None:
    """Settings that would change the arithmetic and that we do not implement are refused, never ignored."""
    if (other := config.get("quantization_config")) and not config.get("quantization"):
        method = other.get("quant_method", "unknown") if isinstance(other, dict) else "unknown"
        raise UnsupportedModel(
            f"this {family} checkpoint is quantized by the method {method!r}; supported are MLX's affine format, and "
            "bfloat16, float16 and float32 weights"
        )
    if (activation := config.get("hidden_act")) not in (None, "silu"):
        raise UnsupportedModel(f"{family} with the activation {activation!r} is not supported; supported is: silu")
    if config.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(f"{family} with a partial rotary embedding is not supported")


def _dtype(config: Keys) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    if value not in _DTYPES:
        raise UnsupportedModel(f"weights of type {value!r} are not supported; supported are: {', '.join(_DTYPES)}")
    return str(value)


def _windows(config: Keys, family: _Family, blocks: int) -> tuple[int | None, ...]:
    """By block, from ``layer_types`` (newer configs) or ``max_window_layers``: earlier blocks see everything."""
    if family.window is not None:
        absent = "sliding_window" in config.values and config.get("sliding_window") is None
        return (None if absent else config.count("sliding_window", family.window),) * blocks
    if not family.sliding or not config.flag("use_sliding_window") or config.get("sliding_window") is None:
        return (None,) * blocks
    window = config.count("sliding_window")
    if family.experts:
        return (window,) * blocks
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers") or 0
        return tuple(window if index >= first else None for index in range(blocks))
    if not isinstance(kinds, list) or len(kinds) != blocks or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"config.json: layer_types has other than {blocks} of full_attention or sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_ids(values: Json) -> tuple[int, ...]:
    ids = values.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(item for item in ids if isinstance(item, int))
