"""`kafila.shard.ops.Ops` in torch: CPU, CUDA and MPS. No torch type leaves this file and its ``torch_`` neighbours.

16-bit weights on an x86 CPU (both ``bfloat16`` and ``float16``) are packed at half precision for FBGEMM and applied to
float32 activations. Half precision holds a bfloat16 weight exactly from 6e-5 to 65504 and to 3e-8 below that; a matrix
with anything larger is kept as bfloat16. On a CPU with AVX2 this reads weights at 13 to 16 GB/s a thread where torch's
bfloat16 ``linear`` manages 8 to 9, and multiplies a prompt nine times as fast (90 against 10 GFLOPS), as only CPUs
with AVX-512 or AMX have bfloat16 arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kafila.errors import DeviceError
from kafila.shard import torch_kernels as kernels
from kafila.shard import torch_prompts as prompts
from kafila.shard import torch_quantized as few_bits
from kafila.shard.formats import Affine
from kafila.shard.ops import (
    AttentionShape,
    Bank,
    BlockWeights,
    Divided,
    Experts,
    HostMatrix,
    HostTensor,
    Matrix,
    Mlp,
    Norm,
    Placement,
    QuantizedTensor,
    Table,
)
from kafila.shard.quantize import dequantize
from kafila.shard.torch_attention import attention
from kafila.shard.torch_experts import ExpertBank
from kafila.shard.torch_matrices import (
    MatrixMaker,
    PackedMatrix,
    StackedMatrix,
    on_host,
)
from kafila.types import Segment

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GELU = "gelu_pytorch_tanh"
_Extras = tuple[Tensor | None, Tensor | None, bool]
"""What fused blocks take besides: weights of the norms after attention and MLP, and whether the gate is a GELU."""
_NO_MASK = torch.empty(0, dtype=torch.bool)


class TorchOps:
    """Implements `Ops[Tensor]`. Make it on the thread that will use it: torch counts threads by caller."""

    def __init__(self, device: str, dtype: str, *, threads: int | None = None) -> None:
        """``device`` as torch names it (``cpu``, ``cuda:1``, ``mps``), or ``auto`` for the best there is.

        ``threads`` are a CPU's; None leaves them to torch. Raises DeviceError for a device that is not there.
        """
        self._device = _find_device(device)
        self._dtype_name = dtype
        self._dtype = _DTYPES[dtype]
        if threads is not None:
            torch.set_num_threads(threads)
        on_cpu = self._device.type == "cpu"
        self._packs = on_cpu and self._dtype is not torch.float32 and _can_pack()
        self._activations = torch.float32 if self._packs else self._dtype
        self._maker = MatrixMaker(
            self._device,
            self._dtype,
            packs=self._packs,
            int8=on_cpu and self._activations is torch.float32 and few_bits.can_pack_int8(),
            int4=on_cpu and self._dtype is not torch.float32 and few_bits.can_pack_int4(),
        )
        self._complex_rope = on_cpu and self._activations is torch.float32
        self._no_mask = _NO_MASK.to(self._device)

    @property
    def device(self) -> str:
        """For people."""
        if self._device.type == "cpu":
            threads = torch.get_num_threads()
            return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
        if self._device.type == "cuda":
            return f"{self._device} {torch.cuda.get_device_name(self._device)}"
        return str(self._device)

    @property
    def dtype(self) -> str:
        """What weights and caches are held in."""
        return self._dtype_name

    def scope(self) -> AbstractContextManager[object]:
        """No gradients, no version counters."""
        return torch.inference_mode()

    def memory_bytes(self) -> int | None:
        """Free device memory; None on a CPU, whose memory is the operating system's to count."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        if self._device.type == "mps":
            return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return None

    def matrix_bytes(self, outputs: int, inputs: int, stored: Affine | None = None) -> int:
        """Packed matrices are padded; those of most models fit without."""
        return self._maker.bytes(outputs, inputs, stored)

    def table_bytes(self, vocab: int, hidden: int) -> int:
        """Nothing on a CPU, see `table`."""
        return 0 if self._device.type == "cpu" else vocab * hidden * self._dtype.itemsize

    # Weights.

    def norm(self, weight: HostTensor, epsilon: float) -> Norm[Tensor]:
        """Constants in the form of `torch_kernels.rms_norm`."""
        width = weight.data.shape[-1]
        scaled = on_host(weight).to(self._device, torch.float32) * math.sqrt(width)
        return Norm(scaled, torch.tensor(math.sqrt(width * epsilon), device=self._device))

    def matrix(self, parts: Sequence[HostMatrix], biases: Sequence[HostTensor] | None) -> Matrix[Tensor]:
        """See `torch_matrices.MatrixMaker`, as of the three below."""
        return self._maker.matrix(parts, biases)

    def tied_matrix(self, table: Table) -> Matrix[Tensor]:
        """A packed copy on a CPU (of a mapped table: the only copy in memory), elsewhere the table itself."""
        return self._maker.tied_matrix(table)

    def divided_matrix(self, weight: HostMatrix, first: int) -> Divided[Tensor]:
        """Packed apart, or some of a matrix's rows."""
        return self._maker.divided_matrix(weight, first)

    def divided_tied_matrix(self, table: Table, first: int) -> Divided[Tensor]:
        """Likewise."""
        return self._maker.divided_tied_matrix(table, first)

    def expert_bank(self, experts: Iterable[tuple[Sequence[HostMatrix], HostMatrix]], count: int) -> Bank:  # noqa: ARG002  - others make room for so many first
        """Each expert's matrices by themselves."""
        return ExpertBank([(self.matrix(up_gate, None), self.matrix([down], None)) for up_gate, down in experts])

    def table(self, weight: HostMatrix) -> Table:
        """On a CPU the very memory it is given, which may be a mapped file: an embedding reads one row a token."""
        if isinstance(weight, QuantizedTensor):
            on_cpu = self._device.type == "cpu"
            return weight if on_cpu else few_bits.CodesMatrix(weight, None, self._device, self._dtype)
        table = on_host(weight)
        return table if self._device.type == "cpu" else table.to(self._device, self._dtype)

    def rope(self, frequencies: Sequence[float], context: int) -> Tensor:
        """(context, pairs) complex, or (context, 2, pairs) of cosines and sines; see `torch_attention.rotate`.

        The angle is a float32 product as in the reference implementations, so that far positions round alike.
        """
        positions = torch.arange(context, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(frequencies, dtype=torch.float32))
        if self._complex_rope:
            return torch.polar(torch.ones_like(angles), angles)
        return torch.stack((angles.cos(), angles.sin()), 1).to(self._device)

    def kv_storage(self, slots: int, context: int, kv_heads: int, head_dim: int, dtype: str = "") -> Tensor:
        """(slots, 2, kv_heads, context, head_dim) zeros: written, so that the memory is taken now and not later."""
        kind = _DTYPES[dtype or self._dtype_name]
        return torch.zeros(slots, 2, kv_heads, context, head_dim, dtype=kind, device=self._device).fill_(0)

    # Arithmetic.

    def place(self, segments: Sequence[Segment], rope: Tensor) -> Placement[Tensor]:
        """Prepare a batch."""
        spans = [value for segment in segments for value in (segment.slot, segment.start, segment.length)]
        turns = [rope.narrow(0, segment.start, segment.length) for segment in segments]
        return Placement(spans, turns[0] if len(turns) == 1 else torch.cat(turns))

    def embed(self, table: Table, tokens: Sequence[int]) -> Tensor:
        """Rows of the table as activations."""
        if isinstance(table, QuantizedTensor):
            return torch.from_numpy(dequantize(table.rows(list(tokens)))).to(self._activations)
        if isinstance(table, few_bits.CodesMatrix):
            return table.rows(torch.tensor(tokens, dtype=torch.int64, device=self._device)).to(self._activations)
        index = torch.tensor(tokens, dtype=torch.int64, device=table.device)
        rows: Tensor = table.index_select(0, index)
        return rows.to(self._activations)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, in x's memory."""
        return x.add_(y)

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """In x's memory."""
        return x.mul_(torch.tensor(factor, dtype=self._dtype))

    def capped(self, x: Tensor, cap: float) -> Tensor:
        """In x's memory where that is float32."""
        return x.float().div_(cap).tanh_().mul_(cap)

    def rms_norm(self, x: Tensor, norm: Norm[Tensor]) -> Tensor:
        """See `torch_kernels.rms_norm`."""
        return kernels.rms_norm(x, norm.weight, norm.epsilon)

    def attention(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        qk_norm: Norm[Tensor] | None,
        kv: Tensor,
        placement: Placement[Tensor],
    ) -> Tensor:
        """See `torch_attention`."""
        weight, floor = (None, self._no_mask) if qk_norm is None else (qk_norm.weight, qk_norm.epsilon)
        masks = self._masks(placement, shape.window)
        return attention(
            qkv, weight, floor, kv, placement.rope, placement.spans, masks,
            shape.heads, shape.kv_heads, shape.window, shape.scale, shape.cap,
        )  # fmt: skip

    def gated(self, up_gate: Tensor, activation: str) -> Tensor:
        """See `torch_kernels.gated`."""
        return kernels.gated(up_gate, activation == _GELU)

    def mixture(self, x: Tensor, experts: Experts[Tensor]) -> Tensor:
        """See `torch_experts`."""
        weights, chosen = kernels.route(experts.router(x), experts.active, experts.normalised)
        return experts.bank(x, weights, chosen)  # type: ignore[no-any-return]  # a bank is opaque to `Ops`

    def take_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows."""
        return x if len(rows) == x.size(0) else x[list(rows)]

    def fused_block(
        self, weights: BlockWeights[Tensor], shape: AttentionShape
    ) -> Callable[[Tensor, Tensor, Placement[Tensor]], Tensor] | None:
        """`torch_kernels.packed_block` or ``few_bits_block`` with everything bound, if all four matrices are of a kind
        that one of them takes."""
        if isinstance(weights.mlp, Experts):
            return None
        matrices = (weights.qkv, weights.o, weights.mlp.up_gate, weights.mlp.down)
        stacked_qkv = weights.qkv.parts if isinstance(weights.qkv, StackedMatrix) else (weights.qkv,)
        if few := few_bits.parts_of((*stacked_qkv, *matrices[1:])):
            return self._few_bits_block(weights, shape, few, _extras(weights, weights.mlp))
        qkv, o, up_gate, down = (m.packed if isinstance(m, PackedMatrix) else None for m in matrices)
        if any(packed is None for packed in (qkv, o, up_gate, down)):
            return None
        first, second = weights.attention_norm, weights.mlp_norm
        extra = _extras(weights, weights.mlp)
        qk_weight, qk_floor = self._qk(weights)
        heads, kv_heads, window, scale, cap = shape.heads, shape.kv_heads, shape.window, shape.scale, shape.cap
        run, masks_of = kernels.packed_block, self._masks

        def block(x: Tensor, kv: Tensor, placement: Placement[Tensor]) -> Tensor:
            masks = placement.masks.get(window) or masks_of(placement, window)
            return run(
                x, first.weight, first.epsilon, qkv, qk_weight, qk_floor, o, second.weight, second.epsilon,
                up_gate, down, *extra, kv, placement.rope, placement.spans, masks, heads, kv_heads, window, scale, cap,
            )  # fmt: skip

        return block

    def takes_stored(self, dtype: str) -> bool:
        """Bfloat16, where matrices are packed and the processor multiplies it by itself."""
        return dtype == "BF16" and self._dtype is torch.bfloat16 and self._packs and prompts.multiplies_bfloat16()

    def prompt_block(
        self, weights: BlockWeights[Tensor], shape: AttentionShape
    ) -> Callable[[Tensor, Tensor, Placement[Tensor]], Tensor] | None:
        """`torch_prompts.prompt_block` with everything bound."""
        if weights.stored is None or isinstance(weights.mlp, Experts):
            return None
        matrices, biases = prompts.stored_tensors(weights.stored)
        first, second = weights.attention_norm, weights.mlp_norm
        extra = _extras(weights, weights.mlp)
        qk_weight, qk_floor = self._qk(weights)
        heads, kv_heads, window, scale, cap = shape.heads, shape.kv_heads, shape.window, shape.scale, shape.cap
        run, masks_of = prompts.prompt_block, self._masks

        def block(x: Tensor, kv: Tensor, placement: Placement[Tensor]) -> Tensor:
            return run(
                x, first.weight, first.epsilon, qk_weight, qk_floor, second.weight, second.epsilon, matrices, biases,
                *extra, kv, placement.rope, placement.spans, masks_of(placement, window),
                heads, kv_heads, window, scale, cap,
            )  # fmt: skip

        return block

    def _few_bits_block(
        self, weights: BlockWeights[Tensor], shape: AttentionShape, parts: few_bits.Parts, extra: _Extras
    ) -> Callable[[Tensor, Tensor, Placement[Tensor]], Tensor]:
        first, second = weights.attention_norm, weights.mlp_norm
        qk_weight, qk_floor = self._qk(weights)
        heads, kv_heads, window, scale, cap = shape.heads, shape.kv_heads, shape.window, shape.scale, shape.cap
        run, masks_of = kernels.few_bits_block, self._masks

        def block(x: Tensor, kv: Tensor, placement: Placement[Tensor]) -> Tensor:
            masks = placement.masks.get(window) or masks_of(placement, window)
            return run(
                x, first.weight, first.epsilon, qk_weight, qk_floor, second.weight, second.epsilon,
                *parts, *extra, kv, placement.rope, placement.spans, masks, heads, kv_heads, window, scale, cap,
            )  # fmt: skip

        return block

    def _qk(self, weights: BlockWeights[Tensor]) -> tuple[Tensor | None, Tensor]:
        """Of the norm of q and k: its weight, or None, and its floor."""
        norm = weights.qk_norm
        return (None, self._no_mask) if norm is None else (norm.weight, norm.epsilon)

    def _masks(self, placement: Placement[Tensor], window: int) -> list[Tensor]:
        if placement.last_only:
            return []
        if window not in placement.masks:
            spans = placement.spans
            placement.masks[window] = [
                self._mask(start, length, window) for start, length in zip(spans[1::3], spans[2::3], strict=True)
            ]
        return placement.masks[window]

    def _mask(self, start: int, length: int, window: int) -> Tensor:
        """(length, seen): 0 where a row sees, else minus infinity. Empty where one token sees all there is or a first
        chunk is plainly causal."""
        end = start + length
        if length == 1 or (start == 0 and (not window or end <= window)):
            return self._no_mask
        first = max(0, start + 1 - window) if window else 0
        query = torch.arange(start, end, device=self._device).unsqueeze(1)
        key = torch.arange(first, end, device=self._device)
        seen = key <= query
        if window:
            seen &= key > query - window
        # In the form in which torch's kernel for CPUs wants it: it would make one for every block.
        return torch.zeros(seen.shape, dtype=self._activations, device=self._device).masked_fill_(~seen, -math.inf)

    # In and out.

    def from_bytes(self, data: bytes, dtype: str, width: int) -> Tensor:
        """Rows of ``width``, copied: activations are written to."""
        rows = torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).view(-1, width)
        return rows.to(self._device, self._activations)

    def to_bytes(self, x: Tensor, dtype: str) -> bytes:
        """Row-major bytes."""
        return x.to("cpu", _DTYPES[dtype]).contiguous().view(torch.uint8).numpy().tobytes()

    def to_numpy(self, x: Tensor) -> npt.NDArray[np.float32]:
        """A float32 array."""
        result: npt.NDArray[np.float32] = x.to("cpu", torch.float32).numpy()
        return result


def _extras(weights: BlockWeights[Tensor], mlp: Mlp[Tensor]) -> _Extras:
    weights_after = [None if norm is None else norm.weight for norm in (weights.attended_norm, weights.mlp_out_norm)]
    return weights_after[0], weights_after[1], mlp.activation == _GELU


def _find_device(name: str) -> torch.device:
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    found = [kind for kind, present in there.items() if present]
    try:
        device = torch.device(found[0] if name == "auto" else name)
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is no device: --device takes auto, cpu, cuda, cuda:1, mps or mlx") from error
    if device.type not in found or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        built = torch.version.cuda is not None or torch.version.hip is not None
        advice = ", or install a torch that was built for CUDA" if device.type == "cuda" and not built else ""
        raise DeviceError(f"torch has no device {device} here; it has {', '.join(found)}: choose with --device{advice}")
    return device


def _can_pack() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_prepack_fp16"
    )
