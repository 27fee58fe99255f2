"""The decoder's inner arithmetic in torch, compiled by TorchScript where that exists.

Between two matrices a token needs some twenty tiny operations. While weights stream through the caches each costs
about 5 us when called from Python (the interpreter and the dispatcher have been evicted since the last one) and 2 us
from TorchScript, and a call of a packed matrix 30 against 9; for SmolLM2 on one thread that is 23 ms against 18.5 a
token. torch calls TorchScript deprecated and names ``torch.compile`` its successor, which needs a C++ compiler on the
user's machine and minutes at start. So these are ordinary functions: where torch no longer scripts them they run as
they stand, with the same numbers.

No ``from __future__ import annotations`` here: TorchScript reads the annotations. And no ``type: ignore`` within a
compiled function: TorchScript takes it for a signature.
"""

# ruff: noqa: UP006, UP035, UP045  - TorchScript knows only these spellings
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, List, Optional, Tuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard.workspace import INT8_ROWS

if TYPE_CHECKING:
    PackedWeight = Any  # a C++ class that torch registers at run time
else:
    PackedWeight = torch.classes.quantized.LinearPackedParamsBase

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """``function`` as TorchScript, or itself where torch cannot."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*", category=FutureWarning)
        try:
            return torch.jit.script(function)  # type: ignore[no-any-return,no-untyped-call,attr-defined,unused-ignore]  # untyped in some versions
        except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError):
            return function


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
def rotate(heads: Tensor, rope: Tensor) -> None:
    """Turn pairs of ``heads`` (rows, heads, head_dim) in place by ``rope``.

    ``rope`` is complex (rows, pairs) where the heads are float32 on a CPU: one multiplication. Elsewhere it holds
    cosines and sines, (rows, 2, pairs), as not every device multiplies complex numbers.
    """
    pairs = heads.view(heads.size(0), heads.size(1), -1, 2)
    if rope.is_complex():
        torch.view_as_complex(pairs).mul_(rope.unsqueeze(1))
    else:
        even, odd = pairs.float().unbind(-1)
        cos, sin = rope.unsqueeze(2).unbind(1)
        pairs.copy_(torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1))


@compiled
def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """Attention whose scores s become cap * tanh(s / cap): (length, heads * head_dim).

    ``q`` is (length, heads, head_dim), ``k`` and ``v`` are (1, kv_heads, seen, head_dim); an empty ``mask``: as the
    first rows of a conversation see one another. Some rows at a time, so that scores take a bounded room.
    """
    length, heads, dim = q.size(0), q.size(1), q.size(2)
    kv_heads, seen = k.size(1), k.size(2)
    outputs: List[Tensor] = []
    for first in range(0, length, 64):
        rows = min(64, length - first)
        mine = q.narrow(0, first, rows).transpose(0, 1).reshape(kv_heads, heads // kv_heads * rows, dim)
        scores = torch.matmul(mine, k[0].transpose(1, 2)).float().mul_(scale / cap).tanh_().mul_(cap)
        if length > 1:
            if mask.numel() > 0:
                sees = mask.narrow(0, first, rows)
            else:
                sees = torch.ones(rows, seen, dtype=torch.bool, device=q.device).tril(first)
            scores.view(kv_heads, heads // kv_heads, rows, seen).masked_fill_(sees.logical_not(), float("-inf"))
        out = torch.matmul(scores.softmax(-1).to(q.dtype), v[0])
        outputs.append(out.view(heads, rows, dim).transpose(0, 1).reshape(rows, heads * dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@compiled
def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Optional[float]) -> Tensor:
    """The heads that share a key become that key's rows, so that no key is read twice: `segment_attention` of few rows.

    One row needs no ``mask``; more than one do.
    """
    length, heads, dim = q.size(0), q.size(1), q.size(2)
    kv_heads = k.size(1)
    share = heads // kv_heads
    if length == 1:
        by_key = q.view(1, kv_heads, share, dim)
        return F.scaled_dot_product_attention(by_key, k, v, scale=scale).reshape(1, heads * dim)
    by_key = q.view(length, kv_heads, share, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, share * length, dim)
    out = F.scaled_dot_product_attention(by_key, k, v, attn_mask=mask.repeat(share, 1), scale=scale)
    return out.view(kv_heads, share, length, dim).permute(2, 0, 1, 3).reshape(length, heads * dim)


@compiled
def segment_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Optional[float], cap: float) -> Tensor:
    """One segment's attention: (length, heads * head_dim).

    ``q`` is (length, heads, head_dim), ``k`` and ``v`` are (1, kv_heads, seen, head_dim); an empty ``mask``: as the
    first rows of a conversation see one another, or one row all that came before.
    """
    length, heads, dim = q.size(0), q.size(1), q.size(2)
    if cap > 0.0:
        return capped_attention(q, k, v, mask, 1.0 / math.sqrt(dim) if scale is None else scale, cap)
    # A few rows far into a conversation ride beside others' answers: reading keys once counts most there too. From some
    # eight rows on the arithmetic outweighs it.
    if length == 1 or (length <= 8 and mask.numel() > 0):
        return grouped_attention(q, k, v, mask, scale)
    by_head = q.transpose(0, 1).unsqueeze(0)
    if mask.numel() > 0:
        out = F.scaled_dot_product_attention(by_head, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(by_head, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).reshape(length, heads * dim)


@compiled
def attention(
    qkv: Tensor,
    qk_weight: Optional[Tensor],
    qk_floor: Tensor,
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
    """One block's attention over a ragged batch; see `kafila.shard.ops.Ops.attention`.

    ``kv`` is (slots, 2, kv_heads, context, head_dim) in any float dtype and is read as ``qkv``'s. ``masks`` has one
    entry a segment, empty where position alone decides. ``window`` 0 is none, as ``cap`` 0 is.
    """
    dim = kv.size(4)
    rows = qkv.view(qkv.size(0), heads + 2 * kv_heads, dim)
    to_turn = rows.narrow(1, 0, heads + kv_heads)
    if qk_weight is not None:
        length = torch.linalg.vector_norm(to_turn, 2.0, [-1], True, dtype=torch.float32)
        to_turn.div_(torch.hypot(length, qk_floor)).mul_(qk_weight)
    rotate(to_turn, rope)
    outputs: List[Tensor] = []
    row = 0
    for index in range(len(masks)):
        slot, start, length = spans[3 * index], spans[3 * index + 1], spans[3 * index + 2]
        end = start + length
        mine = rows.narrow(0, row, length)
        row += length
        cache = kv.select(0, slot)
        new = mine.narrow(1, heads, 2 * kv_heads).view(length, 2, kv_heads, dim)
        cache.narrow(2, start, length).copy_(new.permute(1, 2, 0, 3))
        first = max(0, start + 1 - window) if window > 0 else 0
        seen = cache.narrow(2, first, end - first).to(qkv.dtype)
        k, v = seen.narrow(0, 0, 1), seen.narrow(0, 1, 1)
        q = mine.narrow(1, 0, heads)
        outputs.append(segment_attention(q, k, v, masks[index], scale, cap))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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
    x.add_(normed(packed_linear(y, o), attended_weight, attention_floor))
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
    x.add_(normed(few_bits_linear(y, o, packed, planes, groups, biases), attended_weight, attention_floor))
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
