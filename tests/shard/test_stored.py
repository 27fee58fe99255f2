"""A checkpoint's blocks, mapped: which, and from where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kafila.shard.load import read_tensor
from kafila.shard.manifest import open_checkpoint
from kafila.shard.ops import HostTensor, Ops
from kafila.shard.pairs import pair_order
from kafila.shard.schemes import with_scheme
from kafila.shard.stored import ATTENTION, MATRICES, StoredBlocks
from kafila.shard.torch_ops import TorchOps
from tests.shard.checkpoints import make_checkpoint
from tests.shard.test_experts import SMALL

PLENTY = 1 << 30


class Taking(TorchOps):
    """Has use for whatever is stored as told."""

    def __init__(self, *dtypes: str) -> None:
        super().__init__("cpu", "float32", threads=1)
        self._taken = dtypes

    def takes_stored(self, dtype: str) -> bool:
        return dtype in self._taken


def ops_taking(*dtypes: str) -> Ops[Any]:
    """Typed as what is asked for."""
    return Taking(*dtypes)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_block_is_what_its_file_holds(tmp_path: Path, dtype: str, *, sharded: bool) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype=dtype, sharded=sharded, attention_bias=True)
    checkpoint = open_checkpoint(folder)
    blocks = StoredBlocks(checkpoint, PLENTY)
    for index in (0, 3):
        block = blocks.block(ops_taking("BF16", "F32", "F16"), index)
        assert block is not None

        def expected(name: str, heads: int = 0, *, of: int = index) -> HostTensor:
            return pair_order(read_tensor(folder, checkpoint.tensors[f"model.layers.{of}.{name}"]), heads)

        heads = (checkpoint.config.heads, checkpoint.config.kv_heads, 0)
        for kind, (qkv, o, *others) in (("weight", block.weights), ("bias", block.biases)):
            assert qkv is not None
            assert o is not None
            parts = [expected(f"{name}.{kind}", count) for name, count in zip(ATTENTION, heads, strict=True)]
            assert {qkv.dtype, o.dtype} == {part.dtype for part in parts}
            np.testing.assert_array_equal(qkv.data, np.concatenate([part.data for part in parts]))
            np.testing.assert_array_equal(o.data, expected(f"self_attn.o_proj.{kind}").data)
            assert not o.data.flags.writeable
            for name, other in zip(MATRICES[4:], others, strict=True):
                assert (other is None) == (kind == "bias")
                if other is not None:
                    np.testing.assert_array_equal(other.data, expected(f"{name}.{kind}").data)


def test_blocks_are_mapped_while_there_is_room(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "llama", dtype="bfloat16"))
    specs = [checkpoint.tensors[f"model.layers.0.{name}.weight"] for name in MATRICES]
    size = sum(spec.end - spec.start for spec in specs)
    for spare, count in ((0, 0), (size - 1, 0), (size, 1), (3 * size - 1, 2), (9 * size, 4)):
        blocks = StoredBlocks(checkpoint, spare)
        assert [blocks.block(ops_taking("BF16"), index) is not None for index in range(4)] == [
            index < count for index in range(4)
        ]


def test_nothing_is_mapped_that_is_of_no_use(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "qwen3", dtype="bfloat16"))
    assert StoredBlocks(checkpoint, PLENTY).block(ops_taking("F16"), 0) is None
    quantized = replace(checkpoint, config=with_scheme(checkpoint.config, "int8"))
    assert StoredBlocks(quantized, PLENTY).block(ops_taking("BF16"), 0) is None


def test_experts_are_not_mapped(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "qwen3_moe", dtype="bfloat16", **SMALL))
    assert StoredBlocks(checkpoint, PLENTY).block(ops_taking("BF16"), 1) is None


@pytest.mark.parametrize("fault", ["gone", "shorter", "at an odd place", "of two dtypes"])
def test_what_cannot_be_mapped_is_left(tmp_path: Path, fault: str) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    checkpoint = open_checkpoint(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    spec = checkpoint.tensors[name]
    if fault == "gone":
        (folder / spec.file).unlink()
    elif fault == "shorter":
        with (folder / spec.file).open("r+b") as file:
            file.truncate(spec.start + 6)
    else:
        odd = replace(spec, start=spec.start + 1, end=spec.end + 1)
        changed = odd if fault == "at an odd place" else replace(spec, dtype="F16")
        checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, name: changed})
    assert StoredBlocks(checkpoint, PLENTY).block(ops_taking("BF16", "F16"), 0) is None
