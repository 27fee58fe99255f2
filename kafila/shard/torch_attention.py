"""Attention over a ragged batch in torch, compiled by TorchScript where that exists (see `torch_script`)."""

# ruff: noqa: UP006, UP035, UP045  - TorchScript knows only these spellings
import math
from typing import Final, List, Optional

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard.torch_script import compiled

MASKED_ROWS: Final[int] = 256
"""Rows that attend at once where a mask says to what; of fewer, several threads have too little each."""


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
            by_head = scores.view(kv_heads, heads // kv_heads, rows, seen)
            if mask.numel() > 0:
                by_head.add_(mask.narrow(0, first, rows))
            else:
                sees = torch.ones(rows, seen, dtype=torch.bool, device=q.device).tril(first)
                by_head.masked_fill_(sees.logical_not(), float("-inf"))
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
def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Optional[float], cap: float, at_once: int = MASKED_ROWS
) -> Tensor:
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
    if mask.numel() > 0 and length > at_once and q.is_cpu:
        # torch's kernel for CPUs multiplies what a mask hides as well: what no row of a piece sees is left out.
        outputs: List[Tensor] = []
        for first in range(0, length, at_once):
            rows = min(at_once, length - first)
            seen = k.size(2) - length + first + rows
            mine, sees = by_head.narrow(2, first, rows), mask.narrow(0, first, rows).narrow(1, 0, seen)
            keys, values = k.narrow(2, 0, seen), v.narrow(2, 0, seen)
            out = F.scaled_dot_product_attention(mine, keys, values, attn_mask=sees, scale=scale, enable_gqa=True)
            outputs.append(out.squeeze(0).transpose(0, 1).reshape(rows, heads * dim))
        return torch.cat(outputs)
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
    entry a segment, empty where position alone decides. No masks at all: only each segment's last row attends.
    ``window`` 0 is none, as ``cap`` 0 is.
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
    last_only = len(masks) == 0
    for index in range(len(spans) // 3):
        slot, start, length = spans[3 * index], spans[3 * index + 1], spans[3 * index + 2]
        end = start + length
        mine = rows.narrow(0, row, length)
        row += length
        cache = kv.select(0, slot)
        new = mine.narrow(1, heads, 2 * kv_heads).view(length, 2, kv_heads, dim)
        cache.narrow(2, start, length).copy_(new.permute(1, 2, 0, 3))
        mask = qkv  # one row needs none
        if last_only:
            mine, start, length = mine.narrow(0, length - 1, 1), end - 1, 1
        else:
            mask = masks[index]
        first = max(0, start + 1 - window) if window > 0 else 0
        seen = cache.narrow(2, first, end - first).to(qkv.dtype)
        k, v = seen.narrow(0, 0, 1), seen.narrow(0, 1, 1)
        q = mine.narrow(1, 0, heads)
        outputs.append(segment_attention(q, k, v, mask, scale, cap))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@compiled
def attending(x: Tensor, spans: List[int], masks: List[Tensor]) -> Tensor:
    """The rows of ``x`` that `attention` has outputs for."""
    if len(masks) > 0:
        return x
    rows: List[Tensor] = []
    end = 0
    for length in spans[2::3]:
        end += length
        rows.append(x.narrow(0, end - 1, 1))
    return torch.cat(rows)
