"""Tensors of a Llama GGUF, renamed, put back in Hugging Face's row order, and written as bfloat16 safetensors.

Tensors are dequantized and written a run of rows at a time, so the memory this takes does not grow with the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kafila.demo.source import Source, SourceTensor
from kafila.errors import ModelIncomplete, UnsupportedModel

ROWS_AT_ONCE = 1024
"""Rows dequantized together: 2.4 MB of float32 at 576 columns, large enough that numpy's overhead vanishes."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def checkpoint_name(gguf_name: str) -> str:
    """Hugging Face's name of a Llama tensor; raises `UnsupportedModel` for one that the conversion does not know."""
    if gguf_name in _OUTER:
        return _OUTER[gguf_name]
    match = _BLOCK_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in _IN_BLOCK:
        raise UnsupportedModel(f"the conversion does not know what to do with the tensor {gguf_name}")
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"


def rotary_row_order(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Which stored row each row of a Hugging Face q or k projection is: ``hf = stored[order]``, shape (rows,).

    GGUF rotates neighbouring rows of a head as a pair (0,1), (2,3) ...; Hugging Face pairs row i with i + half. So
    llama.cpp interleaves a head's two halves when it writes the file, and this takes them apart again.
    """
    per_head = rows // heads
    return np.arange(rows).reshape(heads, per_head // 2, 2).swapaxes(1, 2).reshape(rows)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of ``values`` rounded to bfloat16, to nearest, ties to even. Values must be finite."""
    bits = values.view(np.uint32)
    half_less_one = np.uint32(0x7FFF)
    last_kept_bit = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + half_less_one + last_kept_bit) >> np.uint32(16)).astype(np.uint16)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the checkpoint and the stored one that it is made from."""

    name: str
    stored: SourceTensor
    order: npt.NDArray[np.intp] | None
    """Row order, or None to keep the stored one."""

    @property
    def size_bytes(self) -> int:
        return 2 * math.prod(self.stored.shape)


def plan_tensors(source: Source) -> list[PlannedTensor]:
    """Every tensor of the checkpoint in the order in which it is written."""
    heads = {
        "attn_q": int(source.need("llama.attention.head_count")),
        "attn_k": int(source.need("llama.attention.head_count_kv")),
    }
    planned = []
    for stored in source.tensors.values():
        match = _BLOCK_TENSOR.fullmatch(stored.name)
        rotated = heads.get(match[2]) if match else None
        order = rotary_row_order(stored.shape[0], rotated) if rotated else None
        planned.append(PlannedTensor(checkpoint_name(stored.name), stored, order))
    return planned


def header(tensors: list[PlannedTensor], metadata: dict[str, str]) -> bytes:
    """The beginning of the safetensors file: an 8-byte little-endian length, then JSON padded to 8 bytes, so that
    the data after it is aligned (https://github.com/huggingface/safetensors, "Format")."""
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for tensor in tensors:
        end = at + tensor.size_bytes
        table[tensor.name] = {"dtype": "BF16", "shape": list(tensor.stored.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(tensors: list[PlannedTensor], metadata: dict[str, str], file: BinaryIO, wrote: Callable[[int], None]) -> None:
    """Write the whole safetensors file, calling ``wrote(bytes)`` after each piece. Raises `ModelIncomplete` on a
    tensor that holds no finite numbers, `UnsupportedModel` on a quantization the gguf package cannot undo."""
    file.write(header(tensors, metadata))
    for tensor in tensors:
        for values in _dequantized(tensor):
            if not np.isfinite(values).all():
                raise ModelIncomplete(f"the tensor {tensor.stored.name} holds values that are not numbers")
            piece = to_bfloat16(values).tobytes()
            file.write(piece)
            wrote(len(piece))


def _dequantized(tensor: PlannedTensor) -> Iterator[npt.NDArray[np.float32]]:
    from gguf import quants  # noqa: PLC0415  - an optional dependency, extra `demo`

    stored = tensor.stored
    for start in range(0, stored.shape[0], ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, stored.shape[0])
        packed = stored.rows[start:stop] if tensor.order is None else stored.rows[tensor.order[start:stop]]
        try:
            values = quants.dequantize(packed, stored.quantization)
        except NotImplementedError as error:
            raise UnsupportedModel(f"the tensor {stored.name} is stored in a way we cannot read: {error}") from error
        yield np.ascontiguousarray(values, dtype=np.float32)
