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
from typing import Final, List, Optional

import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it
from torch import Tensor

from kafila.shard.ops import StoredBlock
from kafila.shard.torch_attention import attending, attention
from kafila.shard.torch_kernels import normed, rms_norm
from kafila.shard.torch_matrices import on_host
from kafila.shard.torch_script import compiled

UNIT_ROWS: Final[int] = 64
"""oneDNN keeps what it compiles for every number of rows and shape of matrix, half a megabyte each and a thousand of
them. Prompts may end after any number, so rows are made up to multiples of this: all that there are take 25 MB, where
they took 900."""


def multiplies_bfloat16() -> bool:
    """Whether the processor does, and torch knows how to ask it."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        known = capabilities()
        native = bool(known.get("avx512_bf16") or known.get("amx_bf16"))
    else:  # older versions
        older = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        native = older is not None and bool(older())
    return native and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch's own omission


def stored_tensors(stored: StoredBlock) -> tuple[List[Tensor], List[Optional[Tensor]]]:
    """Weights in the same memory, which nothing writes to, and biases in their dtype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*not writable.*", category=UserWarning)
        weights = [on_host(weight) for weight in stored.weights]
    biases = [None if bias is None else on_host(bias).to(weights[0].dtype) for bias in stored.biases]
    return weights, biases


@compiled
def padded_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], unit: int = UNIT_ROWS) -> Tensor:
    """``x`` (rows, inputs) through a matrix (outputs, inputs) of its dtype, in a multiple of ``unit`` rows."""
    rows = x.size(0)
    missing = (unit - rows % unit) % unit
    if missing == 0:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, [0, 0, 0, missing]), weight, bias).narrow(0, 0, rows)


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
    y = padded_linear(y, weights[0], biases[0]).float()
    y = attention(y, qk_weight, qk_floor, kv, rope, spans, masks, heads, kv_heads, window, scale, cap).to(dtype)
    y = normed(padded_linear(y, weights[1], biases[1]), attended_weight, attention_floor)
    x = attending(x, spans, masks).add_(y)
    y = rms_norm(x, mlp_weight, mlp_floor).to(dtype)
    up, gate = padded_linear(y, weights[2], biases[2]), padded_linear(y, weights[3], biases[3])
    y = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    y = padded_linear(y.mul_(up), weights[4], biases[4])
    return x.add_(normed(y, mlp_out_weight, mlp_floor))
