"""Matrices in few bits under torch: how they are held and applied. No torch type leaves the torch files.

Three forms, by what a device has:

- One scale an output in 8 bits (what ``--quantize int8`` makes), on an x86 CPU: FBGEMM's integer kernels, 14 to 17
  billion weights a second and thread where half precision runs at 5 to 8. The activation goes through as two rows of
  7 bits each, coarse and fine, because that many bits times 8 do not overflow AVX2's 16-bit sums. So it keeps 13 bits,
  more than bfloat16, and rows do not depend on what else is in the batch.
- Groups in 4 bits, on a CPU in 16-bit sessions: torch's ``int4pack`` kernel, whose activations are bfloat16. 8 bits
  are two such matrices, the high half of each code and the low one, since scale * (16 high + low) + bias is a sum.
- Everything else (other bits, float32, other devices): codes are unpacked on every use, `UNPACKED_AT_ONCE` at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard import torch_kernels as kernels
from kafila.shard.formats import Affine
from kafila.shard.ops import HostTensor, QuantizedTensor
from kafila.shard.quantize import to_float32, unpack_codes
from kafila.shard.workspace import UNPACKED_AT_ONCE

_INT8_INPUTS, _INT8_OUTPUTS = 512, 8
"""FBGEMM packs whole blocks of this many inputs and outputs (``PackBMatrix`` of int8 on AVX2: ``KCB``, ``NR``)."""
_INT4_OUTPUTS = 16
"""``_convert_weight_to_int4pack_for_cpu`` takes multiples of this."""
_INT4_GROUPS = (32, 64, 128, 256)


class RowMatrix:
    """8 bits, one scale an output, packed for FBGEMM; takes float32 activations."""

    __slots__ = ("bias", "packed")

    def __init__(self, packed: Any, bias: Tensor | None) -> None:
        self.packed = packed
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs)."""
        return kernels.int8_linear(x, self.packed, self.bias)


class Int4Matrix:
    """Groups in 4 bits, or in 8 as two planes of 4, packed for torch's CPU kernel."""

    __slots__ = ("bias", "group", "planes")

    def __init__(self, planes: list[Tensor], group: int, bias: Tensor | None) -> None:
        """``planes``: packed codes and (groups, outputs, 2) of scales and zero points, one pair after the other."""
        self.planes = planes
        self.group = group
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs)."""
        return kernels.int4_linear(x, self.planes, self.group, self.bias)


class Scratch:
    """Room in main memory that is used again and again by one thread.

    Weights that are unpacked to memory asked for anew each time left more and more of the C library's heap in holes:
    glibc before 2.38 does not give an aligned piece's place to the next of its size. Tokens alone took 60 MB so.
    """

    __slots__ = ("_room",)

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def of(self, shape: torch.Size) -> Tensor:
        """Float32 of this shape, whose values are anything, until the next call."""
        count = shape.numel()
        if self._room.numel() < count:
            self._room = torch.empty(count)
        return self._room[:count].view(shape)


class CodesMatrix:
    """Codes of a byte or half of one, unpacked on every use; on any device, for activations of any dtype."""

    __slots__ = ("_scratch", "bias", "biases", "codes", "group", "halves", "scales")

    def __init__(
        self,
        tensor: QuantizedTensor,
        bias: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        scratch: Scratch | None = None,
    ) -> None:
        """``scratch``: where weights are unpacked to on a CPU; None: wherever there is room."""
        self._scratch = scratch if device.type == "cpu" else None
        codes = unpack_codes(tensor)
        self.halves = tensor.bits <= 4
        if self.halves:
            codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
        self.codes = torch.from_numpy(np.array(codes)).to(device)
        self.scales, self.biases = (_constant(part, dtype).to(device) for part in (tensor.scales, tensor.biases))
        self.group = tensor.group_size
        self.bias = None if bias is None else bias.to(device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs)."""
        at_once = max(1, UNPACKED_AT_ONCE[0 if x.device.type == "cpu" else 1] // x.size(1))
        outputs = self.codes.size(0)
        if outputs <= at_once:
            y = F.linear(x, self._unpacked(slice(None), self._scratch).to(x.dtype))
        else:  # each part to its place at once, so that outputs are not there twice
            y = x.new_empty(x.size(0), outputs)
            for first in range(0, outputs, at_once):
                some = slice(first, first + at_once)
                y[:, some] = F.linear(x, self._unpacked(some, self._scratch).to(x.dtype))
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def first(self, count: int) -> CodesMatrix:
        """The first outputs, in the same memory."""
        part = copy(self)
        part.codes, part.scales, part.biases = self.codes[:count], self.scales[:count], self.biases[:count]
        part.bias = None if self.bias is None else self.bias[:count]
        return part

    def rows(self, index: Tensor) -> Tensor:
        """The weights of some outputs, which are an embedding's rows."""
        return self._unpacked(index, None)

    def _unpacked(self, outputs: slice | Tensor, scratch: Scratch | None) -> Tensor:
        codes = self.codes[outputs]
        if self.halves:
            codes = torch.stack((codes & 15, codes >> 4), -1)
        scales, biases = self.scales[outputs], self.biases[outputs]
        grouped = codes.view(scales.size(0), scales.size(1), self.group)
        values = grouped.float() if scratch is None else scratch.of(grouped.shape).copy_(grouped)
        torch.addcmul(biases.float().unsqueeze(-1), values, scales.float().unsqueeze(-1), out=values)
        return values.flatten(1)


def _constant(host: HostTensor, dtype: torch.dtype) -> Tensor:
    """Scales or biases as they are stored, or, where that is float32, in as many bits as ``dtype``: float16 is four
    times as exact as bfloat16 in its range."""
    values = torch.from_numpy(to_float32(host))
    if host.dtype == "F32" and dtype.itemsize == 4:
        return values
    half = values.half()
    return half if host.dtype != "BF16" and bool(half.isfinite().all()) and _exact(half, values) else values.bfloat16()


def _exact(half: Tensor, values: Tensor) -> bool:
    """Whether nothing fell below float16's range."""
    return bool(((half - values).abs() <= values.abs() / 1024).all())


Parts = tuple[list[Any], list[list[Tensor]], list[int], list[Tensor | None]]
"""What `torch_kernels.few_bits_block` takes of its matrices: packed 8-bit weights, planes, groups and biases."""


def parts_of(matrices: Sequence[object]) -> Parts | None:
    """None unless all are `RowMatrix` or `Int4Matrix`."""
    packed: list[Any] = []
    planes: list[list[Tensor]] = []
    groups: list[int] = []
    biases: list[Tensor | None] = []
    for matrix in matrices:
        if not isinstance(matrix, RowMatrix | Int4Matrix):
            return None
        packed.append(matrix.packed if isinstance(matrix, RowMatrix) else None)
        planes.append(matrix.planes if isinstance(matrix, Int4Matrix) else [])
        groups.append(matrix.group if isinstance(matrix, Int4Matrix) else 0)
        biases.append(matrix.bias)
    return packed, planes, groups, biases


def can_pack_int8() -> bool:
    """Whether this torch has FBGEMM's integer kernels and the processor can run them."""
    return "fbgemm" in torch.backends.quantized.supported_engines and all(
        hasattr(torch.ops.quantized, name)
        for name in ("linear_prepack", "linear_with_input_q_dq_qweight_dq_output_fp32")
    )


def can_pack_int4() -> bool:
    """Whether this torch has the 4-bit CPU kernel."""
    return hasattr(torch, "_weight_int4pack_mm_for_cpu")


def takes_row(tensor: QuantizedTensor) -> bool:
    """Whether a `RowMatrix` holds it: one group an output, whose code 128 is zero."""
    return (
        tensor.bits == 8
        and tensor.group_size == tensor.inputs
        and np.array_equal(to_float32(tensor.biases), to_float32(tensor.scales) * np.float32(-128))
    )


def takes_int4(bits: int, group: int, outputs: int) -> bool:
    """Whether an `Int4Matrix` holds it. Other bits would fit, but lose their precision to zero points in bfloat16."""
    return bits in {4, 8} and outputs % _INT4_OUTPUTS == 0 and group in _INT4_GROUPS


def row_bytes(outputs: int, inputs: int) -> int:
    """What a `RowMatrix` takes: packed codes, a scale, a zero point and a sum of codes an output."""
    padded = math.ceil(inputs / _INT8_INPUTS) * _INT8_INPUTS * math.ceil(outputs / _INT8_OUTPUTS) * _INT8_OUTPUTS
    return padded + 12 * outputs


def plane_bytes(affine: Affine, outputs: int, inputs: int) -> int:
    """What an `Int4Matrix` takes; a plane is half a byte a weight, with constants of its own in bfloat16."""
    planes = affine.bits // 4
    return planes * outputs * (inputs // 2 + 4 * (inputs // affine.group(inputs)))


def codes_bytes(affine: Affine, outputs: int, inputs: int, constant_bytes: int) -> int:
    """What a `CodesMatrix` takes."""
    codes = inputs // 2 if affine.bits <= 4 else inputs
    return outputs * (codes + 2 * constant_bytes * (inputs // affine.group(inputs)))


def row_matrix(tensor: QuantizedTensor, bias: Tensor | None) -> RowMatrix:
    """Of a tensor with one symmetric group an output."""
    codes = torch.from_numpy((unpack_codes(tensor) ^ np.uint8(128)).view(np.int8))  # code - 128
    scales = torch.from_numpy(to_float32(tensor.scales)[:, 0]).double()
    with warnings.catch_warnings():
        # torch would have such tensors made by torchao, whose kernels need this very packing on x86.
        warnings.filterwarnings("ignore", message=r"(?s).*quantized tensor creation.*", category=UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(
            codes, scales, torch.zeros(len(scales), dtype=torch.long), 0
        )
    del codes  # an unembedding's are not held thrice
    return RowMatrix(torch.ops.quantized.linear_prepack(quantized, None), bias)


def int4_matrix(tensor: QuantizedTensor, bias: Tensor | None) -> Int4Matrix:
    """w = scale * code + bias as the kernel has it: scale * (code - 8) + zero."""
    codes = unpack_codes(tensor)
    scales, biases = to_float32(tensor.scales), to_float32(tensor.biases)
    if tensor.bits == 4:
        planes = [_int4_codes(codes), _int4_constants(scales, biases + 8 * scales)]
    else:
        high, low = 16 * scales, scales
        planes = [
            _int4_codes(codes >> np.uint8(4)), _int4_constants(high, biases + 8 * high),
            _int4_codes(codes & np.uint8(15)), _int4_constants(low, 8 * low),
        ]  # fmt: skip
    return Int4Matrix(planes, tensor.group_size, bias)


def _int4_codes(codes: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    packed: Tensor = torch._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes.astype(np.int32)), 1)
    return packed


def _int4_constants(scales: np.ndarray[Any, Any], zeros: np.ndarray[Any, Any]) -> Tensor:
    pairs = torch.stack((torch.from_numpy(scales), torch.from_numpy(zeros)), -1)
    return pairs.transpose(0, 1).to(torch.bfloat16).contiguous()


def pieces_of(tensor: QuantizedTensor, most_weights: int) -> Sequence[QuantizedTensor]:
    """The same rows in several tensors of at most ``most_weights``, or of `_INT4_OUTPUTS` rows."""
    at_once = max(1, most_weights // tensor.inputs // _INT4_OUTPUTS) * _INT4_OUTPUTS
    return [tensor.rows(slice(first, first + at_once)) for first in range(0, tensor.outputs, at_once)]
