"""What a plan counts against what a process takes, and the arithmetic behind it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kafila.plan.scoring import rows_bytes
from kafila.shard.config import parse_config
from kafila.shard.manifest import CODES, STORED_BYTES, model_manifest, stored_tensors, weight_format
from kafila.shard.schemes import with_scheme
from kafila.shard.torch_ops import TorchOps
from kafila.shard.workspace import (
    LIBRARY_LOADING_BYTES,
    PASS_ROWS,
    block_memory_bytes,
    head_memory_bytes,
    workspace_bytes,
)
from kafila.types import scored_from
from tests.shard.test_config import LLAMA

TINY = parse_config(json.dumps(LLAMA))
LARGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2560,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 12000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 24,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
}


def large_checkpoint(folder: Path, blocks: int, *, tied: bool, hidden: int, **config: Any) -> Path:
    """A checkpoint in bfloat16 with weights of one pattern, written without a tensor library."""
    sizes = {"num_hidden_layers": blocks, "tie_word_embeddings": tied, "hidden_size": hidden}
    text = json.dumps({**LARGE, **sizes, **config})
    (folder / "config.json").write_text(text)
    header: dict[str, Any] = {}
    end = 0
    for name, stored in stored_tensors(parse_config(text)).items():
        dtype = "U32" if stored.dtypes == CODES else "BF16"
        size = STORED_BYTES[dtype] * prod(stored.shape)
        header[name] = {"dtype": dtype, "shape": stored.shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    # As all writers pad it: of an embedding that lies across its numbers' bounds a copy is made (`load.map_tensor`).
    encoded += b" " * (-len(encoded) % 8)
    pattern = (np.random.default_rng(0).standard_normal(1 << 20, np.float32) * 0.03).view(np.uint32) >> 16
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.write(np.resize(pattern.astype("<u2"), end // 2).tobytes())
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize(
    ("dtype", "blocks", "tied", "hidden", "config", "options"),
    [
        ("bfloat16", 11, True, 1024, {}, []),
        ("bfloat16", 8, False, 768, {}, []),
        ("float32", 6, False, 1024, {}, []),
        ("bfloat16", 4, True, 1024, EXPERTS, []),
        ("bfloat16", 14, True, 1024, {}, ["int8"]),
        ("bfloat16", 16, True, 1024, {}, ["int4", "float32"]),
        ("float32", 16, False, 1024, {}, ["int4", "bfloat16"]),
        ("bfloat16", 20, True, 1024, {"quantization": {"bits": 4, "group_size": 64}}, []),
        ("float32", 14, False, 1024, {"quantization": {"bits": 8, "group_size": 64}}, []),
        ("bfloat16", 8, False, 768, {}, ["", "", "60", "head"]),
        ("bfloat16", 14, True, 1024, {}, ["", "", "75", "last"]),
        ("bfloat16", 11, True, 1024, {}, ["", "", "0", "roomy"]),
    ],
)
def test_nothing_takes_more_than_the_plan_admitted_and_little_less(
    tmp_path: Path, dtype: str, blocks: int, tied: bool, hidden: int, config: dict[str, Any], options: list[str]
) -> None:
    """``options``: what ``--quantize`` and ``--kv-dtype`` would be given, and how much of the vocabulary is scored by
    the last member, with who this is; or that there is room for pages of the file besides."""
    folder = large_checkpoint(tmp_path, blocks, tied=tied, hidden=hidden, **config)
    command = [sys.executable, "-m", "tests.shard.memory_child", str(folder), dtype, "4", "640", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0.85 * found["planned_bytes"] <= found["peak_bytes"] <= found["planned_bytes"], found


def test_padding_is_counted() -> None:
    smollm2 = replace(TINY, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, tied=True, vocab=49152)
    plain = model_manifest("m", smollm2, "bfloat16")
    packed, dense = TorchOps("cpu", "bfloat16", threads=1), TorchOps("cpu", "float32", threads=1)
    # As measured by its resident memory: rows of 576 are packed as 1024.
    assert block_memory_bytes(packed, smollm2) / plain.block_bytes == pytest.approx(1.58, abs=0.01)
    assert head_memory_bytes(packed, smollm2) / plain.head_bytes == pytest.approx(1024 / 576, abs=0.01)
    assert block_memory_bytes(dense, smollm2) == 2 * plain.block_bytes
    assert head_memory_bytes(dense, smollm2) == 2 * plain.head_bytes


def test_an_embedding_of_its_own_stays_in_its_file_on_a_cpu() -> None:
    ops = TorchOps("cpu", "float32", threads=1)
    tied, untied = replace(TINY, tied=True), replace(TINY, tied=False)
    assert head_memory_bytes(ops, untied) == head_memory_bytes(ops, tied)


def test_a_workspace_grows_with_what_is_served() -> None:
    least = workspace_bytes(TINY, context=64, slots=1)
    assert workspace_bytes(TINY, context=4096, slots=1) > least
    assert workspace_bytes(replace(TINY, vocab=200_000), context=64, slots=8) > least
    assert workspace_bytes(replace(TINY, intermediate=10**6), context=64, slots=1) > least


def test_masks_of_every_window_are_counted() -> None:
    one, two = (
        workspace_bytes(replace(TINY, windows=(None, window) * (TINY.blocks // 2)), context=8192, slots=1)
        for window in (None, 4096)
    )
    held = TorchOps("cpu", "float32", threads=1)._mask(8192 - PASS_ROWS, PASS_ROWS, 4096)
    assert two - one >= held.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["", "int8", "int4"])
@pytest.mark.parametrize("percent", [10, 33, 75])
def test_rows_that_a_last_member_scores_are_at_most_its_percentage_and_where_they_are_cut(
    dtype: str, scheme: str, percent: int
) -> None:
    """A plan counts the percentage alone: the rest is less than what a last member does not need of a workspace."""
    smollm2 = replace(TINY, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, tied=True, vocab=49152)
    config, ops = with_scheme(smollm2, scheme), TorchOps("cpu", dtype, threads=1)
    form = weight_format(config, "model.embed_tokens.weight")
    first = scored_from(config.vocab, percent)
    own, others = (ops.matrix_bytes(rows, config.hidden, form) for rows in (first, config.vocab - first))
    whole = ops.matrix_bytes(config.vocab, config.hidden, form)
    assert own + others == whole
    admitted = rows_bytes(head_memory_bytes(ops, config), percent)
    assert others + config.hidden * 4 - admitted <= 64 * whole // config.vocab + config.hidden * 4
    assert others + config.hidden * 4 - admitted < LIBRARY_LOADING_BYTES / 100
