"""A checkpoint's blocks as they lie in its files, mapped for prompts (see `torch_prompts`)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kafila.errors import ModelIncomplete
from kafila.shard.manifest import Checkpoint
from kafila.shard.ops import HostTensor, Ops, StoredBlock
from kafila.shard.pairs import pair_order
from kafila.shard.quantize import to_float32
from kafila.shard.tensor_files import NUMPY, read_tensor
from kafila.types import TensorSpec

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OTHERS = ("self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")

COMPILED_BYTES = 48 << 20
"""Besides, a library keeps what it compiles for prompts of every length (`torch_prompts.UNIT_ROWS`), and holes come
with their sizes: 31 MB were seen beyond what is mapped and what a plan counts."""


class StoredBlocks:
    """Maps each file once, whole, and blocks of it as they are asked for while ``spare_bytes`` last, of which
    `COMPILED_BYTES` are kept.

    What is of q, k and v is copied, a tenth to a quarter of a block: in one piece and in order they are quicker. Mapped
    pages are the operating system's to take back; but where nothing is left beside what a member holds, every prompt
    would read them from the disk again.
    """

    def __init__(self, checkpoint: Checkpoint, spare_bytes: int) -> None:
        """Nothing is mapped yet."""
        self._checkpoint = checkpoint
        self._spare_bytes = spare_bytes - COMPILED_BYTES
        self._files: dict[Path, npt.NDArray[np.uint8]] = {}
        self._states: dict[Path, tuple[int, ...]] = {}

    def block(self, ops: Ops[Any], index: int) -> StoredBlock | None:
        """None where ``ops`` has no use for it, it is not stored plainly, or there is no room: prompts are slower then,
        and nothing else."""
        config, tensors = self._checkpoint.config, self._checkpoint.tensors
        modules = [f"model.layers.{index}.{name}" for name in (*ATTENTION, *OTHERS)]
        if config.quantization is not None or any(f"{module}.weight" not in tensors for module in modules):
            return None
        specs = [tensors[f"{module}.weight"] for module in modules]
        taken = sum(spec.end - spec.start for spec in specs)
        if len({spec.dtype for spec in specs}) > 1 or not ops.takes_stored(specs[0].dtype) or taken > self._spare_bytes:
            return None
        try:
            mapped = [self._mapped(spec) for spec in specs[3:]]
            qkv = self._stacked([self._read(spec) for spec in specs[:3]])
            biases = [self._bias(module) for module in modules]
        except (OSError, ValueError, ModelIncomplete):  # it cannot be mapped, or has changed since it was loaded
            return None
        self._spare_bytes -= taken
        of_qkv = [bias for bias in biases[:3] if bias is not None]
        return StoredBlock((qkv, *mapped), (self._stacked(of_qkv) if of_qkv else None, *biases[3:]))

    def unchanged(self) -> bool:
        """Whether the files are what they were when they were mapped.

        Whoever writes a file in place changes what is mapped of it, and one that became shorter ends the process that
        reads on. A file in the place of another (as the cache and all careful programs do it) would do no harm.
        """
        try:
            return all(_state(path) == state for path, state in self._states.items())
        except OSError:
            return False

    def _mapped(self, spec: TensorSpec) -> HostTensor:
        path = self._checkpoint.folder / spec.file
        if path not in self._files:
            state = _state(path)
            with path.open("rb") as stream:
                self._files[path] = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            self._states[path] = state
        # ValueError for what begins at no multiple of its items' size, which no writer in use does.
        items = self._files[path][spec.start : spec.end].view(NUMPY[spec.dtype])
        if not items.flags.aligned:
            raise ValueError(f"{spec.name} is not aligned")
        return HostTensor(spec.dtype, items.reshape(spec.shape))

    def _read(self, spec: TensorSpec) -> HostTensor:
        return read_tensor(self._checkpoint.folder, spec)

    def _bias(self, module: str) -> HostTensor | None:
        """In float32, for biases need not be of one dtype."""
        spec = self._checkpoint.tensors.get(f"{module}.bias")
        return None if spec is None else HostTensor("F32", to_float32(self._read(spec)))

    def _stacked(self, parts: Sequence[HostTensor]) -> HostTensor:
        """Of q, k and v, the first two in pair order."""
        config = self._checkpoint.config
        heads = (config.heads, config.kv_heads, 0)
        ordered = [pair_order(part, count).data for part, count in zip(parts, heads, strict=True)]
        return HostTensor(parts[0].dtype, np.concatenate(ordered))


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
