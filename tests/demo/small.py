"""A Llama of a few thousand weights as llama.cpp would write it, for the conversion to undo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGMLQuantizationType as Quantization
from tokenizers.pre_tokenizers import ByteLevel

from kafila.demo import weights

WIDTH, HEADS, KV_HEADS, FEED_FORWARD, BLOCKS = 64, 4, 2, 96, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2")]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with."""
    return sorted(ByteLevel.alphabet())


TOKENS = [*SPECIALS, *byte_alphabet(), *("".join(pair) for pair in MERGES), "<tool>"]


def network(*, tied: bool, biased: bool) -> transformers.LlamaForCausalLM:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=1000.0,
        tie_word_embeddings=tied,
        attention_bias=biased,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def interleave(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does to q and k, said one row at a time: pair i of a head is its rows i and i+half."""
    per_head = len(rows) // heads
    order = [
        head * per_head + half * (per_head // 2) + pair
        for head in range(heads)
        for pair in range(per_head // 2)
        for half in range(2)
    ]
    return rows[order]


def gguf_tensors(model: transformers.LlamaForCausalLM) -> dict[str, npt.NDArray[np.float32]]:
    names = {name: stored for stored, name in weights._OUTER.items()}
    in_block = {name: stored for stored, name in weights._IN_BLOCK.items()}
    tensors = {}
    for name, value in model.state_dict().items():
        rows = value.numpy()
        if name in names:
            if name != "lm_head.weight" or not model.config.tie_word_embeddings:
                tensors[names[name]] = rows
            continue
        _, _, block, *middle, kind = name.split(".")
        part = in_block[".".join(middle)]
        if part in ("attn_q", "attn_k"):
            rows = interleave(rows, HEADS if part == "attn_q" else KV_HEADS)
        tensors[f"blk.{block}.{part}.{kind}"] = rows
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, npt.NDArray[np.float32]],
    quantization: Quantization = Quantization.Q8_0,
    *,
    alter: Callable[[Any], None] = lambda writer: None,
    architecture: str = "llama",
    pre: str = "smollm",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS) - 1) + [4])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    alter(writer)
    for name, rows in tensors.items():
        if rows.ndim == 1:
            writer.add_tensor(name, rows)
        else:
            writer.add_tensor(name, gguf.quants.quantize(rows, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def silent(line: str) -> None:
    pass
