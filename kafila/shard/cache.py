"""The keys and values of every request's past tokens, reserved whole before anything is served.

Memory is taken once, slots x context, so nothing grows while a session runs and a plan that was admitted fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kafila.errors import ProtocolError
from kafila.shard.config import DecoderConfig
from kafila.shard.ops import Ops
from kafila.types import BlockRange, Segment

T = TypeVar("T")


class KvCache(Generic[T]):
    """One storage a block, and how many tokens each slot holds."""

    def __init__(
        self, ops: Ops[T], config: DecoderConfig, blocks: BlockRange, *, slots: int, context: int, dtype: str = ""
    ) -> None:
        """Reserve ``slots`` requests of ``context`` tokens each, in ``dtype`` (empty: that of ``ops``); raises what the
        backend raises without room."""
        self.slots = slots
        self.context = context
        self._lengths = [0] * slots
        self.storage = [
            ops.kv_storage(slots, context, config.kv_heads, config.head_dim, dtype)
            for _ in range(blocks.first, blocks.stop)
        ]

    def length(self, slot: int) -> int:
        """Tokens kept for a slot."""
        return self._lengths[slot]

    def check(self, segments: Sequence[Segment]) -> None:
        """Raise ProtocolError, having changed nothing, unless every segment continues what its slot holds and fits."""
        lengths: dict[int, int] = {}
        for segment in segments:
            slot, start, end = segment.slot, segment.start, segment.start + segment.length
            if not 0 <= slot < self.slots:
                raise ProtocolError(f"a batch is for slot {slot} of {self.slots}")
            held = lengths.get(slot, self._lengths[slot])
            if segment.length < 1 or not 0 <= start <= held:
                raise ProtocolError(
                    f"a batch has {segment.length} tokens from position {start} on for slot {slot}, which holds {held}"
                )
            if end > self.context:
                raise ProtocolError(
                    f"slot {slot} would hold {end} tokens and {self.context} are reserved for a request: "
                    "shorten the conversation or host with a larger --context"
                )
            lengths[slot] = end

    def extend(self, segments: Sequence[Segment]) -> None:
        """Count the segments' tokens as held; each first cuts its slot back to where it starts."""
        for segment in segments:
            self._lengths[segment.slot] = segment.start + segment.length
