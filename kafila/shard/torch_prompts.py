"""A prompt's many rows through a block's matrices as they lie in the checkpoint's file.

FBGEMM's packed matrices, which a token goes through (`torch_ops`), are applied in float32. A processor that multiplies
bfloat16 by itself does a long chunk in half that time, from weights as the checkpoint stores them. To hold them in both
forms would take twice the memory; but the file is there, and what was just read of it is in the operating system's
cache, which gives it back to whoever needs memory more. So the file is mapped, and nothing is held twice.

What is multiplied is rounded to bfloat16, as it is in the reference implementations; sums, norms and attention stay
float32.

No ``from __future__ import annotations`` here, and other rules besides: see `torch_script`.
"""

# ruff: noqa: UP006, UP035, UP045  - TorchScript knows only these spellings
import warnings
from typing import List, Optional

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard.ops import StoredBlock
from kafila.shard.torch_attention import attending, attention
from kafila.shard.torch_kernels import normed, rms_norm
from kafila.shard.torch_matrices import on_host
from kafila.shard.torch_script import compiled


def multiplies_bfloat16() -> bool:
    """Whether the processor does, and torch knows how to ask it."""
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every version
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's own omission
    return bool(has_onednn and (known.get("avx512_bf16") or known.get("amx_bf16")))


def stored_tensors(stored: StoredBlock) -> tuple[List[Tensor], List[Optional[Tensor]]]:
    """Weights in the same memory, which nothing writes to, and biases in their dtype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*not writable.*", category=UserWarning)
        weights = [on_host(weight) for weight in stored.weights]
    biases = [None if bias is None else on_host(bias).to(weights[0].dtype) for bias in stored.biases]
    return weights, biases


@compiled
def prompt_block(
    x: Tensor,
    attention_weight: Tensor,
    attention_floor: Tensor,
    qk_weight: Optional[Tensor],
    qk_floor: Tensor,
    mlp_weight: Tensor,
    mlp_floor: Tensor,
    weights: List[Tensor],
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
    """`torch_kernels.packed_block` over matrices in their own dtype, as they are stored. ``x`` (float32) is reused.

    ``weights`` are those of qkv, o, up, gate and down, each (outputs, inputs).
    """
    dtype = weights[0].dtype
    y = rms_norm(x, attention_weight, attention_floor).to(dtype)
    y = F.linear(y, weights[0], biases[0]).float()
    y = attention(y, qk_weight, qk_floor, kv, rope, spans, masks, heads, kv_heads, window, scale, cap).to(dtype)
    y = normed(F.linear(y, weights[1], biases[1]), attended_weight, attention_floor)
    x = attending(x, spans, masks).add_(y)
    y = rms_norm(x, mlp_weight, mlp_floor).to(dtype)
    up, gate = F.linear(y, weights[2], biases[2]), F.linear(y, weights[3], biases[3])
    y = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    y = F.linear(y.mul_(up), weights[4], biases[4])
    return x.add_(normed(y, mlp_out_weight, mlp_floor))
