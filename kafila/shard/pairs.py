"""The order of q's and k's rows: pairs that rotary embeddings turn are neighbours here (see `kafila.shard.ops`)."""

from __future__ import annotations

import numpy as np

from kafila.shard.ops import HostTensor


def pair_order(tensor: HostTensor, heads: int) -> HostTensor:
    """Rows of each of ``heads`` heads from the checkpoint's order (i with i + half) to neighbours; 0: as they are."""
    if not heads:
        return tensor
    data = tensor.data
    halves = data.reshape(heads, 2, -1, *data.shape[1:])
    return HostTensor(tensor.dtype, np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(data.shape))
