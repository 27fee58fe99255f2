"""Weights in MLX: dense, in few bits, and mixtures of both, and how they get there from main memory.

Everything is evaluated as it is made, so that a shard's peak is the shard and the largest matrix on its way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from kafila.shard.ops import Divided, HostMatrix, HostTensor, Matrix, QuantizedTensor
from kafila.shard.quantize import dequantize

Array = Any
"""``mx.array``; for the caches a list of them, for `Placement.rope` a pair. The stubs that MLX ships do not pass a
strict check, so the checker is told nothing."""

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
GROUPS = (128, 64, 32)
"""Inputs that may share a scale in MLX's kernels."""
TURNED_WEIGHTS = 1 << 26
"""Weights of the largest matrix that is turned round as it is loaded, which for a moment takes as much again."""


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A weight to multiply by from the right."""

    weight: Array
    """(inputs, outputs)."""
    bias: Array | None

    def __call__(self, x: Array) -> Array:
        """(rows, inputs) to (rows, outputs)."""
        return x @ self.weight if self.bias is None else mx.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in few bits, as `QuantizedTensor` says; scales and biases in the activations' dtype."""

    codes: Array
    scales: Array
    biases: Array
    bits: int
    group_size: int

    def rows(self, index: Array) -> Array:
        """Some rows of the matrix, in the activations' dtype."""
        return mx.dequantize(
            self.codes[index], self.scales[index], self.biases[index], group_size=self.group_size, bits=self.bits
        )


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A weight in few bits, multiplied by as it is."""

    weight: Codes
    bias: Array | None

    def __call__(self, x: Array) -> Array:
        """(rows, inputs) to (rows, outputs)."""
        w = self.weight
        y = mx.quantized_matmul(x, w.codes, w.scales, w.biases, group_size=w.group_size, bits=w.bits)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Matrices over the same inputs that are stored in different ways, their outputs beside each other."""

    parts: tuple[Matrix[Array], ...]

    def __call__(self, x: Array) -> Array:
        """(rows, inputs) to (rows, outputs of all parts)."""
        return mx.concatenate([part(x) for part in self.parts], axis=1)


def first_outputs(matrix: Matrix[Array], count: int) -> Matrix[Array]:
    """In the same memory, where outputs lie one after another: not of a dense matrix that was turned round."""
    if isinstance(matrix, QuantizedMatrix):
        w = matrix.weight
        part = Codes(w.codes[:count], w.scales[:count], w.biases[:count], w.bits, w.group_size)
        mx.eval(part.codes, part.scales, part.biases)
        return QuantizedMatrix(part, None if matrix.bias is None else matrix.bias[:count])
    if not isinstance(matrix, DenseMatrix):
        raise TypeError(f"{type(matrix).__name__} has no first outputs of its own")
    return DenseMatrix(evaluated(matrix.weight[:, :count]), None if matrix.bias is None else matrix.bias[:count])


def kernel_group(inputs: int, group_size: int) -> int | None:
    """The group in which MLX can hold a matrix that has ``group_size`` inputs a group; None: in none."""
    return next((size for size in GROUPS if group_size % size == 0 and inputs % size == 0), None)


def way(part: HostMatrix) -> tuple[int, int] | None:
    """How a part is held: bits and group, or None for plainly. Parts held alike become one matrix."""
    if isinstance(part, HostTensor):
        return None
    group = kernel_group(part.inputs, part.group_size)
    return None if group is None else (part.bits, group)


def evaluated(array: Array) -> Array:
    """On the device now, so that what it was made from can go."""
    mx.eval(array)
    return array


def from_host(host: HostTensor) -> Array:
    """A copy, in the dtype it is stored in."""
    array = mx.array(np.ascontiguousarray(host.data))
    return array.view(mx.bfloat16) if host.dtype == "BF16" else array


def dense(part: HostMatrix, dtype: Any) -> Array:
    """(outputs, inputs) in ``dtype``, not evaluated yet."""
    if isinstance(part, HostTensor):
        return from_host(part).astype(dtype)
    return mx.array(dequantize(part)).astype(dtype)  # its groups are none of a kernel's: only tiny models have such


def make_matrix(
    parts: Sequence[HostMatrix], biases: Sequence[HostTensor] | None, dtype: Any, *, inputs_first: bool
) -> Matrix[Array]:
    """`Ops.matrix`: neighbouring parts that are held alike are one matrix. Dense ones in ``dtype``, and in memory
    (inputs, outputs) if ``inputs_first``: a CPU's BLAS reads that two to three times as fast, GPUs do not mind."""
    every: Sequence[HostTensor | None] = biases or [None] * len(parts)
    made: list[Matrix[Array]] = []
    for held, run in groupby(zip(parts, every, strict=True), key=lambda pair: way(pair[0])):
        weights, own = zip(*run, strict=True)
        bias = _bias([each for each in own if each is not None], dtype)
        if held is None:
            made.append(_dense_matrix(weights, bias, dtype, inputs_first=inputs_first))
        else:
            made.append(QuantizedMatrix(make_codes(weights, dtype), bias))
    return made[0] if len(made) == 1 else StackedMatrix(tuple(made))


def make_divided(part: HostMatrix, first: int, dtype: Any, *, inputs_first: bool) -> Divided[Array]:
    """`Ops.divided_matrix`: as `make_matrix`, and two beside each other where outputs lie apart."""
    whole_weights = part.data.size if isinstance(part, HostTensor) else part.outputs * part.inputs
    if way(part) is None and inputs_first and whole_weights <= TURNED_WEIGHTS:
        own, others = (
            make_matrix([_rows(part, rows)], None, dtype, inputs_first=True)
            for rows in (slice(0, first), slice(first, None))
        )
        return Divided(StackedMatrix((own, others)), own)
    whole = make_matrix([part], None, dtype, inputs_first=inputs_first)
    return Divided(whole, first_outputs(whole, first))


def _rows(part: HostMatrix, rows: slice) -> HostMatrix:
    return part.rows(rows) if isinstance(part, QuantizedTensor) else HostTensor(part.dtype, part.data[rows])


def make_codes(parts: Sequence[QuantizedTensor], dtype: Any) -> Codes:
    """Parts that are held alike, as one."""
    bits, inputs = parts[0].bits, parts[0].inputs
    group = kernel_group(inputs, parts[0].group_size) or inputs

    def constants(tensors: Sequence[HostTensor]) -> Array:
        arrays = [from_host(each).astype(dtype) for each in tensors]
        repeated = [mx.repeat(each, inputs // group // each.shape[1], axis=1) for each in arrays]
        return evaluated(mx.contiguous(mx.concatenate(repeated)))  # else a repetition stays a view, copied at each use

    codes = evaluated(mx.concatenate([mx.array(part.codes) for part in parts]))
    scales, minima = constants([part.scales for part in parts]), constants([part.biases for part in parts])
    return Codes(codes, scales, minima, bits, group)


def _bias(biases: Sequence[HostTensor], dtype: Any) -> Array | None:
    return evaluated(mx.concatenate([from_host(each).astype(dtype) for each in biases])) if biases else None


def _dense_matrix(parts: Sequence[HostMatrix], bias: Array | None, dtype: Any, *, inputs_first: bool) -> DenseMatrix:
    weight = mx.concatenate([evaluated(dense(part, dtype)) for part in parts])
    if inputs_first and weight.size <= TURNED_WEIGHTS:
        return DenseMatrix(evaluated(mx.contiguous(weight.T)), bias)
    return DenseMatrix(evaluated(weight).T, bias)
