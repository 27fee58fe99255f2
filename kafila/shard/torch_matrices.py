"""Matrices of 16 or 32 bits under torch, and matrices beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard import torch_kernels as kernels
from kafila.shard.ops import Matrix

_HALF_MAX = 65504.0  # IEEE 754 binary16
PACK_WEIGHTS = 1 << 26
"""Weights packed at once: they pass through float32, so that 256 MiB are needed beside the shard and not the 2.5 GB of
an 8 billion model's unembedding."""


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
