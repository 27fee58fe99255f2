"""Matrices under torch: those of 16 or 32 bits, matrices beside one another, and which of them holds what."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard import torch_kernels as kernels
from kafila.shard import torch_quantized as few_bits
from kafila.shard.formats import Affine
from kafila.shard.ops import Divided, HostMatrix, HostTensor, Matrix, QuantizedTensor, Table
from kafila.shard.quantize import stacked

_HALF_MAX = 65504.0  # IEEE 754 binary16
PACK_WEIGHTS = 1 << 26
"""Weights packed at once: they pass through float32, so that 256 MiB are needed beside the shard and not the 2.5 GB of
an 8 billion model's unembedding."""
_PACK_ROWS, _PACK_COLUMNS = 512, 16
"""FBGEMM packs whole blocks of this many inputs and outputs (``PackedGemmMatrixFP16``: ``brow_``, and ``bcol_`` on
AVX2). A width of 4096 fits; SmolLM2's 576 takes the room of 1024."""


class DenseMatrix:
    """A weight as torch keeps it, (outputs, inputs), with its bias or None; takes activations of any dtype."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs)."""
        if x.dtype is self.weight.dtype:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)

    def first(self, count: int) -> DenseMatrix:
        """The first outputs, in the same memory."""
        return DenseMatrix(self.weight[:count], None if self.bias is None else self.bias[:count])


class PackedMatrix:
    """A weight packed for FBGEMM's half-precision kernels, its bias inside; takes float32 activations."""

    __slots__ = ("packed",)

    def __init__(self, packed: Any) -> None:
        self.packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs)."""
        return kernels.packed_linear(x, self.packed)


class StackedMatrix:
    """Matrices over the same inputs, their outputs beside each other."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Matrix[Tensor]]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs of all parts)."""
        return torch.cat([part(x) for part in self.parts], 1)


def stack(parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The parts' rows beside each other in memory of their own, without a second copy on the way."""
    rows = sum(part.size(0) for part in parts)
    whole = torch.empty(rows, parts[0].size(1), dtype=dtype, device=device)
    start = 0
    for part in parts:
        whole.narrow(0, start, part.size(0)).copy_(part)
        start += part.size(0)
    return whole


def fits_half(weight: Tensor) -> bool:
    """Whether half precision holds all of it."""
    low, high = torch.aminmax(weight)
    return max(-float(low), float(high)) <= _HALF_MAX


def one_or_stacked(pieces: Sequence[Matrix[Tensor]]) -> Matrix[Tensor]:
    """The pieces as one matrix."""
    return pieces[0] if len(pieces) == 1 else StackedMatrix(pieces)


def pack(parts: Sequence[Tensor], bias: Tensor | None) -> list[Matrix[Tensor]]:
    """The parts' rows as one packed matrix, or as several where one would take too much room on its way."""
    if sum(part.numel() for part in parts) <= PACK_WEIGHTS:
        return [_packed(stack(parts, torch.device("cpu"), torch.float32), bias)]
    at_once = max(1, PACK_WEIGHTS // parts[0].size(1))
    pieces = [piece for part in parts for piece in torch.split(part, at_once)]
    biases = [None] * len(pieces) if bias is None else torch.split(bias, [piece.size(0) for piece in pieces])
    return [_packed(piece.float(), own) for piece, own in zip(pieces, biases, strict=True)]


def _packed(weight: Tensor, bias: Tensor | None) -> PackedMatrix:
    return PackedMatrix(torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias))


_MakeQuantized = Callable[[QuantizedTensor, Tensor | None], Matrix[Tensor]]


@dataclass(frozen=True, slots=True)
class MatrixMaker:
    """Makes a device's matrices of what a checkpoint stores, and knows what they take."""

    device: torch.device
    dtype: torch.dtype
    packs: bool
    """There are FBGEMM's half-precision kernels, and they are to be used."""
    int8: bool
    """Likewise, its integer kernels."""
    int4: bool
    """Likewise, torch's for 4 bits."""
    scratch: few_bits.Scratch = field(default_factory=few_bits.Scratch, compare=False, repr=False)
    """Of all its matrices, which one thread uses."""

    def bytes(self, outputs: int, inputs: int, stored: Affine | None) -> int:
        """`Ops.matrix_bytes`: packed matrices are padded; those of most models fit without."""
        if stored is not None:
            if self.int8 and stored.bits == 8 and not stored.group_size:
                return few_bits.row_bytes(outputs, inputs)
            if self.int4 and few_bits.takes_int4(stored.bits, stored.group(inputs), outputs):
                return few_bits.plane_bytes(stored, outputs, inputs)
            return few_bits.codes_bytes(stored, outputs, inputs, self.dtype.itemsize)
        if not self.packs:
            return outputs * inputs * self.dtype.itemsize
        rows, columns = (
            math.ceil(size / unit) * unit for size, unit in ((inputs, _PACK_ROWS), (outputs, _PACK_COLUMNS))
        )
        return rows * columns * self.dtype.itemsize

    def matrix(self, parts: Sequence[HostMatrix], biases: Sequence[HostTensor] | None) -> Matrix[Tensor]:
        """Packed where that is faster and holds the values, else dense in ``dtype``; parts in few bits stay apart
        from others."""
        bias = None if biases is None else torch.cat([on_host(part).float() for part in biases])
        alike = _alike(parts)
        own = [None] * len(alike) if bias is None else torch.split(bias, [sum(map(_outputs, group)) for group in alike])
        pieces = [piece for group, part in zip(alike, own, strict=True) for piece in self._matrices(group, part)]
        return one_or_stacked(pieces)

    def tied_matrix(self, table: Table) -> Matrix[Tensor]:
        """A packed copy of what may be a mapped table, or the table itself."""
        if isinstance(table, QuantizedTensor):
            return self.matrix([table], None)
        if isinstance(table, few_bits.CodesMatrix):
            return table
        if self.packs and fits_half(table):
            return one_or_stacked(pack([table], None))
        return DenseMatrix(table.to(self.dtype), None)

    def divided_matrix(self, weight: HostMatrix, first: int) -> Divided[Tensor]:
        """Where matrices are packed, two or more; else one, of whose memory the other is a part.

        Both parts are held as one matrix would be, so that every output is the same number.
        """
        if isinstance(weight, QuantizedTensor):
            make = self._make_quantized(weight)
            ranges = (slice(0, first), slice(first, weight.outputs))
            return _beside(*(_in_pieces(weight.rows(rows), None, make) for rows in ranges))
        plain = on_host(weight)
        if self.packs and fits_half(plain):
            return _packed_apart(plain, first)
        (whole,) = self._matrices([weight], None)
        return _of_one(whole, first)

    def divided_tied_matrix(self, table: Table, first: int) -> Divided[Tensor]:
        """Likewise."""
        if isinstance(table, QuantizedTensor):
            return self.divided_matrix(table, first)
        if isinstance(table, Tensor) and self.packs and fits_half(table):
            return _packed_apart(table, first)
        return _of_one(self.tied_matrix(table), first)

    def _matrices(self, parts: Sequence[HostMatrix], bias: Tensor | None) -> list[Matrix[Tensor]]:
        plain = [on_host(part) for part in parts if isinstance(part, HostTensor)]
        if not plain:
            whole = stacked([part for part in parts if isinstance(part, QuantizedTensor)])
            return _in_pieces(whole, bias, self._one_quantized)
        if self.packs and all(fits_half(part) for part in plain):
            return pack(plain, bias)
        # What half precision cannot hold, bfloat16 can.
        dtype = torch.bfloat16 if self.packs else self.dtype
        weight = stack(plain, self.device, dtype)
        return [DenseMatrix(weight, None if bias is None else bias.to(self.device, dtype))]

    def _one_quantized(self, tensor: QuantizedTensor, bias: Tensor | None) -> Matrix[Tensor]:
        return self._make_quantized(tensor)(tensor, bias)

    def _make_quantized(self, tensor: QuantizedTensor) -> _MakeQuantized:
        """The way to hold it."""
        if self.int8 and few_bits.takes_row(tensor):
            return few_bits.row_matrix
        if self.int4 and few_bits.takes_int4(tensor.bits, tensor.group_size, tensor.outputs):
            return few_bits.int4_matrix
        return partial(few_bits.CodesMatrix, device=self.device, dtype=self.dtype, scratch=self.scratch)


def on_host(host: HostTensor) -> Tensor:
    """The same memory as a torch tensor."""
    if host.dtype == "BF16":
        return torch.from_numpy(host.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host.data)


def _packed_apart(weight: Tensor, first: int) -> Divided[Tensor]:
    return _beside(pack([weight[:first]], None), pack([weight[first:]], None))


def _beside(own: Sequence[Matrix[Tensor]], others: Sequence[Matrix[Tensor]]) -> Divided[Tensor]:
    return Divided(StackedMatrix((*own, *others)), one_or_stacked(own))


def _of_one(whole: Matrix[Tensor], first: int) -> Divided[Tensor]:
    if not isinstance(whole, DenseMatrix | few_bits.CodesMatrix):
        raise TypeError(f"{type(whole).__name__} has no first outputs of its own")
    return Divided(whole, whole.first(first))


def _in_pieces(tensor: QuantizedTensor, bias: Tensor | None, make: _MakeQuantized) -> list[Matrix[Tensor]]:
    pieces = few_bits.pieces_of(tensor, PACK_WEIGHTS)
    biases = [None] * len(pieces) if bias is None else torch.split(bias, [piece.outputs for piece in pieces])
    return [make(piece, own) for piece, own in zip(pieces, biases, strict=True)]


def _outputs(part: HostMatrix) -> int:
    return part.outputs if isinstance(part, QuantizedTensor) else len(part.data)


def _alike(parts: Sequence[HostMatrix]) -> list[list[HostMatrix]]:
    """Neighbours that can be one matrix, together."""

    def form(part: HostMatrix) -> tuple[int, int]:
        return (part.bits, part.group_size) if isinstance(part, QuantizedTensor) else (0, 0)

    return [list(group) for _, group in groupby(parts, form)]
