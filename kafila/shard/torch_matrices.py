"""Matrices of 16 or 32 bits under torch, and matrices beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard import torch_kernels as kernels
from kafila.shard.ops import Matrix


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
