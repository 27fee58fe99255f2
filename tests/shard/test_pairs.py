"""The order of q's and k's rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kafila.shard.ops import HostTensor
from kafila.shard.pairs import pair_order


@given(heads=st.integers(1, 4), pairs=st.integers(1, 5), width=st.integers(1, 3))
def test_pair_order_puts_the_halves_of_a_head_beside_each_other(heads: int, pairs: int, width: int) -> None:
    rows = heads * 2 * pairs
    data = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    turned = pair_order(HostTensor("F32", data), heads).data
    for head in range(heads):
        for pair in range(pairs):
            base = head * 2 * pairs
            assert (turned[base + 2 * pair] == data[base + pair]).all()
            assert (turned[base + 2 * pair + 1] == data[base + pairs + pair]).all()
