"""The architectures we serve, and what each means where its ``config.json`` is silent. Nothing else knows their names.

Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Windows(Enum):
    """Whether blocks see a window of ``sliding_window`` positions where that is not null."""

    NEVER = "whatever the configuration says"
    ALWAYS = "all blocks"
    BY_BLOCK = "blocks of that kind"
    BY_FLAG = "blocks of that kind, where use_sliding_window says so"


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """The names, within a block, of the RMSNorms before and after attention and MLP; empty: there is none."""

    attention: str = "input_layernorm"
    attended: str = ""
    mlp: str = "post_attention_layernorm"
    mlp_out: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Of those there are."""
        return tuple(filter(None, (self.attention, self.attended, self.mlp, self.mlp_out)))


PRE_NORMS = BlockNorms()


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from the Llamas. Of biases, ``None``: the config's own flag decides."""

    qk_norm: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    windows: Windows = Windows.NEVER
    window_rope: bool = False
    """Blocks with a window have a rotation of their own."""
    experts: bool = False
    """Has experts, and windows in every block where it has any."""
    activation_key: str = "hidden_act"
    norms: BlockNorms = PRE_NORMS
    norm_offset: float = 0.0
    scales_embedding: bool = False
    """By the root of the hidden size."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``config.json`` and what they are where it lacks them. ``null`` is not lacking."""
    text_key: str = ""
    """Of a model that also sees: the key of what describes its decoder, which is what we serve of it."""


_GEMMA_NORMS = BlockNorms(
    attention="input_layernorm",
    attended="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA3 = Family(
    qk_norm=True,
    mlp_bias=False,
    windows=Windows.BY_BLOCK,
    window_rope=True,
    activation_key="hidden_activation",
    norms=_GEMMA_NORMS,
    norm_offset=1.0,
    scales_embedding=True,
    defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
    },
)
FAMILIES = {
    "LlamaForCausalLM": Family(),  # Llama 2 and 3, SmolLM2, and many that took its shape
    "MistralForCausalLM": Family(
        qkv_bias=False, o_bias=False, mlp_bias=False, windows=Windows.ALWAYS, defaults={"sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, mlp_bias=False, windows=Windows.BY_FLAG),
    "Qwen3ForCausalLM": Family(qk_norm=True, mlp_bias=False, windows=Windows.BY_FLAG, defaults={"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True,
        mlp_bias=False,
        windows=Windows.BY_FLAG,
        experts=True,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, "max_position_embeddings": 32768},
    ),
    "Gemma2ForCausalLM": Family(
        mlp_bias=False,
        windows=Windows.BY_BLOCK,
        activation_key="hidden_activation",
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        scales_embedding=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, text_key="text_config"),
}
_NESTS = {"language_model.model": "model", "language_model.lm_head": "lm_head", "model.language_model": "model"}
"""What modules are called beside a vision tower, and in a checkpoint of the language model alone."""


def own_name(name: str) -> str:
    """The name that a tensor or module has, or would have, in a checkpoint of the language model alone."""
    for nest, own in _NESTS.items():
        if name.startswith(f"{nest}.") or name == nest:
            return own + name.removeprefix(nest)
    return name
