"""Whether two folders, or a folder and a source, hold the same checkpoint: known from a few kilobytes.

Fine-tuned checkpoints of one base have the same configuration and the same tensors, so some of their bytes are compared
as well. Other files, another sharding or another dialect of the header change nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from kafila.shard.manifest import Checkpoint
from kafila.types import TensorSpec

SAMPLES = 8
SAMPLE_BYTES = 256
"""Of the middle of a tensor: a hundred weights, some of which any training changes."""
_COSMETIC = ("_name_or_path", "transformers_version")
"""Keys of config.json that say who wrote it."""


def samples(checkpoint: Checkpoint) -> list[TensorSpec]:
    """The places that are looked at: in some of the largest tensors, spread over the model."""
    specs = sorted(checkpoint.tensors.values(), key=lambda spec: spec.name)
    largest = sorted(specs, key=lambda spec: (spec.start - spec.end, spec.name))[: len(specs) // 2 + 1]
    step = max(1, len(largest) // SAMPLES)
    return [_middle(spec) for spec in sorted(largest, key=lambda spec: spec.name)[::step][:SAMPLES]]


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hex; the places of `samples` must have been fetched. Raises OSError."""
    config = {key: value for key, value in json.loads(checkpoint.config_text).items() if key not in _COSMETIC}
    tensors = sorted((spec.name, spec.dtype, spec.shape) for spec in checkpoint.tensors.values())
    digest = hashlib.sha256(json.dumps([config, tensors], sort_keys=True).encode())
    for spec in samples(checkpoint):
        digest.update(_read(checkpoint.folder / spec.file, spec))
    return digest.hexdigest()


def _middle(spec: TensorSpec) -> TensorSpec:
    length = min(SAMPLE_BYTES, spec.end - spec.start)
    start = spec.start + (spec.end - spec.start - length) // 2
    return TensorSpec(spec.name, spec.dtype, spec.shape, spec.file, start, start + length)


def _read(path: Path, spec: TensorSpec) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), spec.end - spec.start, spec.start)
