"""What a checkpoint's ``config.json`` says of its decoder, in one form for all families and both dialects.

transformers 4 writes ``rope_theta``, ``rope_scaling`` and ``torch_dtype``; transformers 5 writes ``rope_parameters``
and ``dtype``. Defaults for absent keys are those of transformers' configuration classes. Standard library only: the
planner reads sizes where no tensor library is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafila.errors import ModelIncomplete, UnsupportedModel
from kafila.shard.experts import ExpertShape, parse_experts
from kafila.shard.families import FAMILIES, PRE_NORMS, BlockNorms, Family, Windows, own_name
from kafila.shard.formats import Quantization, parse_quantization
from kafila.shard.keys import Json, Keys, load_keys
from kafila.shard.rope import Rope, parse_rope, parse_window_rope


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
    norms: BlockNorms = PRE_NORMS
    norm_offset: float = 0.0
    """Added to the weights of all norms: Gemma stores by how much they differ from 1."""
    activation: str = "silu"
    """Of the MLP's gate: ``silu`` or ``gelu_pytorch_tanh``."""
    score_scale: float | None = None
    """Of attention's scores; None: one over the root of ``head_dim``."""
    score_cap: float = 0.0
    """Scores s become cap * tanh(s / cap); 0: they are as they are."""
    logit_cap: float = 0.0
    """Likewise, the logits."""
    embedding_scale: float = 1.0
    """What an embedded token is multiplied by, rounded to the dtype that the model is served in."""


SUPPORTED = tuple(FAMILIES)
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_DTYPES = ("bfloat16", "float16", "float32")


def parse_config(text: str | bytes, generation_text: str | bytes | None = None) -> DecoderConfig:
    """The decoder that ``config.json`` describes; ``generation_text`` is ``generation_config.json`` where there is one.

    Raises UnsupportedModel for what we do not implement, ModelIncomplete for what is missing or makes no sense.
    """
    family_name, family, config = _family(load_keys("config.json", text))
    generation = load_keys("generation_config.json", "{}" if generation_text is None else generation_text)
    _refuse_variants(config, family_name)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    attention_bias = config.flag("attention_bias")
    blocks = config.count("num_hidden_layers")
    windows = _windows(config, family, blocks)
    decoder = DecoderConfig(
        family=family_name,
        dtype=_dtype(config),
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        kv_heads=config.count("num_key_value_heads", heads),
        head_dim=config.count("head_dim", hidden // heads),
        intermediate=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        ropes=_ropes(config, family_name, family, windows),
        tied=config.flag("tie_word_embeddings"),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=config.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        windows=windows,
        max_context=config.count("max_position_embeddings", 2048),
        eos_ids=_eos_ids(generation.values) or _eos_ids(config.values),
        quantization=_quantization(config),
        experts=parse_experts(config, blocks) if family.experts else None,
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=_activation(config, family_name, family),
        score_scale=_root(config, "query_pre_attn_scalar"),
        score_cap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
        embedding_scale=hidden**0.5 if family.scales_embedding else 1.0,
    )
    if decoder.heads % decoder.kv_heads or decoder.head_dim % 2:
        raise ModelIncomplete(
            f"config.json: {decoder.heads} heads of {decoder.head_dim} do not divide into "
            f"{decoder.kv_heads} key/value heads"
        )
    return decoder


def _family(config: Keys) -> tuple[str, Family, Keys]:
    """Its name, its facts, and the configuration with what its silence means."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) and architectures else [config.get("model_type")]
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            family = FAMILIES[name]
            return name, family, Keys(config.file, {**family.defaults, **_text_values(config, family.text_key)})
    raise UnsupportedModel(f"architecture {names[0]!r} is not supported; these are: {', '.join(SUPPORTED)}")


def _text_values(config: Keys, key: str) -> Json:
    """The keys that describe the decoder: all, or those under ``key`` and whatever else stands beside that."""
    if not key:
        return config.values
    text = config.get(key)
    if not isinstance(text, dict):
        raise ModelIncomplete(f"{config.file} has no {key}: download the checkpoint again")
    return {**text, **{name: value for name, value in config.values.items() if value is not None}}


def _quantization(config: Keys) -> Quantization | None:
    values = config.get("quantization")
    if isinstance(values, dict):
        values = {own_name(name): value for name, value in values.items()}
    return parse_quantization(values)


def _refuse_variants(config: Keys, family: str) -> None:
    """Settings that would change the arithmetic and that we do not implement are refused, never ignored."""
    if (other := config.get("quantization_config")) and not config.get("quantization"):
        method = other.get("quant_method", "unknown") if isinstance(other, dict) else "unknown"
        raise UnsupportedModel(
            f"this {family} checkpoint is quantized by the method {method!r}; supported are MLX's affine format, and "
            "bfloat16, float16 and float32 weights"
        )
    if config.flag("use_bidirectional_attention"):
        raise UnsupportedModel(f"{family} that looks ahead (use_bidirectional_attention) is not supported")
    if config.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(f"{family} with a partial rotary embedding is not supported")


def _activation(config: Keys, name: str, family: Family) -> str:
    activation = config.get(family.activation_key) or "silu"
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{name} with the activation {activation!r} is not supported; supported are: {', '.join(_ACTIVATIONS)}"
        )
    return str(activation)


def _root(config: Keys, key: str) -> float | None:
    """One over the root of a number; None where there is none."""
    return None if config.get(key) is None else config.number(key) ** -0.5


def _cap(config: Keys, key: str) -> float:
    return 0.0 if config.get(key) is None else config.number(key)


def _dtype(config: Keys) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    if value not in _DTYPES:
        raise UnsupportedModel(f"weights of type {value!r} are not supported; supported are: {', '.join(_DTYPES)}")
    return str(value)


def _ropes(config: Keys, name: str, family: Family, windows: tuple[int | None, ...]) -> tuple[Rope, ...]:
    everywhere = parse_rope(config, name)
    if not family.window_rope:
        return (everywhere,) * len(windows)
    within = parse_window_rope(config, name)
    return tuple(everywhere if window is None else within for window in windows)


def _windows(config: Keys, family: Family, blocks: int) -> tuple[int | None, ...]:
    """By block: from ``layer_types`` (newer configs), or from how the family's older ones say which have one."""
    if family.windows is Windows.BY_FLAG and not config.flag("use_sliding_window"):
        return (None,) * blocks
    if family.windows is Windows.NEVER or config.get("sliding_window") is None:
        return (None,) * blocks
    window = config.count("sliding_window")
    return tuple(window if has else None for has in _have_window(config, family, blocks))


def _have_window(config: Keys, family: Family, blocks: int) -> Sequence[bool]:
    kinds = config.get("layer_types")
    if family.windows is Windows.ALWAYS or family.experts:
        return (True,) * blocks
    if kinds is None:
        every = config.count("sliding_window_pattern", blocks + 1)
        first = config.get("max_window_layers") or 0
        return [index >= first and (index + 1) % every != 0 for index in range(blocks)]
    if not isinstance(kinds, list) or len(kinds) != blocks or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"config.json: layer_types has other than {blocks} of full_attention or sliding_attention"
        )
    return [kind == "sliding_attention" for kind in kinds]


def _eos_ids(values: Json) -> tuple[int, ...]:
    ids = values.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(item for item in ids if isinstance(item, int))
