"""A checkpoint's blocks, mapped: which, and from where."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kafila.shard.manifest import open_checkpoint
from kafila.shard.ops import HostTensor, Ops
from kafila.shard.pairs import pair_order
from kafila.shard.quantize import to_float32
from kafila.shard.schemes import with_scheme
from kafila.shard.stored import ATTENTION, COMPILED_BYTES, OTHERS, StoredBlocks
from kafila.shard.tensor_files import read_tensor
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
            tensor = read_tensor(folder, checkpoint.tensors[f"model.layers.{of}.{name}"])
            return pair_order(HostTensor("F32", to_float32(tensor)) if name.endswith("bias") else tensor, heads)

        heads = (checkpoint.config.heads, checkpoint.config.kv_heads, 0)
        for kind, (qkv, o, *others) in (("weight", block.weights), ("bias", block.biases)):
            assert qkv is not None
            assert o is not None
            parts = [expected(f"{name}.{kind}", count) for name, count in zip(ATTENTION, heads, strict=True)]
            assert {qkv.dtype, o.dtype} == {part.dtype for part in parts}
            np.testing.assert_array_equal(qkv.data, np.concatenate([part.data for part in parts]))
            np.testing.assert_array_equal(o.data, expected(f"self_attn.o_proj.{kind}").data)
            assert o.data.flags.writeable == (kind == "bias")
            for name, other in zip(OTHERS[1:], others, strict=True):
                assert (other is None) == (kind == "bias")
                if other is not None:
                    np.testing.assert_array_equal(other.data, expected(f"{name}.{kind}").data)


def test_blocks_are_mapped_while_there_is_room(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "llama", dtype="bfloat16"))
    specs = [checkpoint.tensors[f"model.layers.0.{name}.weight"] for name in (*ATTENTION, *OTHERS)]
    size = sum(spec.end - spec.start for spec in specs)
    for spare, count in ((0, 0), (size - 1, 0), (size, 1), (3 * size - 1, 2), (9 * size, 4)):
        blocks = StoredBlocks(checkpoint, COMPILED_BYTES + spare)
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


@pytest.mark.parametrize("change", ["nothing", "its length", "its time", "another in its place", "gone"])
def test_whether_files_are_what_they_were(tmp_path: Path, change: str) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    blocks = StoredBlocks(open_checkpoint(folder), PLENTY)
    assert blocks.unchanged()
    assert blocks.block(ops_taking("BF16"), 0) is not None
    assert blocks.unchanged()
    file = folder / "model.safetensors"
    if change == "its length":
        with file.open("ab") as stream:
            stream.write(b"more")
    elif change == "its time":
        os.utime(file, ns=(1, 1))
    elif change == "another in its place":
        shutil.copy2(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file)
    elif change == "gone":
        file.unlink()
    assert blocks.unchanged() == (change == "nothing")
