"""`kafila.shard.ops.Ops` in MLX: Metal, CUDA, and the CPU builds. No MLX type leaves
this file and `mlx_matrices`.

MLX only notes what is to be computed until somebody wants the numbers. A stage is so one graph, handed to the device
whole when its rows are turned into bytes; a pass of many rows is evaluated block by block (see `EVALUATED_ROWS`).
Arrays and streams belong to the thread that makes them, so a `MlxOps` is made on the thread that will use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kafila.shard.decoder import block
from kafila.shard.formats import Affine
from kafila.shard.mlx_experts import make_bank, route
from kafila.shard.mlx_matrices import (
    DTYPES,
    Array,
    Codes,
    DenseMatrix,
    QuantizedMatrix,
    dense,
    evaluated,
    first_outputs,
    from_host,
    kernel_group,
    make_codes,
    make_divided,
    make_matrix,
    way,
)
from kafila.shard.ops import (
    AttentionShape,
    Bank,
    BlockWeights,
    Divided,
    Experts,
    HostMatrix,
    HostTensor,
    Matrix,
    Norm,
    Placement,
    QuantizedTensor,
    Table,
)
from kafila.types import Segment

EVALUATED_ROWS = 32
"""A pass of more rows is evaluated after every block. Waiting for the device costs tens of microseconds, nothing beside
a block's work on so many rows, and it bounds what the pass holds in memory to one block's, and lets it be
interrupted between blocks as other backends can be."""
CACHE_BYTES = 128 << 20
"""Freed buffers MLX may keep for the next pass; by default it would keep as much as the device has."""
CAPPED_ROWS = 64
"""Rows whose scores are held at once where there is no kernel for them."""
WORKSPACE_BYTES = 512 << 20
"""What a pass may take beside weights and caches: `kafila.shard.memory.RESERVE_BYTES`."""


def _silu_gate(gate: Array, up: Array) -> Array:
    exact = gate.astype(mx.float32)
    return (up.astype(mx.float32) * exact * mx.sigmoid(exact)).astype(up.dtype)


def _gelu_gate(gate: Array, up: Array) -> Array:
    exact = gate.astype(mx.float32)
    bend = mx.tanh(math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3))
    return (up.astype(mx.float32) * 0.5 * exact * (1 + bend)).astype(up.dtype)


_GATES = {"silu": _silu_gate, "gelu_pytorch_tanh": _gelu_gate}


def _capped_attention(q: Array, k: Array, v: Array, mask: Array, scale: float, cap: float) -> Array:
    """Attention whose scores s become cap * tanh(s / cap): ``q`` (heads, length, head_dim), ``k`` and ``v`` (kv_heads,
    seen, head_dim) to (heads, length, head_dim). Some rows at a time, so that scores take a bounded room."""
    (heads, length, dim), kv_heads, outputs = q.shape, k.shape[0], []
    for first in range(0, length, CAPPED_ROWS):
        mine = q[:, first : first + CAPPED_ROWS]
        rows = mine.shape[1]
        scores = mine.reshape(kv_heads, -1, dim) @ k.swapaxes(1, 2)
        scores = cap * mx.tanh(scores.astype(mx.float32) * (scale / cap))
        if mask is not None:
            causal = isinstance(mask, str)
            sees = mx.tri(rows, k.shape[1], first + k.shape[1] - length, dtype=mx.bool_) if causal else None
            grouped = scores.reshape(kv_heads, -1, rows, k.shape[1])
            scores = mx.where(sees if causal else mask[first : first + rows], grouped, -mx.inf).reshape(scores.shape)
        outputs.append((mx.softmax(scores, axis=-1).astype(q.dtype) @ v).reshape(heads, rows, dim))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


class MlxOps:
    """Implements `Ops`. Make it on the thread that will use it."""

    def __init__(self, dtype: str, *, memory_cap: int | None = None) -> None:
        """On the device MLX prefers. ``memory_cap`` in bytes is the owner's limit for weights and caches."""
        self._dtype_name = dtype
        self._dtype = DTYPES[dtype]
        self._info = mx.device_info()
        self._on_cpu = mx.default_device().type == mx.DeviceType.cpu
        # On a CPU, MLX would call a C++ compiler to fuse these.
        self._gates = {
            name: gate if self._on_cpu else mx.compile(gate, shapeless=True) for name, gate in _GATES.items()
        }
        mx.set_cache_limit(CACHE_BYTES)
        limits = [self._working_set, None if memory_cap is None else memory_cap + WORKSPACE_BYTES]
        if known := [limit for limit in limits if limit is not None]:
            mx.set_memory_limit(min(known))
        if mx.metal.is_available() and self._working_set is not None:
            # Otherwise macOS takes weights out of the GPU's reach whenever a stage has waited a moment for its turn.
            mx.set_wired_limit(self._working_set)

    @property
    def device(self) -> str:
        """For people."""
        kind = "cpu" if self._on_cpu else str(self._info.get("device_name", self._info.get("architecture", "gpu")))
        return f"mlx {kind}"

    @property
    def dtype(self) -> str:
        """What weights and caches are held in."""
        return self._dtype_name

    def scope(self) -> AbstractContextManager[object]:
        """Nothing to enter: MLX computes gradients only where they are asked for."""
        return nullcontext()

    @property
    def _working_set(self) -> int | None:
        """Bytes that Metal recommends to stay below."""
        found = self._info.get("max_recommended_working_set_size")
        return None if found is None else int(found)

    def memory_bytes(self) -> int | None:
        """Metal: the recommended working set less what is taken; CUDA: what is free; None on a CPU."""
        if self._working_set is not None:
            return max(0, self._working_set - int(mx.get_active_memory()))
        free = None if self._on_cpu else mx.device_info().get("free_memory")
        return None if free is None else int(free)

    def matrix_bytes(self, outputs: int, inputs: int, stored: Affine | None = None) -> int:
        """Nothing is padded."""
        size = int(self._dtype.size)
        group = None if stored is None else kernel_group(inputs, stored.group(inputs))
        if stored is None or group is None:
            return outputs * inputs * size
        return Affine(stored.bits, group).bytes(outputs, inputs, size)

    def table_bytes(self, vocab: int, hidden: int) -> int:
        """A copy on the device."""
        return vocab * hidden * int(self._dtype.size)

    # Weights.

    def norm(self, weight: HostTensor, epsilon: float) -> Norm[Array]:
        """The weight in the activations' dtype, as MLX's kernel wants it."""
        return Norm(evaluated(from_host(weight).astype(self._dtype)), epsilon)

    def matrix(self, parts: Sequence[HostMatrix], biases: Sequence[HostTensor] | None) -> Matrix[Array]:
        """As the parts are stored; dense ones in ``dtype``."""
        return make_matrix(parts, biases, self._dtype, inputs_first=self._on_cpu)

    def expert_bank(self, experts: Iterable[tuple[Sequence[HostMatrix], HostMatrix]], count: int) -> Bank:
        """See `mlx_experts`."""
        return make_bank(experts, count, self._dtype, on_cpu=self._on_cpu)

    def table(self, weight: HostMatrix) -> Table:
        """(vocab, hidden) as it is stored, or in ``dtype``."""
        if isinstance(weight, QuantizedTensor) and way(weight):
            return make_codes([weight], self._dtype)
        return evaluated(dense(weight, self._dtype))

    def tied_matrix(self, table: Table) -> Matrix[Array]:
        """The table itself."""
        return QuantizedMatrix(table, None) if isinstance(table, Codes) else DenseMatrix(table.T, None)

    def divided_matrix(self, weight: HostMatrix, first: int) -> Divided[Array]:
        """See `mlx_matrices.make_divided`."""
        return make_divided(weight, first, self._dtype, inputs_first=self._on_cpu)

    def divided_tied_matrix(self, table: Table, first: int) -> Divided[Array]:
        """The table itself, and its first rows."""
        whole = self.tied_matrix(table)
        return Divided(whole, first_outputs(whole, first))

    def rope(self, frequencies: Sequence[float], context: int) -> Array:  # noqa: ARG002  - angles are computed in the kernel
        """(pairs,): positions a radian, infinite where nothing turns, as MLX's kernel wants them."""
        return evaluated(1 / mx.array(list(frequencies), dtype=mx.float32))

    def kv_storage(self, slots: int, context: int, kv_heads: int, head_dim: int, dtype: str = "") -> Array:
        """One (2, kv_heads, context, head_dim) a slot, zeros written now.

        An array is updated in place only while nothing else reads it. Being apart, slots that share a batch are.
        """
        storage = [
            mx.zeros((2, kv_heads, context, head_dim), dtype=DTYPES[dtype or self._dtype_name]) for _ in range(slots)
        ]
        return evaluated(storage)

    # Arithmetic.

    def place(self, segments: Sequence[Segment], rope: Array) -> Placement[Array]:
        """Spans, and each row's position beside the frequencies."""
        spans = [value for segment in segments for value in (segment.slot, segment.start, segment.length)]
        positions = np.concatenate(
            [np.arange(segment.start, segment.start + segment.length, dtype=np.int32) for segment in segments]
        )
        return Placement(spans, (mx.array(positions), rope))

    def embed(self, table: Table, tokens: Sequence[int]) -> Array:
        """Rows of the table."""
        index = mx.array(list(tokens), dtype=mx.int32)
        return table.rows(index) if isinstance(table, Codes) else table[index]

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        return x + y

    def scaled(self, x: Array, factor: float) -> Array:
        """x * factor."""
        return x * mx.array(factor, dtype=self._dtype)

    def capped(self, x: Array, cap: float) -> Array:
        """In float32."""
        return cap * mx.tanh(x.astype(mx.float32) / cap)

    def rms_norm(self, x: Array, norm: Norm[Array]) -> Array:
        """Statistics in float32, as MLX's kernel does it."""
        return mx.fast.rms_norm(x, norm.weight, norm.epsilon)

    def attention(
        self, qkv: Array, shape: AttentionShape, qk_norm: Norm[Array] | None, kv: Array, placement: Placement[Array]
    ) -> Array:
        """See `Ops.attention`; ``kv`` is a list, one array a slot."""
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        rows = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, dim)
        turned, values = mx.split(rows, [heads + kv_heads], axis=1)
        if qk_norm is not None:
            turned = mx.fast.rms_norm(turned, None, qk_norm.epsilon) * qk_norm.weight
        positions, frequencies = placement.rope
        if self._on_cpu:  # where sines would be rounded to 16 bits; GPUs' kernels compute with 32
            turned = turned.astype(mx.float32)
        # Every row is a sequence of its own of length one, so that a ragged batch is turned by one call.
        turned = mx.fast.rope(
            turned[:, :, None], dim, traditional=True, base=None, scale=1.0, offset=positions, freqs=frequencies
        ).astype(qkv.dtype)
        queries, keys = mx.split(turned, [heads], axis=1)
        outputs, row = [], 0
        scale = dim**-0.5 if shape.scale is None else shape.scale
        spans = placement.spans
        masks = self._masks(placement, shape.window)
        last_only = placement.last_only
        for index, mask in enumerate(masks):
            slot, start, length = spans[3 * index : 3 * index + 3]
            end, mine = start + length, slice(row, row + length)
            row += length
            new = mx.stack([keys[mine, :, 0], values[mine]])  # (2, length, kv_heads, dim)
            kv[slot][:, :, start:end] = new.swapaxes(1, 2).astype(kv[slot].dtype)
            if last_only:
                mine, start, length = slice(row - 1, row), end - 1, 1
            first = max(0, start + 1 - shape.window) if shape.window else 0
            seen = kv[slot][:, :, first:end].astype(qkv.dtype)
            q = queries[mine].transpose(2, 1, 0, 3)  # (1, heads, length, dim)
            if shape.cap:
                out = _capped_attention(q[0], seen[0], seen[1], mask, scale, shape.cap)
            else:
                out = mx.fast.scaled_dot_product_attention(q, seen[0:1], seen[1:2], scale=scale, mask=mask)[0]
            outputs.append(out.swapaxes(0, 1).reshape(length, heads * dim))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def gated(self, up_gate: Array, activation: str) -> Array:
        """In float32."""
        up, gate = mx.split(up_gate, 2, axis=1)
        return self._gates[activation](gate, up)

    def mixture(self, x: Array, experts: Experts[Array]) -> Array:
        """See `mlx_experts`."""
        weights, chosen = route(experts.router(x), experts.active, normalised=experts.normalised)
        return experts.bank(x, weights, chosen, self._gates["silu"])

    def take_rows(self, x: Array, rows: Sequence[int]) -> Array:
        """Some rows."""
        return x if len(rows) == x.shape[0] else x[mx.array(list(rows), dtype=mx.int32)]

    def fused_block(
        self, weights: BlockWeights[Array], shape: AttentionShape
    ) -> Callable[[Array, Array, Placement[Array]], Array] | None:
        """`decoder.block`, evaluated at once where a pass has many rows."""
        run = partial(block, self, weights, shape)

        def evaluating(x: Array, kv: Array, placement: Placement[Array]) -> Array:
            x = run(x, kv, placement)
            if x.shape[0] > EVALUATED_ROWS:
                mx.eval(x)
            return x

        return evaluating

    def takes_stored(self, dtype: str) -> bool:  # noqa: ARG002  - a matrix here is as quick with many rows
        """No: there is one form."""
        return False

    def prompt_block(
        self,
        weights: BlockWeights[Array],  # noqa: ARG002  - as above
        shape: AttentionShape,  # noqa: ARG002  - as above
    ) -> Callable[[Array, Array, Placement[Array]], Array] | None:
        """None."""
        return None

    def _masks(self, placement: Placement[Array], window: int) -> list[Array]:
        spans = placement.spans
        if placement.last_only:  # each sees all there is
            return [None] * (len(spans) // 3)
        if window not in placement.masks:
            placement.masks[window] = [
                self._mask(start, length, window) for start, length in zip(spans[1::3], spans[2::3], strict=True)
            ]
        return placement.masks[window]

    def _mask(self, start: int, length: int, window: int) -> Array:
        """None where one token sees all there is, the kernel's own rule where it is plainly causal, else a matrix."""
        end = start + length
        if length == 1:
            return None
        if not window or end <= window:
            return "causal"
        first = max(0, start + 1 - window)
        query = np.arange(start, end)[:, None]
        key = np.arange(first, end)
        return mx.array((key <= query) & (key > query - window))

    # In and out.

    def from_bytes(self, data: bytes, dtype: str, width: int) -> Array:
        """Rows of ``width``."""
        size = DTYPES[dtype].size
        bits = np.frombuffer(data, np.dtype(f"<u{size}")).reshape(-1, width)
        return mx.array(bits).view(DTYPES[dtype]).astype(self._dtype)

    def to_bytes(self, x: Array, dtype: str) -> bytes:
        """Row-major bytes; evaluates everything up to here."""
        return bytes(memoryview(mx.contiguous(x.astype(DTYPES[dtype])).view(mx.uint8)))

    def to_numpy(self, x: Array) -> npt.NDArray[np.float32]:
        """A float32 array of its own; evaluates everything up to here."""
        return np.array(x.astype(mx.float32), dtype=np.float32)
