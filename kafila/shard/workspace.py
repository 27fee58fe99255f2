"""What a share of a model takes of a device's memory besides what its numbers take in a file.

Weights are padded by some devices, loading needs room for the matrix on its way in, a pass for its activations. All of
it is known from the model's shapes, so that a plan admits what a member will really hold.
"""

from __future__ import annotations

from math import prod
from typing import TypeVar

from kafila.shard.config import DecoderConfig
from kafila.shard.formats import Affine
from kafila.shard.manifest import EMBEDDING, UNEMBEDDING, block_tensors, mlp_weight, weight_format
from kafila.shard.ops import Ops

T = TypeVar("T")

PASS_ROWS = 512
"""Rows of the largest pass besides one a slot: the longest chunk of a prompt (``kafila.ring.pace.CHUNKS``)."""
LOADED_AT_ONCE = 1 << 26
"""Weights of a matrix that are converted at once, at most (``torch_ops``)."""
UNPACKED_AT_ONCE = (1 << 21, 1 << 23)
"""Weights in few bits that are unpacked at a time, on a CPU and elsewhere (``torch_quantized``)."""
CAPPED_ROWS = 64
"""Rows whose attention scores are in memory at once where scores are capped (``torch_attention``, ``mlx_ops``)."""
INT8_ROWS = 128
"""Rows that go through a matrix of 8 bits at once (``torch_kernels.int8_linear``): a quarter of the longest chunk, for
a quarter of its room and a twelfth of its speed."""
LIBRARY_BYTES = 52 << 20
"""What using a tensor library takes of main memory besides: its code as it is paged in (10 MB of torch's beyond what
importing it has), what becomes of compiled functions and their first runs, copies that its kernels make of what they
multiply (10 MB each), and the holes that passes of changing sizes leave in the heap (6 to 20 MB: as pieces happen to
lie, which differs from run to run with the addresses that a process is given)."""
LIBRARY_LOADING_BYTES = 16 << 20
"""As much of it as loading has used (8 MB)."""
LIBRARY_DEVICE_BYTES = 43 << 20
"""Likewise on a device with memory of its own, always: cuBLAS keeps 32 MiB on some."""
_FLOAT = 4


def block_memory_bytes(ops: Ops[T], config: DecoderConfig) -> int:
    """What one block's weights take on this device (the largest, should they differ)."""
    return max(_block_bytes(ops, config, index) for index in range(config.blocks))


def _block_bytes(ops: Ops[T], config: DecoderConfig, index: int) -> int:
    shapes = block_tensors(config, index)
    plain = sum(prod(shape) * _FLOAT for shape in shapes.values() if len(shape) == 1)
    return plain + sum(
        prod(stacked) * ops.matrix_bytes(outputs, inputs, weight_format(config, name))
        for name, (*stacked, outputs, inputs) in ((name, shape) for name, shape in shapes.items() if len(shape) > 1)
    )


def head_memory_bytes(ops: Ops[T], config: DecoderConfig) -> int:
    """What embedding, final norm and unembedding take. An embedding that is tied is counted once."""
    table = 0 if config.tied else ops.table_bytes(config.vocab, config.hidden)
    form = weight_format(config, f"{EMBEDDING if config.tied else UNEMBEDDING}.weight")
    return table + config.hidden * _FLOAT + ops.matrix_bytes(config.vocab, config.hidden, form)


def workspace_bytes(config: DecoderConfig, *, context: int, slots: int, on_host: bool = True) -> int:
    """What is needed for a while: loading, or the largest pass and the drawing after it, whichever takes more.

    ``on_host``: the device's memory is main memory.
    """
    serving = _pass_bytes(config, context, slots) + _draw_bytes(config, slots) + _unpacked_bytes(config, on_host)
    rope, loading = _rope_bytes(config, context), _loading_bytes(config)
    if not on_host:
        return LIBRARY_DEVICE_BYTES + rope + max(loading, serving)
    serving += _rows_bytes(config, slots)
    return rope + max(LIBRARY_LOADING_BYTES + loading, LIBRARY_BYTES + serving)


def _loading_bytes(config: DecoderConfig) -> int:
    """The largest matrix as it is read, and what it is made into on its way to where it is kept."""
    head = EMBEDDING if config.tied else UNEMBEDDING
    return max(
        _matrix_loading_bytes(
            weight_format(config, mlp_weight(config, "up_proj")), (config.intermediate, config.hidden), parts=2
        ),
        _matrix_loading_bytes(weight_format(config, f"{head}.weight"), (config.vocab, config.hidden), parts=1),
    )


def _matrix_loading_bytes(form: Affine | None, shape: tuple[int, int], *, parts: int) -> int:
    """Of ``parts`` matrices that become one, besides that one."""
    weights = parts * prod(shape)
    converted = min(weights, LOADED_AT_ONCE)
    if form is None:  # as stored, and in float32
        return 2 * weights + converted * _FLOAT
    # Codes and float32 constants, once more where several are laid beside each other.
    held = parts * parts * form.bytes(*shape, _FLOAT)
    if form.bits == 8 and not form.group_size:
        return held + converted  # a byte a code again, as torch packs it
    # A byte a code, 32 bits a code, and the packed copy; or every bit of a code in a byte.
    return held + converted * (2 + (_FLOAT if form.bits in {4, 8} else form.bits))


def _unpacked_bytes(config: DecoderConfig, on_host: bool) -> int:
    """Where codes have no kernel they are unpacked: bytes, floats, and the weights made of those."""
    form = weight_format(config, mlp_weight(config, "up_proj"))
    if form is None or not form.group_size:
        return 0
    at_once = UNPACKED_AT_ONCE[0 if on_host else 1]
    return min(2 * config.intermediate * config.hidden, at_once) * (2 + 2 * _FLOAT)


def _rows_bytes(config: DecoderConfig, slots: int) -> int:
    """What the integer kernels of `torch_kernels.int8_linear` take besides activations: of every input the number twice
    in floats, coarse and fine, both together and in a byte; of every output two sums in 32 bits and in floats."""
    mlp = config.intermediate
    shapes = {"up_proj": (2 * mlp, config.hidden), "down_proj": (config.hidden, mlp)}
    forms = ((weight_format(config, mlp_weight(config, name)), shape) for name, shape in shapes.items())
    return min(INT8_ROWS, PASS_ROWS + slots) * max(
        (
            16 * outputs + 18 * inputs
            for form, (outputs, inputs) in forms
            if form is not None and form.bits == 8 and not form.group_size
        ),
        default=0,
    )


def _pass_bytes(config: DecoderConfig, context: int, slots: int) -> int:
    """Activations of one block in float32, a request's keys and values in it, and who sees whom."""
    rows = PASS_ROWS + slots
    heads = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    attention = 3 * heads + 2 * keys
    mlp = 3 * config.intermediate
    if config.experts is not None:  # a row for each expert that a token goes through, before, within and after it
        mlp = max(mlp, 3 * config.experts.active * (config.hidden + config.experts.intermediate))
    activations = rows * (4 * config.hidden + max(attention, mlp)) * _FLOAT
    seen = context * 2 * keys * _FLOAT
    seen_by = [min(context, window + PASS_ROWS) if window else context for window in set(config.windows)]
    masks = PASS_ROWS * (_FLOAT * sum(seen_by) + 2 * max(seen_by))  # kept for every window; one in making
    if config.score_cap:  # no kernel keeps such scores to itself
        masks += 3 * CAPPED_ROWS * config.heads * context * _FLOAT
    return activations + seen + masks


def _draw_bytes(config: DecoderConfig, slots: int) -> int:
    """Logits, and a copy while a token is drawn from them."""
    return 2 * slots * config.vocab * _FLOAT


def _rope_bytes(config: DecoderConfig, context: int) -> int:
    """Every position's rotation, kept, and as much again while it is made."""
    return 2 * len(set(config.ropes)) * context * config.head_dim * _FLOAT
