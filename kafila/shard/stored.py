"""A checkpoint's blocks as they lie in its files, mapped for prompts (see `torch_prompts`)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kafila.shard.manifest import Checkpoint
from kafila.shard.ops import HostTensor, Ops, StoredBlock
from kafila.shard.pairs import pair_order
from kafila.types import TensorSpec

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MATRICES = (*ATTENTION, "self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
"""As `kafila.shard.load` carries them."""


class StoredBlocks:
    """Maps each file once, whole, and blocks of it as they are asked for while ``spare_bytes`` last.

    Those of q, k and v, a tenth of most blocks, are copied: in one piece and in order they are quicker. Mapped pages
    are the operating system's to take back; but where nothing is left beside what a member holds, every prompt would
    read them from the disk again.
    """

    def __init__(self, checkpoint: Checkpoint, spare_bytes: int) -> None:
        """Nothing is mapped yet."""
        self._checkpoint = checkpoint
        self._spare_bytes = spare_bytes
        self._files: dict[Path, npt.NDArray[np.uint8]] = {}

    def block(self, ops: Ops[Any], index: int) -> StoredBlock | None:
        """None where ``ops`` has no use for it, it is not stored plainly, or there is no room: prompts are slower then,
        and nothing else."""
        config, tensors = self._checkpoint.config, self._checkpoint.tensors
        modules = [f"model.layers.{index}.{name}" for name in MATRICES]
        if config.quantization is not None or any(f"{module}.weight" not in tensors for module in modules):
            return None
        specs = [tensors[f"{module}.weight"] for module in modules]
        taken = sum(spec.end - spec.start for spec in specs)
        if len({spec.dtype for spec in specs}) > 1 or not ops.takes_stored(specs[0].dtype) or taken > self._spare_bytes:
            return None
        try:
            weights = [self._mapped(spec) for spec in specs]
            biases = [
                self._mapped(tensors[f"{module}.bias"]) if f"{module}.bias" in tensors else None for module in modules
            ]
        except (OSError, ValueError):  # cannot be mapped, or only part of a file: it has been read all the same
            return None
        self._spare_bytes -= taken
        return StoredBlock(
            (self._stacked(weights[:3]), *weights[3:]),
            (self._stacked(of_qkv) if (of_qkv := [bias for bias in biases[:3] if bias]) else None, *biases[3:]),
        )

    def _mapped(self, spec: TensorSpec) -> HostTensor:
        path = self._checkpoint.folder / spec.file
        if path not in self._files:
            with path.open("rb") as stream:
                self._files[path] = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        # ValueError for what begins at no multiple of its items' size, which no writer in use does.
        items = self._files[path][spec.start : spec.end].view(_NUMPY[spec.dtype])
        if not items.flags.aligned:
            raise ValueError(f"{spec.name} is not aligned")
        return HostTensor(spec.dtype, items.reshape(spec.shape))

    def _stacked(self, parts: Sequence[HostTensor]) -> HostTensor:
        """Of q, k and v, the first two in pair order."""
        config = self._checkpoint.config
        heads = (config.heads, config.kv_heads, 0)
        ordered = [pair_order(part, count).data for part, count in zip(parts, heads, strict=True)]
        return HostTensor(parts[0].dtype, np.concatenate(ordered))
