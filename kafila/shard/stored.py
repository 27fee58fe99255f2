"""A checkpoint's blocks as they lie in its files, mapped for prompts (see `torch_prompts`)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kafila.shard.manifest import Checkpoint
from kafila.shard.ops import HostTensor, Ops, StoredBlock
from kafila.types import TensorSpec

MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
)
"""In `StoredBlock`'s order."""
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
"""As `kafila.shard.load` carries them."""


class StoredBlocks:
    """Maps each file once, whole, and blocks of it as they are asked for while ``spare_bytes`` last.

    Pages are the operating system's to take back; but where nothing is left beside what a member holds, every prompt
    would read them from the disk again.
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
            weights = tuple(map(self._mapped, specs))
            biases = tuple(
                self._copied(tensors[f"{module}.bias"]) if f"{module}.bias" in tensors else None for module in modules
            )
        except (OSError, ValueError):  # cannot be mapped, or only part of a file: it has been read all the same
            return None
        self._spare_bytes -= taken
        return StoredBlock(weights, biases)

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

    def _copied(self, spec: TensorSpec) -> HostTensor:
        mapped = self._mapped(spec)
        return HostTensor(mapped.dtype, mapped.data.copy())
