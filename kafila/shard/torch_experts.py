"""A block's experts under torch: each a pair of matrices of its own, so that a token reads those it goes through and
no weight is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kafila.shard import torch_kernels as kernels
from kafila.shard import torch_quantized as few_bits
from kafila.shard.ops import Matrix
from kafila.shard.torch_matrices import PackedMatrix

Expert = tuple[Matrix[Tensor], Matrix[Tensor]]
"""Up and gate as one matrix, and down."""


class ExpertBank:
    """The experts of one block."""

    __slots__ = ("_experts", "_packed")

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._experts = tuple(experts)
        self._packed = [_packed_pair(*expert) for expert in experts]

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """``x`` (rows, hidden) through the experts ``chosen`` (rows, active), weighed by ``weights`` (float32)."""
        if x.size(0) == 1:
            return self._one_row(x, weights, chosen[0].tolist())
        return self._by_expert(x, weights, chosen)

    def _one_row(self, x: Tensor, weights: Tensor, chosen: Sequence[int]) -> Tensor:
        """Every chosen expert takes the same row: where there are kernels, in one call."""
        pairs = [pair for index in chosen if (pair := self._packed[index]) is not None]
        if len(pairs) == len(chosen):
            return kernels.packed_experts(x, weights, [pair[0] for pair in pairs], [pair[1] for pair in pairs])
        if parts := few_bits.parts_of([matrix for index in chosen for matrix in self._experts[index]]):
            return kernels.few_bits_experts(x, weights, *parts)
        outputs = torch.cat([self._run(index, x) for index in chosen])
        return (weights @ outputs.float()).to(x.dtype)

    def _by_expert(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every expert takes all rows that go through it at once."""
        flat = chosen.flatten()
        order = flat.argsort()
        rows = order.div(chosen.size(1), rounding_mode="floor")
        shares = weights.flatten()[order].unsqueeze(1)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for index, count in enumerate(torch.bincount(flat, minlength=len(self._experts)).tolist()):
            if not count:
                continue
            mine = rows.narrow(0, start, count)
            outputs = self._run(index, x.index_select(0, mine)).float()
            total.index_add_(0, mine, outputs.mul_(shares.narrow(0, start, count)))
            start += count
        return total.to(x.dtype)

    def _run(self, index: int, x: Tensor) -> Tensor:
        up_gate, down = self._experts[index]
        return down(kernels.silu_gate(up_gate(x)))


def _packed_pair(up_gate: Matrix[Tensor], down: Matrix[Tensor]) -> tuple[Any, Any] | None:
    """What `torch_kernels.packed_experts` takes of an expert; None where it is held otherwise."""
    if isinstance(up_gate, PackedMatrix) and isinstance(down, PackedMatrix):
        return up_gate.packed, down.packed
    return None
