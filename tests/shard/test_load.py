"""A shard is made of its own tensors and no others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import KafilaError, ModelIncomplete
from kafila.shard.load import load_shard
from kafila.shard.manifest import Checkpoint, open_checkpoint
from kafila.shard.tensor_files import map_tensor, read_tensor
from kafila.shard.torch_ops import TorchOps
from kafila.types import BlockRange, Segment, TensorSpec
from tests.shard.checkpoints import make_checkpoint

OPS = TorchOps("cpu", "float32", threads=1)
ROW = np.ones(48, "<f4").tobytes()
ONE = [Segment(0, 0, 1, sample=False)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path / "model", "llama", sharded=True))


def _load(checkpoint: Checkpoint, first: int, stop: int, *, head: bool = False) -> bytes:
    shard = load_shard(OPS, checkpoint, BlockRange(first, stop), holds_head=head, slots=1, context=8)
    return shard.forward(ONE, [7] if head else None, None if head else ROW, "float32")


@pytest.mark.parametrize(("first", "stop", "head"), [(1, 3, False), (0, 1, True), (3, 4, False)])
def test_other_tensors_are_not_read(checkpoint: Checkpoint, first: int, stop: int, *, head: bool) -> None:
    before = _load(checkpoint, first, stop, head=head)
    prefixes = tuple(f"model.layers.{index}." for index in range(first, stop))
    for name, spec in checkpoint.tensors.items():
        if not name.startswith(prefixes) and not (head and not name.startswith("model.layers.")):
            with (checkpoint.folder / spec.file).open("r+b") as file:
                file.seek(spec.start)
                file.write(b"\xff" * (spec.end - spec.start))  # not a number, in every dtype
    assert _load(checkpoint, first, stop, head=head) == before
    assert np.isfinite(np.frombuffer(before, "<f4")).all()


def test_files_of_other_members_need_not_be_there(checkpoint: Checkpoint) -> None:
    before = _load(checkpoint, 2, 3)
    mine = {spec.file for name, spec in checkpoint.tensors.items() if name.startswith("model.layers.2.")}
    for path in checkpoint.folder.glob("*.safetensors"):
        if path.name not in mine:
            path.unlink()
    assert _load(checkpoint, 2, 3) == before


@pytest.mark.parametrize("head", [False, True])
def test_a_file_that_shrank_since_it_was_looked_at(checkpoint: Checkpoint, *, head: bool) -> None:
    name = "model.embed_tokens.weight" if head else "model.layers.0.mlp.down_proj.weight"
    spec = checkpoint.tensors[name]
    path = checkpoint.folder / spec.file
    with path.open("r+b") as file:
        file.truncate(spec.end - 1)
    with pytest.raises(ModelIncomplete, match=f"{spec.file}: .*download"):
        _load(checkpoint, 0, 1, head=head)
    path.unlink()
    with pytest.raises(ModelIncomplete, match=f"{spec.file}: .*download"):
        _load(checkpoint, 0, 1, head=head)


def test_progress_counts_blocks_and_may_end_the_loading(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []

    def progress(done: int, of: int) -> None:
        seen.append((done, of))
        if done == 2:
            raise KafilaError("the owner has left")

    with pytest.raises(KafilaError, match="has left"):
        load_shard(OPS, checkpoint, BlockRange(1, 4), holds_head=False, slots=1, context=8, progress=progress)
    assert seen == [(0, 3), (1, 3), (2, 3)]


@given(data=st.binary(min_size=24, max_size=24), start=st.integers(0, 9000), dtype=st.sampled_from(["F32", "BF16"]))
def test_reading_and_mapping_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, start: int, dtype: str
) -> None:
    """Wherever in the file: mapping works in pages, and an offset need not suit the dtype."""
    folder = tmp_path_factory.mktemp("file")
    (folder / "f").write_bytes(bytes(start) + data + b"more")
    shape = (2, 3) if dtype == "F32" else (3, 4)
    spec = TensorSpec("w", dtype, shape, "f", start, start + 24)
    for tensor in (read_tensor(folder, spec), map_tensor(folder, spec)):
        assert tensor.dtype == dtype
        assert tensor.data.shape == shape
        assert tensor.data.tobytes() == data
        tensor.data[0] = 0  # private: the file stays
    assert (folder / "f").read_bytes() == bytes(start) + data + b"more"


def test_norms_of_q_and_k_must_be_of_one_dtype(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", blocks=1)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.layers.0.self_attn.k_norm.weight"]["dtype"] = "F16"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ModelIncomplete, match="norms of q and k differ"):
        load_shard(OPS, open_checkpoint(folder), BlockRange(0, 1), holds_head=False, slots=1, context=8)
