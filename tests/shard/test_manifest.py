"""Checkpoints known from their headers, and every way in which one can be broken."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from kafila.errors import KafilaError, ModelIncomplete, ModelNotFound, UnsupportedModel
from kafila.shard.manifest import expected_tensors, model_manifest, open_checkpoint, parse_header
from tests.shard.checkpoints import edit_config, make_checkpoint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A single-file and a sharded checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "single": make_checkpoint(root / "single", "llama", dtype="bfloat16", blocks=2),
        "sharded": make_checkpoint(root / "sharded", "qwen3", tied=True, sharded=True, blocks=2),
    }


@pytest.fixture
def single(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(originals["single"], tmp_path / "single")


@pytest.fixture
def sharded(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(originals["sharded"], tmp_path / "sharded")


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _write(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_every_tensor_is_found_where_safetensors_finds_it(kind: str, originals: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(originals[kind])
    assert set(checkpoint.tensors) == set(expected_tensors(checkpoint.config))
    assert (len({spec.file for spec in checkpoint.tensors.values()}) == 1) == (kind == "single")
    for name, spec in checkpoint.tensors.items():
        with safe_open(originals[kind] / spec.file, "pt") as file:
            tensor = file.get_tensor(name)
        data = (originals[kind] / spec.file).read_bytes()[spec.start : spec.end]
        assert bytes(tensor.contiguous().view(-1).view(dtype=_bytes()).numpy()) == data
        assert tuple(tensor.shape) == spec.shape


def _bytes() -> Any:
    import torch  # noqa: PLC0415  - only this comparison needs it

    return torch.uint8


def test_sizes_are_those_of_the_tensors(originals: dict[str, Path]) -> None:
    config = open_checkpoint(originals["single"]).config
    sizes = model_manifest("m", config, "bfloat16")
    total = (originals["single"] / SINGLE).stat().st_size
    assert 0 <= total - (sizes.blocks * sizes.block_bytes + sizes.head_bytes) < 4096  # the header
    assert sizes.head_bytes == (2 * 131 + 1) * 48 * 2
    assert sizes.head_read_bytes == (131 + 1) * 48 * 2
    assert sizes.kv_bytes_per_token_per_block == 2 * 2 * 16 * 2
    assert sizes.hidden_bytes == 48 * 2
    assert model_manifest("m", config, "float32").block_bytes == 2 * sizes.block_bytes


def test_a_tied_embedding_is_counted_once(originals: dict[str, Path]) -> None:
    sizes = model_manifest("m", open_checkpoint(originals["sharded"]).config, "float32")
    assert sizes.head_bytes == sizes.head_read_bytes == (131 + 1) * 48 * 4


def test_no_tensor_library_is_needed() -> None:
    code = "import sys, kafila.shard.manifest; assert not {'torch', 'numpy', 'mlx', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no folder.*--model"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"config\.json.*--model"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights(single: Path) -> None:
    (single / SINGLE).unlink()
    with pytest.raises(ModelNotFound, match=SINGLE):
        open_checkpoint(single)


def test_a_folder_that_a_file_is_in_place_of(single: Path) -> None:
    with pytest.raises(ModelNotFound):
        open_checkpoint(single / SINGLE)


@pytest.mark.parametrize("keep", [0, 7, 8, 9, 500, -1])
def test_a_truncated_file_is_named(single: Path, keep: int) -> None:
    path = single / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelIncomplete, match=f"{SINGLE}.*truncated"):
        open_checkpoint(single)


def test_the_last_tensor_of_a_truncated_file_is_named(single: Path) -> None:
    path = single / SINGLE
    header, data = _header(path)
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelIncomplete, match=f"{last} ends at byte .* and the file at"):
        open_checkpoint(single)
    assert data


def test_a_missing_tensor_is_named_with_its_file(single: Path) -> None:
    header, data = _header(single / SINGLE)
    del header[Q]
    _write(single / SINGLE, header, data)
    with pytest.raises(ModelIncomplete, match=f"{SINGLE} has no tensor {Q}"):
        open_checkpoint(single)


def test_a_tensor_of_another_shape_is_named(single: Path) -> None:
    edit_config(single, num_key_value_heads=3)
    with pytest.raises(
        ModelIncomplete, match=r"k_proj\.weight has shape \[32, 48\] and config\.json asks for \[48, 48\]"
    ):
        open_checkpoint(single)


def test_a_checkpoint_that_is_not_tied_needs_its_unembedding(sharded: Path) -> None:
    edit_config(sharded, tie_word_embeddings=False)
    with pytest.raises(ModelIncomplete, match=r"lists no tensor lm_head\.weight"):
        open_checkpoint(sharded)


def test_a_dtype_we_do_not_read_is_named(single: Path) -> None:
    header, data = _header(single / SINGLE)
    header[Q]["dtype"] = "F8_E4M3"
    _write(single / SINGLE, header, data)
    with pytest.raises(ModelIncomplete, match=f"{Q} is F8_E4M3; supported are F32, BF16, F16"):
        open_checkpoint(single)


def test_bytes_that_do_not_make_the_shape_are_named(single: Path) -> None:
    header, data = _header(single / SINGLE)
    header[Q]["dtype"] = "F32"
    _write(single / SINGLE, header, data)
    with pytest.raises(ModelIncomplete, match=f"{Q} has .* bytes, which is not F32"):
        open_checkpoint(single)


def test_another_dtype_for_one_tensor_is_fine(single: Path) -> None:
    header, data = _header(single / SINGLE)
    header[Q]["dtype"] = "F16"
    _write(single / SINGLE, header, data)
    assert open_checkpoint(single).tensors[Q].dtype == "F16"


def test_a_missing_shard_is_named_with_a_tensor_of_it(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    (sharded / index["weight_map"][Q]).unlink()
    with pytest.raises(ModelIncomplete, match=rf"{index['weight_map'][Q]} is missing; it should hold model\."):
        open_checkpoint(sharded)


def test_an_index_that_disagrees_with_the_files(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][Q])
    index["weight_map"][Q] = other
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelIncomplete, match=f"{other} has no tensor {Q}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("elsewhere", ["../secret.safetensors", "/etc/passwd", "", "..", 7, None])
def test_an_index_cannot_name_a_file_elsewhere(sharded: Path, elsewhere: object) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][Q] = elsewhere
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelIncomplete, match=r"no file beside it|lists no tensor"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelIncomplete, match="weight_map"):
        open_checkpoint(sharded)


def test_an_unsupported_architecture_is_refused_before_any_weight_is_looked_for(single: Path) -> None:
    edit_config(single, architectures=["GPT2LMHeadModel"])
    (single / SINGLE).unlink()
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
        open_checkpoint(single)


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {**ENTRY, "shape": 4},
        {**ENTRY, "shape": [2, -2]},
        {**ENTRY, "shape": [2.0, 2]},
        {**ENTRY, "data_offsets": [0]},
        {**ENTRY, "data_offsets": [-16, 0]},
        {**ENTRY, "data_offsets": [16, 0]},
        {**ENTRY, "data_offsets": [16, 0], "dtype": "I4"},
        {**ENTRY, "data_offsets": ["0", "16"]},
        {**ENTRY, "dtype": None},
        {**ENTRY, "shape": [True, 4]},
    ],
)
def test_a_damaged_entry_is_named(entry: object) -> None:
    with pytest.raises(ModelIncomplete, match=r"w.*download"):
        parse_header("f", 1000, json.dumps({"w": entry}).encode())


def test_a_header_nested_without_end() -> None:
    with pytest.raises(ModelIncomplete, match="damaged"):
        parse_header("f", 10**6, b"[" * 200_000)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=8) | st.just("F32"),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "w"]), inner, max_size=4)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_arbitrary_headers_end_in_a_list_or_in_words(header: bytes) -> None:
    try:
        specs = parse_header("f", 1000, header)
    except KafilaError:
        return
    assert all(0 <= spec.start <= spec.end <= 1000 for spec in specs)
