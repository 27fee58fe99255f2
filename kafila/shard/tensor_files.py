"""A checkpoint's tensors from its files: read, or mapped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from kafila.errors import ModelIncomplete
from kafila.shard.ops import HostTensor
from kafila.types import TensorSpec

NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "U32": np.dtype("<u4"),
}
"""safetensors stores little-endian. numpy has no bfloat16; its bits are carried as integers."""


def read_tensor(folder: Path, spec: TensorSpec) -> HostTensor:
    """A tensor's bytes, and no others of its file. Raises ModelIncomplete when they are not there any more."""
    data = np.empty(spec.shape, NUMPY[spec.dtype])
    path = folder / spec.file
    try:
        with path.open("rb", buffering=0) as stream:
            stream.seek(spec.start)
            _fill(stream.fileno(), data.reshape(-1).view(np.uint8).data)
    except (OSError, EOFError) as error:
        raise ModelIncomplete(f"{path}: {spec.name} cannot be read ({error}): download the checkpoint again") from error
    return HostTensor(spec.dtype, data)


def map_tensor(folder: Path, spec: TensorSpec) -> HostTensor:
    """A tensor mapped from its file: pages are read as they are touched, and written ones are private."""
    path = folder / spec.file
    begin = spec.start - spec.start % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as stream:
            # ValueError: the file has become shorter than what is to be mapped.
            mapped = mmap.mmap(stream.fileno(), spec.end - begin, access=mmap.ACCESS_COPY, offset=begin)
    except (OSError, ValueError) as error:
        raise ModelIncomplete(f"{path}: {spec.name} cannot be read ({error}): download the checkpoint again") from error
    items = np.frombuffer(mapped, np.uint8, spec.end - spec.start, spec.start - begin)
    if spec.start % NUMPY[spec.dtype].itemsize:  # legal in the format, though no writer in use does it
        items = items.copy()
    return HostTensor(spec.dtype, items.view(NUMPY[spec.dtype]).reshape(spec.shape))


def _fill(descriptor: int, into: memoryview) -> None:
    """Read until ``into`` is full: one read returns at most 2 GiB on Linux."""
    while into:
        count = os.readv(descriptor, [into])
        if not count:
            raise EOFError("the file has become shorter")
        into = into[count:]
