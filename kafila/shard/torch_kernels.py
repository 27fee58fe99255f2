"""The decoder's inner arithmetic in torch, compiled by TorchScript where that exists (see `torch_script`)."""

# ruff: noqa: UP006, UP035, UP045  - TorchScript knows only these spellings
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard.torch_attention import attending, attention
from kafila.shard.torch_script import compiled
from kafila.shard.workspace import INT8_ROWS

if TYPE_CHECKING:
    PackedWeight = Any  # a C++ class that torch registers at run time
else:
    PackedWeight = torch.classes.quantized.LinearPackedParamsBase


@compiled
def packed_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x`` (rows, inputs) float32 through a matrix packed at half precision; its bias is inside."""
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, weight)
    return y


@compiled
def int8_rows(x: Tensor, weight: PackedWeight) -> Tensor:
    """`int8_linear` of as many rows as are applied at once, without a bias."""
    rows = x.size(0)
    unit = torch.linalg.vector_norm(x, float("inf"), [-1], True).clamp_min_(1e-30).div_(63.0)
    scaled = x.div(unit)
    coarse = scaled.round()
    both = torch.cat([coarse, scaled.sub_(coarse).mul_(126.0)])
    sums: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(both, 1.0, 64, weight)
    return torch.add(sums.narrow(0, 0, rows), sums.narrow(0, rows, rows), alpha=1.0 / 126.0).mul_(unit)


@compiled
def int8_linear(x: Tensor, weight: PackedWeight, bias: Optional[Tensor], at_once: int = INT8_ROWS) -> Tensor:
    """``x`` (rows, inputs) float32 through a matrix of 8 bits whose outputs have one scale each.

    A row is scaled to 63, its whole numbers are one row for the kernel and what is left, times 126, another: both lie
    in 7 bits about the zero point 64. The weights are read once for both.

    Of an output the kernel takes four times the room of the number that comes of it, so that a prompt's rows go through
    ``at_once`` at a time: every row's numbers are the same whatever is beside it.
    """
    rows = x.size(0)
    y = x
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        part = int8_rows(x if count == rows else x.narrow(0, first, count), weight)
        if count == rows:
            y = part
        else:
            if first == 0:
                y = part.new_empty([rows, part.size(1)])
            y.narrow(0, first, count).copy_(part)
    return y if bias is None else y.add_(bias)


@compiled
def int4_linear(x: Tensor, planes: List[Tensor], group: int, bias: Optional[Tensor]) -> Tensor:
    """``x`` (rows, inputs) through the sum of some matrices of 4 bits; the kernel's activations are bfloat16.

    ``planes`` alternates packed codes and (groups, outputs, 2) of scales and zero points.
    """
    rows = x.to(torch.bfloat16)
    y = torch._weight_int4pack_mm_for_cpu(rows, planes[0], group, planes[1]).float()
    if len(planes) > 2:
        y.add_(torch._weight_int4pack_mm_for_cpu(rows, planes[2], group, planes[3]))
    if bias is not None:
        y.add_(bias)
    return y.to(x.dtype)


@compiled
def rms_norm(x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * w, given ``weight`` = w sqrt(width) and ``floor`` = sqrt(width epsilon).

    torch's own rms_norm takes 15 us a row on a CPU, being six operations; this is four, 6 us. Statistics in float32.
    """
    length = torch.linalg.vector_norm(x, 2.0, [-1], True, dtype=torch.float32)
    return x.div(torch.hypot(length, floor)).mul_(weight).to(x.dtype)


@compiled
def silu_gate(up_gate: Tensor) -> Tensor:
    """(rows, 2n) of up and gate to up * gate * sigmoid(gate); glu is up * sigmoid(gate) in one operation."""
    width = up_gate.size(1) // 2
    return F.glu(up_gate, 1).mul_(up_gate.narrow(1, width, width))


@compiled
def gelu_gate(up_gate: Tensor) -> Tensor:
    """(rows, 2n) of up and gate to up * gelu(gate), by GELU's approximation with tanh."""
    width = up_gate.size(1) // 2
    return F.gelu(up_gate.narrow(1, width, width), approximate="tanh").mul_(up_gate.narrow(1, 0, width))


@compiled
def gated(up_gate: Tensor, gelu: bool) -> Tensor:
    """`gelu_gate` or `silu_gate`."""
    return gelu_gate(up_gate) if gelu else silu_gate(up_gate)


@compiled
def normed(x: Tensor, weight: Optional[Tensor], floor: Tensor) -> Tensor:
    """`rms_norm` where there is a weight."""
    return x if weight is None else rms_norm(x, weight, floor)


@compiled
def packed_block(
    x: Tensor,
    attention_weight: Tensor,
    attention_floor: Tensor,
    qkv: PackedWeight,
    qk_weight: Optional[Tensor],
    qk_floor: Tensor,
    o: PackedWeight,
    mlp_weight: Tensor,
    mlp_floor: Tensor,
    up_gate: PackedWeight,
    down: PackedWeight,
    attended_weight: Optional[Tensor],
    mlp_out_weight: Optional[Tensor],
    gelu: bool,
    kv: Tensor,
    rope: Tensor,
    spans: List[int],
    masks: List[Tensor],
    heads: int,
    kv_heads: int,
    window: int,
    scale: Optional[float],
    cap: float,
) -> Tensor:
    """`kafila.shard.decoder.block` over packed matrices, without leaving TorchScript. ``x`` is reused.

    Its norms are all over rows of one width, so that those after attention and MLP share the others' floors.
    """
    y = packed_linear(rms_norm(x, attention_weight, attention_floor), qkv)
    y = attention(y, qk_weight, qk_floor, kv, rope, spans, masks, heads, kv_heads, window, scale, cap)
    x = attending(x, spans, masks).add_(normed(packed_linear(y, o), attended_weight, attention_floor))
    y = packed_linear(rms_norm(x, mlp_weight, mlp_floor), up_gate)
    return x.add_(normed(packed_linear(gated(y, gelu), down), mlp_out_weight, mlp_floor))


@compiled
def few_bits_linear(
    x: Tensor,
    index: int,
    packed: List[Optional[PackedWeight]],
    planes: List[List[Tensor]],
    groups: List[int],
    biases: List[Optional[Tensor]],
) -> Tensor:
    """`int8_linear` or `int4_linear`, by what there is at ``index``."""
    weight = packed[index]
    if weight is not None:
        return int8_linear(x, weight, biases[index])
    return int4_linear(x, planes[index], groups[index], biases[index])


@compiled
def few_bits_block(
    x: Tensor,
    attention_weight: Tensor,
    attention_floor: Tensor,
    qk_weight: Optional[Tensor],
    qk_floor: Tensor,
    mlp_weight: Tensor,
    mlp_floor: Tensor,
    packed: List[Optional[PackedWeight]],
    planes: List[List[Tensor]],
    groups: List[int],
    biases: List[Optional[Tensor]],
    attended_weight: Optional[Tensor],
    mlp_out_weight: Optional[Tensor],
    gelu: bool,
    kv: Tensor,
    rope: Tensor,
    spans: List[int],
    masks: List[Tensor],
    heads: int,
    kv_heads: int,
    window: int,
    scale: Optional[float],
    cap: float,
) -> Tensor:
    """`packed_block` over matrices in few bits, in the order qkv, o, up_gate, down. ``x`` is reused.

    Whatever is there before the last three is qkv's, several that differ in their bits.
    """
    o = len(groups) - 3
    y = rms_norm(x, attention_weight, attention_floor)
    qkv = [few_bits_linear(y, index, packed, planes, groups, biases) for index in range(o)]
    y = qkv[0] if o == 1 else torch.cat(qkv, 1)
    y = attention(y, qk_weight, qk_floor, kv, rope, spans, masks, heads, kv_heads, window, scale, cap)
    y = few_bits_linear(y, o, packed, planes, groups, biases)
    x = attending(x, spans, masks).add_(normed(y, attended_weight, attention_floor))
    y = few_bits_linear(rms_norm(x, mlp_weight, mlp_floor), o + 1, packed, planes, groups, biases)
    y = few_bits_linear(gated(y, gelu), o + 2, packed, planes, groups, biases)
    return x.add_(normed(y, mlp_out_weight, mlp_floor))


@compiled
def route(logits: Tensor, active: int, normalised: bool) -> Tuple[Tensor, Tensor]:
    """The ``active`` most probable experts of each row of ``logits``: their weights in float32, and which they are."""
    weights, chosen = torch.topk(torch.softmax(logits, -1, torch.float32), active)
    return (weights / weights.sum(-1, True) if normalised else weights), chosen


@compiled
def packed_experts(x: Tensor, weights: Tensor, up_gates: List[PackedWeight], downs: List[PackedWeight]) -> Tensor:
    """One row through some experts, their outputs added up by ``weights`` (1, experts)."""
    outputs = [packed_linear(silu_gate(packed_linear(x, up_gates[index])), downs[index]) for index in range(len(downs))]
    return weights @ torch.cat(outputs)


@compiled
def few_bits_experts(
    x: Tensor,
    weights: Tensor,
    packed: List[Optional[PackedWeight]],
    planes: List[List[Tensor]],
    groups: List[int],
    biases: List[Optional[Tensor]],
) -> Tensor:
    """`packed_experts` over matrices in few bits, each expert's up_gate followed by its down."""
    outputs: List[Tensor] = []
    for index in range(0, len(groups), 2):
        y = silu_gate(few_bits_linear(x, index, packed, planes, groups, biases))
        outputs.append(few_bits_linear(y, index + 1, packed, planes, groups, biases))
    return weights @ torch.cat(outputs)
