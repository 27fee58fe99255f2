"""A folder's checkpoint, known from ``config.json`` and the safetensors headers alone: no weight is read.

Format: https://github.com/huggingface/safetensors ("Format"): eight bytes little-endian, the length of a JSON object
that names each tensor's dtype, shape and byte range after it. Standard library only: the planner runs without a tensor
library.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kafila.errors import ModelError, ModelIncomplete, ModelNotFound, ProtocolError, UnsupportedModel
from kafila.shard.config import DecoderConfig, parse_config
from kafila.shard.experts import EXPERTS, STACKED, expert_tensors
from kafila.shard.families import own_name
from kafila.shard.formats import Affine
from kafila.types import BlockRange, ExpertBytes, ModelManifest, TensorSpec, scored_from

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an item takes in memory and on the wire, by our names."""
STORED_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U32": 4}
"""Bytes an item takes in a file, by the safetensors name: the dtypes we read."""
FLOATS = ("F32", "BF16", "F16")
CODES = ("U32",)
"""What quantized weights are packed in."""
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses longer headers, so a longer one is a damaged length."""
EMBEDDING, UNEMBEDDING = "model.embed_tokens", "lm_head"
NORM = "model.norm.weight"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LENGTH = struct.Struct("<Q")
_ELSEWHERE = "point --model at a Hugging Face checkpoint folder (config.json and *.safetensors)"
_AGAIN = "download the checkpoint again"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose every needed tensor is there, of the right shape, in a dtype we read."""

    name: str
    folder: Path
    config: DecoderConfig
    config_text: str
    """``config.json`` as it stands, for members that have no folder yet."""
    tensors: Mapping[str, TensorSpec]
    """By Hugging Face name; `TensorSpec.file` is relative to ``folder``, offsets count from the file's first byte."""


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a local checkpoint's configuration and headers.

    Raises ModelNotFound (no folder, or no checkpoint in it), UnsupportedModel, or ModelIncomplete naming the tensor and
    the file that are missing, truncated or wrong.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}: {_ELSEWHERE}")
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is no checkpoint: {_ELSEWHERE}")
    generation_path = folder / "generation_config.json"
    generation = generation_path.read_bytes() if generation_path.is_file() else None
    config_text = config_path.read_text(encoding="utf-8", errors="replace")
    config = parse_config(config_text, generation)
    tensors = dict(_needed(folder, stored_tensors(config)))
    return Checkpoint(folder.resolve().name, folder, config, config_text, tensors)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tensor has to be in its file."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


def block_tensors(config: DecoderConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one block, as if none were quantized."""
    hidden, head_dim = config.hidden, config.head_dim
    rows = {
        "self_attn.q_proj": (config.heads * head_dim, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.kv_heads * head_dim, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.kv_heads * head_dim, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.heads * head_dim, config.o_bias),
    }
    experts = config.experts if config.experts is not None and config.experts.sparse[index] else None
    if experts is None:
        rows |= {
            "mlp.gate_proj": (config.intermediate, hidden, config.mlp_bias),
            "mlp.up_proj": (config.intermediate, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, config.intermediate, config.mlp_bias),
        }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in config.norms.names}
    for name, (outputs, inputs, bias) in rows.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    if experts is not None:
        shapes |= expert_tensors(experts, hidden, stacked=stacks_experts(config))
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    return {f"model.layers.{index}.{name}": shape for name, shape in shapes.items()}


def stacks_experts(config: DecoderConfig) -> bool:
    """Whether the files hold a block's experts in one tensor: MLX, which quantized them, has it so."""
    return config.quantization is not None and config.quantization.stored


def typical_block(config: DecoderConfig) -> int:
    """The first block, or the first with experts."""
    return 0 if config.experts is None else config.experts.sparse.index(True)


def mlp_weight(config: DecoderConfig, name: str) -> str:
    """The tensor called ``name`` (``up_proj``) of the typical block's MLP, or of its first expert."""
    expert = STACKED if stacks_experts(config) else f"{EXPERTS}0."
    within = "mlp." if config.experts is None else expert
    return f"model.layers.{typical_block(config)}.{within}{name}.weight"


def head_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and plain shape of the head's tensors: embedding, final norm, and the unembedding unless it is tied."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{EMBEDDING}.weight": (config.vocab, config.hidden),
        NORM: (config.hidden,),
    }
    if not config.tied:
        shapes[f"{UNEMBEDDING}.weight"] = (config.vocab, config.hidden)
    return shapes


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and plain shape of every tensor the model needs; a checkpoint may have more, which nobody reads."""
    shapes = head_tensors(config)
    for index in range(config.blocks):
        shapes |= block_tensors(config, index)
    return shapes


def stored_tensors(config: DecoderConfig) -> dict[str, Stored]:
    """Every tensor the model needs, as its files hold it: a quantized one is three."""
    shapes = expected_tensors(config)
    return {name: stored for plain, shape in shapes.items() for name, stored in _stored(config, plain, shape).items()}


def weight_format(config: DecoderConfig, name: str) -> Affine | None:
    """How the tensor ``name`` (``model.layers.3.mlp.down_proj.weight``) is held in few bits; None: plainly."""
    module, _, kind = name.rpartition(".")
    return config.quantization.of(module) if config.quantization is not None and kind == "weight" else None


def _stored(config: DecoderConfig, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
    affine = weight_format(config, name) if len(shape) > 1 else None
    if affine is None or config.quantization is None or not config.quantization.stored:
        return {name: Stored(shape)}
    *outputs, inputs = shape
    if not affine.fits(inputs):
        raise ModelIncomplete(
            f"config.json: {name} has {inputs} inputs, which are not whole groups of {affine.group_size}"
        )
    constants = Stored((*outputs, inputs // affine.group(inputs)))
    module = name.removesuffix("weight")
    return {
        name: Stored((*outputs, affine.words(inputs)), CODES),
        f"{module}scales": constants,
        f"{module}biases": constants,
    }


def weight_files(folder: Path, config: DecoderConfig) -> list[str]:
    """The files that should hold the model's tensors, by the index in ``folder`` or, without one, by their usual name.

    Raises ModelIncomplete for an index that is damaged, lacks a tensor, or names files elsewhere.
    """
    if not (folder / INDEX_NAME).is_file():
        return [SINGLE_NAME]
    return sorted(set(_placement(folder, stored_tensors(config)).values()))


def own_tensors(checkpoint: Checkpoint, blocks: BlockRange, *, holds_head: bool) -> list[str]:
    """The names of what a member with these blocks holds; the head has all that is of no block."""
    own = tuple(f"model.layers.{index}." for index in range(blocks.first, blocks.stop))
    return [
        name
        for name in checkpoint.tensors
        if name.startswith(own) or (holds_head and not name.startswith("model.layers."))
    ]


def own_specs(
    checkpoint: Checkpoint, blocks: BlockRange, *, holds_head: bool, scored_percent: int = 0
) -> list[TensorSpec]:
    """What a member with these blocks reads: `own_tensors` and, at the last member of a ring whose vocabulary is
    divided (`kafila.backend.Duty.scored_percent`), the final norm and its rows of the unembedding."""
    own = [checkpoint.tensors[name] for name in own_tensors(checkpoint, blocks, holds_head=holds_head)]
    if holds_head or not scored_percent:
        return own
    first = divided_at(checkpoint.config, scored_percent)
    module = f"{unembedding(checkpoint.config)}."
    rows = (rows_from(spec, first) for name, spec in checkpoint.tensors.items() if name.startswith(module))
    return [*own, checkpoint.tensors[NORM], *rows]


def divided_at(config: DecoderConfig, scored_percent: int) -> int:
    """The first row of the vocabulary that the last member scores; 0: it scores none. Raises ProtocolError where that
    would leave one part empty."""
    if not scored_percent:
        return 0
    first = scored_from(config.vocab, scored_percent)
    if not 0 < first < config.vocab:
        raise ProtocolError(f"the plan divides {config.vocab} tokens so that one part is empty ({scored_percent}%)")
    return first


def unembedding(config: DecoderConfig) -> str:
    """The module that logits come from."""
    return EMBEDDING if config.tied else UNEMBEDDING


def rows_from(whole: TensorSpec, first: int) -> TensorSpec:
    """The tensor from the row ``first`` on."""
    row_bytes = (whole.end - whole.start) // whole.shape[0]
    shape = (whole.shape[0] - first, *whole.shape[1:])
    return replace(whole, name=f"{whole.name}[{first}:]", shape=shape, start=whole.start + first * row_bytes)


def model_manifest(name: str, config: DecoderConfig, dtype: str, kv_dtype: str = "") -> ModelManifest:
    """Sizes when served in ``dtype`` (a key of `DTYPE_BYTES`), whatever dtype the files have, with keys and values in
    ``kv_dtype`` (empty: the same).

    What is quantized counts as such, with scales and biases of 16 bits. Norms are counted like weights; members keep
    them in float32, which adds less than a thousandth.
    """
    item = DTYPE_BYTES[dtype]
    head = {name: tensor_bytes(config, name, shape, item) for name, shape in head_tensors(config).items()}
    embedding, *others = head.values()
    return ModelManifest(
        name=name,
        blocks=config.blocks,
        block_bytes=max(block_bytes(config, index, item) for index in range(config.blocks)),
        head_bytes=sum(head.values()),
        head_read_bytes=sum(others) + (embedding if config.tied else 0),
        kv_bytes_per_token_per_block=2 * config.kv_heads * config.head_dim * DTYPE_BYTES[kv_dtype or dtype],
        hidden_bytes=config.hidden * item,
        max_context=config.max_context,
        experts=_expert_bytes(config, item),
    )


def _expert_bytes(config: DecoderConfig, item: int) -> ExpertBytes | None:
    if config.experts is None:
        return None
    sizes = [
        (EXPERTS in name or STACKED in name, tensor_bytes(config, name, shape, item))
        for index in range(config.blocks)
        for name, shape in block_tensors(config, index).items()
    ]
    experts, whole = sum(size for expert, size in sizes if expert), sum(size for _, size in sizes)
    return ExpertBytes(
        count=config.experts.count,
        active=config.experts.active,
        shared_bytes=(whole - experts) // config.blocks,
        expert_bytes=experts // config.blocks,
    )


def block_bytes(config: DecoderConfig, index: int, item: int) -> int:
    """What one block's numbers take, ``item`` bytes one that is not quantized."""
    return sum(tensor_bytes(config, name, shape, item) for name, shape in block_tensors(config, index).items())


def tensor_bytes(config: DecoderConfig, name: str, shape: tuple[int, ...], item: int) -> int:
    """What a tensor's numbers take, ``item`` bytes one that is not quantized."""
    affine = weight_format(config, name) if len(shape) > 1 else None
    return math.prod(shape) * item if affine is None else affine.bytes(math.prod(shape[:-1]), shape[-1])


def parse_header(file: str, file_bytes: int, header: bytes) -> list[TensorSpec]:
    """The tensors of a safetensors file of ``file_bytes`` bytes, from the JSON part of its beginning.

    Raises ModelIncomplete for a header that is none, and for a tensor whose bytes the file does not hold.
    """
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ModelIncomplete(f"{file}: its header is damaged ({error}): {_AGAIN}") from error
    if not isinstance(entries, dict):
        raise ModelIncomplete(f"{file}: its header is damaged (no JSON object): {_AGAIN}")
    data_start = _LENGTH.size + len(header)
    return [
        _tensor(file, file_bytes, data_start, name, entry) for name, entry in entries.items() if name != "__metadata__"
    ]


def _tensor(file: str, file_bytes: int, data_start: int, name: str, entry: Any) -> TensorSpec:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sizes = (*shape, start, end)
    except (TypeError, KeyError, ValueError) as error:
        raise ModelIncomplete(f"{file}: its header is damaged at {name}: {_AGAIN}") from error
    if not isinstance(dtype, str) or any(type(size) is not int or size < 0 for size in sizes) or start > end:
        raise ModelIncomplete(f"{file}: its header is damaged at {name}: {_AGAIN}")
    if dtype in STORED_BYTES and end - start != math.prod(shape) * STORED_BYTES[dtype]:
        raise ModelIncomplete(
            f"{file}: {name} has {end - start} bytes, which is not {dtype} of shape {list(shape)}: {_AGAIN}"
        )
    if data_start + end > file_bytes:
        raise ModelIncomplete(
            f"{file} is truncated: {name} ends at byte {data_start + end} and the file at {file_bytes}: {_AGAIN}"
        )
    return TensorSpec(name, dtype, shape, file, data_start + start, data_start + end)


def _read_header(folder: Path, file: str) -> dict[str, TensorSpec]:
    path = folder / file
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as stream:
            length = stream.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
            if not 0 < header_bytes <= min(MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
                raise ModelIncomplete(f"{path} is truncated or no safetensors file: {_AGAIN}")
            header = stream.read(header_bytes)
    except OSError as error:
        raise ModelIncomplete(f"{path} cannot be read ({error.strerror}): {_AGAIN}") from error
    return {own_name(spec.name): spec for spec in parse_header(file, file_bytes, header)}


def _placement(folder: Path, expected: Mapping[str, object]) -> dict[str, str]:
    """Which file should hold each expected tensor."""
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        if (folder / SINGLE_NAME).is_file():
            return dict.fromkeys(expected, SINGLE_NAME)
        raise ModelNotFound(f"{folder} has no {SINGLE_NAME} and no {INDEX_NAME}: {_ELSEWHERE}")
    try:
        weight_map = json.loads(index_path.read_bytes())["weight_map"]
        weight_map = {own_name(name): file for name, file in weight_map.items()}
        placed = {name: weight_map[name] for name in expected if name in weight_map}
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelIncomplete(f"{index_path} is damaged (no weight_map): {_AGAIN}") from error
    for name in expected:
        file = placed.get(name)
        if file is None:
            raise _lacking(f"{index_path} lists", name, weight_map)
        # The index comes with the weights, from wherever those come from: it must not name files elsewhere.
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ModelIncomplete(f"{index_path} puts {name} in {file!r}, which is no file beside it: {_AGAIN}")
    return placed


def _lacking(where: str, name: str, found: Iterable[str]) -> ModelError:
    """What to say of a tensor that is not there."""
    if f".{EXPERTS}" in name and any(STACKED in other for other in found):
        return UnsupportedModel(
            f"{where} its experts stacked ({STACKED}*), and config.json says of no quantization: stacked experts are "
            "supported as MLX quantizes them, others with a tensor each, as the model was published"
        )
    return ModelIncomplete(f"{where} no tensor {name}: {_AGAIN}")


def _needed(folder: Path, expected: Mapping[str, Stored]) -> Iterator[tuple[str, TensorSpec]]:
    placed = _placement(folder, expected)
    for file in sorted(set(placed.values())):
        if not (folder / file).is_file():
            first = next(name for name, where in placed.items() if where == file)
            raise ModelIncomplete(f"{folder / file} is missing; it should hold {first} and others: {_AGAIN}")
    headers = {file: _read_header(folder, file) for file in sorted(set(placed.values()))}
    for name, stored in expected.items():
        spec = headers[placed[name]].get(name)
        where = folder / placed[name]
        if spec is None:
            raise _lacking(f"{where} has", name, headers[placed[name]])
        if spec.shape != stored.shape:
            raise ModelIncomplete(
                f"{where}: {name} has shape {list(spec.shape)} and config.json asks for {list(stored.shape)}"
            )
        if spec.dtype not in stored.dtypes:
            raise ModelIncomplete(f"{where}: {name} is {spec.dtype}; supported are {', '.join(stored.dtypes)}")
        yield name, spec
