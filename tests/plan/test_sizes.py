"""Sizes from configurations, against the parameter counts their publishers state."""

from __future__ import annotations

from typing import Any

import pytest

from kafila.errors import ModelIncomplete, UnsupportedModel
from kafila.plan import manifest_from_config, read_bytes

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN2_5_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GEMMA2_2B: dict[str, Any] = {
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "vocab_size": 256_000,
}
GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 262_144,
}


QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GEMMA2_2B, 2_614_341_888),
        (GEMMA3_1B, 999_885_952),
        (QWEN3_30B_A3B, 30_532_122_624),
        (QWEN3_8B, 8_190_735_360),
        (SMOLLM2_135M, 134_515_008),
        (QWEN2_5_05B, 494_032_768),
    ],
)
def test_the_whole_model_has_as_many_weights_as_published(config: dict[str, Any], parameters: int) -> None:
    manifest = manifest_from_config(config, "m")
    assert (manifest.blocks * manifest.block_bytes + manifest.head_bytes) // 2 == parameters


def test_a_token_reads_the_experts_it_goes_through() -> None:
    manifest = manifest_from_config(QWEN3_30B_A3B, "m")
    # As published: 3.3 billion of 30.5 are active, the embedding of 0.3 counted.
    active = manifest.blocks * read_bytes(manifest) + manifest.head_bytes
    assert active / 2 == pytest.approx(3.35e9, rel=0.01)
    assert read_bytes(manifest, 10_000) == manifest.block_bytes


def test_where_only_some_blocks_have_experts_memory_counts_the_largest_and_time_the_mean() -> None:
    whole = manifest_from_config(QWEN3_30B_A3B, "m")
    plain = manifest_from_config(QWEN3_30B_A3B | {"model_type": "qwen3"}, "m")
    mixed = manifest_from_config(QWEN3_30B_A3B | {"mlp_only_layers": list(range(12))}, "m")
    assert mixed.block_bytes == whole.block_bytes
    assert read_bytes(mixed) == pytest.approx((12 * plain.block_bytes + 36 * read_bytes(whole)) / 48)
    every_second = manifest_from_config(QWEN3_30B_A3B | {"decoder_sparse_step": 2}, "m")
    assert read_bytes(every_second) == pytest.approx((plain.block_bytes + read_bytes(whole)) / 2)
    assert manifest_from_config(QWEN3_30B_A3B | {"decoder_sparse_step": 49}, "m") == plain
    with pytest.raises(ModelIncomplete, match="mlp_only_layers"):
        manifest_from_config(QWEN3_30B_A3B | {"mlp_only_layers": 3}, "m")


def test_the_head_reads_its_unembedding_and_keeps_its_embedding() -> None:
    manifest = manifest_from_config(QWEN3_8B, "m")
    matrix = 151936 * 4096 * 2
    norm = 4096 * 2
    assert manifest.head_bytes == 2 * matrix + norm
    assert manifest.head_read_bytes == matrix + norm


def test_tied_embeddings_are_counted_once() -> None:
    manifest = manifest_from_config(SMOLLM2_135M, "m")
    assert manifest.head_bytes == manifest.head_read_bytes == (49152 * 576 + 576) * 2


def test_cache_and_activation_sizes() -> None:
    manifest = manifest_from_config(QWEN3_8B, "m")
    assert manifest.kv_bytes_per_token_per_block == 2 * 8 * 128 * 2
    assert manifest.hidden_bytes == 4096 * 2
    assert manifest.max_context == 40960
    assert manifest_from_config(SMOLLM2_135M, "m").max_context == 2048


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_dialects_of_the_dtype(key: str) -> None:
    half = manifest_from_config({**QWEN3_8B, key: "bfloat16"}, "m")
    full = manifest_from_config({**QWEN3_8B, key: "float32"}, "m")
    assert full.block_bytes == 2 * half.block_bytes
    assert full.hidden_bytes == 2 * half.hidden_bytes


def test_biases_are_weights_too() -> None:
    bare = manifest_from_config(SMOLLM2_135M, "m").block_bytes
    biased = {**SMOLLM2_135M, "attention_bias": True, "mlp_bias": True}
    attention, mlp = 576 + 2 * 192 + 576, 2 * 1536 + 576
    assert manifest_from_config(biased, "m").block_bytes == bare + 2 * (attention + mlp)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -3, "4096", 1.5, True, []])
def test_a_setting_that_is_missing_or_wrong_is_named(key: str, value: object) -> None:
    with pytest.raises(ModelIncomplete, match=key):
        manifest_from_config({**QWEN3_8B, key: value}, "m")


@pytest.mark.parametrize("family", ["mamba", None, 3, ["qwen3"]])
def test_another_architecture_is_named_and_the_supported_are_listed(family: object) -> None:
    with pytest.raises(UnsupportedModel, match="qwen2, qwen3"):
        manifest_from_config({**QWEN3_8B, "model_type": family}, "m")


def test_quantized_checkpoints_and_strange_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="quantized"):
        manifest_from_config({**QWEN3_8B, "quantization": {"bits": 4}}, "m")
    with pytest.raises(UnsupportedModel, match="int3"):
        manifest_from_config({**QWEN3_8B, "dtype": "int3"}, "m")
