"""Slots, and what may be written to them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kafila.errors import ProtocolError
from kafila.shard.cache import KvCache
from kafila.shard.config import parse_config
from kafila.shard.torch_ops import TorchOps
from kafila.types import BlockRange, Segment
from tests.shard.test_config import LLAMA

SLOTS, CONTEXT = 3, 20
CONFIG = parse_config(json.dumps(LLAMA))
OPS = TorchOps("cpu", "bfloat16", threads=1)

segments = st.builds(
    Segment, slot=st.integers(-1, SLOTS), start=st.integers(-1, CONTEXT), length=st.integers(0, 8), sample=st.just(True)
)


def _cache() -> KvCache[Tensor]:
    return KvCache(OPS, CONFIG, BlockRange(1, 3), slots=SLOTS, context=CONTEXT)


def test_all_room_is_taken_at_the_start() -> None:
    cache = KvCache(OPS, CONFIG, BlockRange(1, 3), slots=SLOTS, context=CONTEXT)
    taken = sum(storage.numel() * storage.element_size() for storage in cache.storage)
    assert taken == 2 * SLOTS * CONTEXT * 2 * 2 * 16 * 2
    assert len(cache.storage) == 2


@given(st.lists(st.lists(segments, max_size=3), max_size=12))
def test_against_a_plain_model(batches: list[list[Segment]]) -> None:
    """A batch is accepted exactly if every segment, in turn, continues its slot's tokens and fits."""
    cache = _cache()
    held = [0] * SLOTS
    for batch in batches:
        after = list(held)
        good = True
        for segment in batch:
            end = segment.start + segment.length
            good = good and 0 <= segment.slot < SLOTS and segment.length > 0
            good = good and 0 <= segment.start <= after[segment.slot] and end <= CONTEXT
            if good:
                after[segment.slot] = end
        if good:
            cache.check(batch)
            cache.extend(batch)
            held = after
        else:
            with pytest.raises(ProtocolError):
                cache.check(batch)
        assert [cache.length(slot) for slot in range(SLOTS)] == held


def test_a_full_slot_says_what_to_do() -> None:
    cache = _cache()
    with pytest.raises(ProtocolError, match=r"slot 1 would hold 21 tokens and 20 are reserved.*--context"):
        cache.check([Segment(1, 0, 21, sample=True)])
