"""Both dialects of config.json, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from kafila.errors import ModelIncomplete, UnsupportedModel
from kafila.shard.config import parse_config
from kafila.shard.experts import ExpertShape
from kafila.shard.rope import LinearRope, Llama3Rope, Rope

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _parse(changes: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Any:
    values = {key: value for key, value in (LLAMA | (changes or {})).items() if value is not None}
    return parse_config(json.dumps(values), None if generation is None else json.dumps(generation))


def test_the_two_dialects_say_the_same() -> None:
    old = _parse({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "torch_dtype": "bfloat16"})
    new = _parse({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}, "dtype": "bfloat16"})
    assert old == new
    assert new.ropes == (Rope(5e5, Llama3Rope(8.0, 1.0, 4.0, 8192)),) * 4
    assert new.dtype == "bfloat16"


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_linear_scaling_has_two_spellings(key: str) -> None:
    assert _parse({"rope_scaling": {key: "linear", "factor": 2}}).ropes[0].scaling == LinearRope(2.0)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_absent_keys_mean_what_transformers_means(family: str) -> None:
    """An old checkpoint writes few keys; the rest is the configuration class's default."""
    theirs = getattr(transformers, f"{family}Config")()
    ours = _parse({"architectures": [f"{family}ForCausalLM"], "num_key_value_heads": None, "rms_norm_eps": None})
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.head_dim == (128 if family == "Qwen3" else 64 // 4)
    assert ours.kv_heads == 4
    assert ours.qk_norm == (family == "Qwen3")
    assert ours.qkv_bias == (family == "Qwen2")
    assert not ours.o_bias
    assert ours.windows == (None,) * 4


def test_what_qwen3_moe_means_where_it_is_silent() -> None:
    theirs = transformers.Qwen3MoeConfig()
    silent = {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": None, "max_position_embeddings": None}
    ours = _parse(silent)
    assert ours.experts == ExpertShape(
        count=theirs.num_experts,
        active=theirs.num_experts_per_tok,
        intermediate=theirs.moe_intermediate_size,
        normalised=theirs.norm_topk_prob,
        sparse=(True,) * 4,
    )
    assert (ours.kv_heads, ours.max_context) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert (ours.qk_norm, ours.head_dim, ours.windows) == (True, 64 // 4, (None,) * 4)
    assert _parse({**silent, "use_sliding_window": True, "max_window_layers": 3}).windows == (4096,) * 4
    assert _parse({**silent, "decoder_sparse_step": 5}).experts is None
    for wrong in ({"mlp_only_layers": "0"}, {"mlp_only_layers": [None]}, {"num_experts": 7}):
        with pytest.raises(ModelIncomplete):
            _parse({**silent, **wrong})


def test_biases_follow_the_family_or_its_flags() -> None:
    biased = _parse({"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    qwen2 = _parse({"architectures": ["Qwen2ForCausalLM"], "attention_bias": True, "mlp_bias": True})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)


WINDOW = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({**WINDOW, "max_window_layers": 3}, (None, None, None, 16)),
        ({**WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 16, None, 16)),
        ({**WINDOW, "use_sliding_window": False}, (None,) * 4),
        ({**WINDOW, "sliding_window": None}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 16}, (None,) * 4),
    ],
)
def test_windows_by_block(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert _parse(changes).windows == windows


GEMMA: dict[str, Any] = {"rms_norm_eps": 1e-6, "num_attention_heads": None, "num_key_value_heads": None}
GEMMA2 = {**GEMMA, "architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 512}


def test_what_gemma_2_means_where_it_is_silent() -> None:
    theirs = transformers.Gemma2Config()
    ours = _parse({**GEMMA2, "max_position_embeddings": None})
    assert (ours.heads, ours.kv_heads, ours.head_dim) == (8, 4, 256)
    assert ours.windows == (4096, None) * 2
    assert ours.ropes == (Rope(theirs.rope_parameters["rope_theta"]),) * 4
    assert (ours.score_cap, ours.logit_cap) == (theirs.attn_logit_softcapping, theirs.final_logit_softcapping)
    assert ours.score_scale == theirs.query_pre_attn_scalar**-0.5
    assert ours.activation == theirs.hidden_activation
    assert ours.embedding_scale == 64**0.5
    assert ours.tied
    assert ours.norm_offset == 1
    assert not ours.qk_norm
    assert len(ours.norms.names) == 4
    assert ours.max_context == theirs.max_position_embeddings
    uncapped = parse_config(
        json.dumps(LLAMA | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": None})
    )
    assert (uncapped.score_cap, uncapped.logit_cap) == (0, 30)


def test_gemma_3_turns_blocks_with_a_window_otherwise_in_both_dialects() -> None:
    old = _parse(
        {**GEMMA3, "rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8}}
    )
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    assert old == _parse({**GEMMA3, "layer_types": kinds, "rope_parameters": parameters})
    assert old.windows == (*(512,) * 5, None, 512)
    assert old.ropes == (*(Rope(3e4),) * 5, Rope(2e6, LinearRope(8.0)), Rope(3e4))
    theirs = transformers.Gemma3TextConfig().rope_parameters
    silent = _parse(GEMMA3).ropes
    assert [silent[0].theta, silent[5].theta] == [
        theirs[kind]["rope_theta"] for kind in ("sliding_attention", "full_attention")
    ]
    assert (old.score_cap, old.logit_cap, old.qk_norm) == (0, 0, True)


def test_of_a_model_that_sees_the_part_that_reads_is_served() -> None:
    """The first of these were published with few keys, and MLX names what it quantized as the files do."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "sliding_window": 512}
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
        "torch_dtype": "bfloat16",
        "quantization": {"bits": 4, "group_size": 64, "language_model.model.embed_tokens": {"bits": 8}},
    }
    config = parse_config(json.dumps(values))
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab) == (8, 4, 256, 262_208)
    assert (config.dtype, config.eos_ids, config.max_context, config.tied) == ("bfloat16", (1, 106), 131_072, True)
    assert config.quantization is not None
    assert [getattr(config.quantization.of(name), "bits", 0) for name in ("model.embed_tokens", "lm_head")] == [8, 4]
    with pytest.raises(ModelIncomplete, match="no text_config"):
        parse_config(json.dumps(values | {"text_config": None}))
    with pytest.raises(UnsupportedModel, match="'LlavaForConditionalGeneration'"):
        parse_config(json.dumps(values | {"architectures": ["LlavaForConditionalGeneration"]}))


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": [7, 8]}, None, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 10]}, (9, 10)),
        ({"eos_token_id": 7}, {"temperature": 1}, (7,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_every_id_that_ends_a_turn(config: Any, generation: Any, ids: tuple[int, ...]) -> None:
    assert _parse(config, generation).eos_ids == ids


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["BertModel"]},
            r"'BertModel'.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "mamba"}, "'mamba'"),
        ({"architectures": None}, "None"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({**GEMMA2, "hidden_activation": "gelu"}, "'gelu'"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "looks ahead"),
        ({**GEMMA3, "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn'"),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, "partial rotary"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn'"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8"),
        ({**WINDOW, "layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ],
)
def test_what_we_do_not_implement_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        _parse(changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 15}, "do not divide"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope parameters"),
        ({**GEMMA3, "rope_parameters": {"full_attention": 1}}, "rope parameters"),
        ({**GEMMA2, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ],
)
def test_what_makes_no_sense_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelIncomplete, match=said):
        _parse(changes)


@pytest.mark.parametrize("text", ["", "{", "[]", b"\xff\xfe"])
def test_a_file_that_is_no_json_object(text: str | bytes) -> None:
    with pytest.raises(ModelIncomplete, match=r"config\.json"):
        parse_config(text)
    with pytest.raises(ModelIncomplete, match=r"generation_config\.json"):
        parse_config(json.dumps(LLAMA), text)
