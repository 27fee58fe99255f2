"""A block's experts in MLX: one array of all their matrices, of which a kernel reads those that rows go through.

Which those are is then no business of the host's, and a stage stays one graph. MLX's CPU build has such a kernel for
float32 and for few bits; in 16 bits its rows are given to each expert's matrix in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from kafila.shard.mlx_matrices import Array, Codes, dense, evaluated, make_codes, way
from kafila.shard.ops import HostMatrix, QuantizedTensor

SORTED_ROWS = 64
"""From so many pairs of a row and an expert on, rows are put in the order of their experts, so that kernels read an
expert once (as mlx-lm has it)."""


@dataclass(frozen=True, slots=True)
class DenseStack:
    """Matrices (experts, outputs, inputs) in 16 or 32 bits."""

    weight: Array
    by_hand: bool
    """There is no kernel for them: rows must come in the order of their experts."""

    def __call__(self, x: Array, chosen: Array, *, ordered: bool) -> Array:
        """``x`` (..., 1, inputs) through the matrices ``chosen`` (...): (..., 1, outputs)."""
        if self.by_hand:
            experts, starts = np.unique(np.array(chosen), return_index=True)
            ends = [*starts[1:].tolist(), len(x)]
            parts = [
                x[start:end, 0] @ self.weight[expert].T
                for expert, start, end in zip(experts.tolist(), starts.tolist(), ends, strict=True)
            ]
            return mx.concatenate(parts)[:, None]
        return mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=chosen, sorted_indices=ordered)


@dataclass(frozen=True, slots=True)
class CodesStack:
    """Matrices in few bits, each part with a first axis of experts."""

    weight: Codes

    def __call__(self, x: Array, chosen: Array, *, ordered: bool) -> Array:
        """As `DenseStack`."""
        w = self.weight
        return mx.gather_qmm(
            x, w.codes, w.scales, w.biases, rhs_indices=chosen, transpose=True,
            group_size=w.group_size, bits=w.bits, sorted_indices=ordered,
        )  # fmt: skip


Stack = DenseStack | CodesStack


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """The experts of one block."""

    up_gate: Sequence[Stack]
    """One, or two where up and gate are held differently."""
    down: Stack

    def __call__(self, x: Array, weights: Array, chosen: Array, gate: Any) -> Array:
        """``x`` (rows, hidden) through the experts ``chosen`` (rows, active), weighed by ``weights`` (float32)."""
        rows, active = chosen.shape
        if rows * active < SORTED_ROWS and not any(self._by_hand()):
            outputs = self._run(x[:, None, None, :], chosen, gate, ordered=False)[:, :, 0]
        else:
            flat = chosen.flatten()
            order = mx.argsort(flat)
            outputs = self._run(x[order // active][:, None], flat[order], gate, ordered=True)[:, 0]
            outputs = outputs[mx.argsort(order)].reshape(rows, active, -1)
        return (outputs.astype(mx.float32) * weights[..., None]).sum(axis=1).astype(x.dtype)

    def _run(self, x: Array, chosen: Array, gate: Any, *, ordered: bool) -> Array:
        parts = [stack(x, chosen, ordered=ordered) for stack in self.up_gate]
        up, gated = mx.split(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1), 2, axis=-1)
        return self.down(gate(gated, up), chosen, ordered=ordered)

    def _by_hand(self) -> list[bool]:
        return [isinstance(stack, DenseStack) and stack.by_hand for stack in (*self.up_gate, self.down)]


def route(logits: Array, active: int, *, normalised: bool) -> tuple[Array, Array]:
    """The ``active`` most probable experts of each row: their weights in float32, and which they are."""
    probabilities = mx.softmax(logits.astype(mx.float32), axis=-1)
    chosen = mx.argpartition(-probabilities, kth=active - 1, axis=-1)[:, :active]
    weights = mx.take_along_axis(probabilities, chosen, axis=-1)
    return (weights / weights.sum(axis=-1, keepdims=True) if normalised else weights), chosen


def make_bank(
    experts: Iterable[tuple[Sequence[HostMatrix], HostMatrix]], count: int, dtype: Any, *, on_cpu: bool
) -> ExpertBank:
    """``count`` experts, each written to its place as it comes: the peak is the bank and one expert."""
    by_hand = on_cpu and dtype != mx.float32
    up_gates: list[_Filling] = []
    down = _Filling(count)
    for index, (up_gate, last) in enumerate(experts):
        runs = [list(run) for _, run in groupby(up_gate, way)]
        up_gates = up_gates or [_Filling(count) for _ in runs]
        for filling, run in zip(up_gates, runs, strict=True):
            filling.put(index, run, dtype)
        down.put(index, [last], dtype)
    return ExpertBank([filling.stack(by_hand=by_hand) for filling in up_gates], down.stack(by_hand=by_hand))


class _Filling:
    """A stack while it is made."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._arrays: list[Array] = []
        self._form: tuple[int, int] | None = None

    def put(self, index: int, parts: Sequence[HostMatrix], dtype: Any) -> None:
        """An expert's matrix: parts that are held alike, beside each other."""
        self._form = way(parts[0])
        if self._form is None:
            arrays = [evaluated(mx.concatenate([dense(part, dtype) for part in parts]))]
        else:
            codes = make_codes([part for part in parts if isinstance(part, QuantizedTensor)], dtype)
            arrays = [codes.codes, codes.scales, codes.biases]
        if not self._arrays:
            self._arrays = [evaluated(mx.zeros((self._count, *each.shape), dtype=each.dtype)) for each in arrays]
        for whole, part in zip(self._arrays, arrays, strict=True):
            whole[index] = part
            mx.eval(whole)  # now, while nothing else reads it: then it is written in place

    def stack(self, *, by_hand: bool) -> Stack:
        """All that were put."""
        if self._form is None:
            return DenseStack(self._arrays[0], by_hand)
        codes, scales, biases = self._arrays
        return CodesStack(Codes(codes, scales, biases, *self._form))
