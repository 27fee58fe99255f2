"""Both dialects of config.json, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from kafila.errors import ModelIncomplete, UnsupportedModel
from kafila.shard.config import parse_config
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
