"""The decoder block, written once for every family and backend, and a member's run of them.

x + o(attention(qkv(norm(x))))   then   x + down(gated(up_gate(norm(x))))

Some families have a norm before each sum as well, or experts in the place of the second line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

from kafila.errors import DeviceError, ProtocolError
from kafila.shard.cache import KvCache
from kafila.shard.config import DecoderConfig
from kafila.shard.manifest import DTYPE_BYTES
from kafila.shard.ops import (
    PROMPT_ROWS,
    AttentionShape,
    BlockWeights,
    Experts,
    HeadWeights,
    Mlp,
    Ops,
    Placement,
    ScoredRows,
)
from kafila.shard.sample import best_of, draw_all
from kafila.shard.stored import StoredBlocks
from kafila.shard.worker import Draws
from kafila.types import Best, BlockRange, History, Sampling, Segment

T = TypeVar("T")


def block(ops: Ops[T], weights: BlockWeights[T], shape: AttentionShape, x: T, kv: T, placement: Placement[T]) -> T:
    """One block over a ragged batch's rows (rows, hidden); ``x`` may be reused, ``kv`` is written to."""
    qkv = weights.qkv(ops.rms_norm(x, weights.attention_norm))
    y = weights.o(ops.attention(qkv, shape, weights.qk_norm, kv, placement))
    if placement.last_only:
        x = ops.take_rows(x, placement.last_rows())
    x = ops.add(x, y if weights.attended_norm is None else ops.rms_norm(y, weights.attended_norm))
    y = _mlp(ops, weights.mlp, ops.rms_norm(x, weights.mlp_norm))
    return ops.add(x, y if weights.mlp_out_norm is None else ops.rms_norm(y, weights.mlp_out_norm))


def _mlp(ops: Ops[T], weights: Mlp[T] | Experts[T], x: T) -> T:
    if isinstance(weights, Experts):
        return ops.mixture(x, weights)
    return weights.down(ops.gated(weights.up_gate(x), weights.activation))


def attention_shape(config: DecoderConfig, index: int) -> AttentionShape:
    """What attention is like in the block ``index``."""
    return AttentionShape(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        window=config.windows[index] or 0,
        scale=config.score_scale,
        cap=config.score_cap,
    )


def logits_of(ops: Ops[T], head: HeadWeights[T] | ScoredRows[T], cap: float, x: T) -> T:
    """Rows (rows, hidden) after the last block to (rows, tokens); ``cap`` as in `DecoderConfig.logit_cap`."""
    logits = head.unembedding(ops.rms_norm(x, head.norm))
    return ops.capped(logits, cap) if cap else logits


class Shard(Generic[T]):
    """What one member holds: blocks, their caches and the head, or some of the vocabulary's rows, where it has them.

    For one thread at a time.
    """

    def __init__(
        self,
        ops: Ops[T],
        config: DecoderConfig,
        blocks: BlockRange,
        weights: Sequence[BlockWeights[T]],
        head: HeadWeights[T] | None,
        cache: KvCache[T],
        scored: ScoredRows[T] | None = None,
        stored: StoredBlocks | None = None,
    ) -> None:
        """``weights`` are those of ``blocks``, in order; ``scored``: the vocabulary's last rows, at the last member;
        ``stored``: where `BlockWeights.stored` come from."""
        self.weights = tuple(weights)
        self.head = head
        self.scored = scored
        self._stored = stored
        self._ops = ops
        self._config = config
        self._cache = cache
        self._interrupted = False
        held = range(blocks.first, blocks.stop)
        ropes = list(dict.fromkeys(config.ropes[index] for index in held)) or [config.ropes[0]]
        self._ropes = [ops.rope(rope.frequencies(config.head_dim), cache.context) for rope in ropes]
        self._turned_by = [ropes.index(config.ropes[index]) for index in held]
        shapes = [attention_shape(config, index) for index in held]
        self._blocks = [
            ops.fused_block(own, shape) or partial(block, ops, own, shape)
            for own, shape in zip(weights, shapes, strict=True)
        ]
        self._prompt_blocks = [
            ops.prompt_block(own, shape) or few for few, own, shape in zip(self._blocks, weights, shapes, strict=True)
        ]

    @property
    def device(self) -> str:
        """For people."""
        return self._ops.device

    def interrupt(self) -> None:
        """From any thread: the forward pass that runs, and every later one, ends with DeviceError at its next block."""
        self._interrupted = True

    def forward(
        self,
        segments: Sequence[Segment],
        tokens: Sequence[int] | None,
        hidden: bytes | None,
        dtype: str,
        *,
        last_only: bool = False,
    ) -> bytes:
        """Run the blocks over the segments' rows and return them as bytes of ``dtype``, row-major.

        The rows are ``tokens`` (with the head) or else ``hidden``, (rows, hidden size) in ``dtype``. ``last_only``:
        each segment's last row alone is returned. Raises ProtocolError for a batch that does not fit what is held,
        having changed nothing.
        """
        self._cache.check(segments)
        rows = sum(segment.length for segment in segments)
        with self._ops.scope():
            x = self._embed(segments, tokens) if tokens is not None else self._rows(segments, hidden or b"", dtype)
            placements = [self._ops.place(segments, rope) for rope in self._ropes]
            x = self._run(x, placements, rows, last_only=last_only and rows > len(segments))
            self._cache.extend(segments)
            return self._ops.to_bytes(x, dtype)

    def sample(
        self,
        segments: Sequence[Segment],
        sampling: Sequence[Sampling],
        hidden: bytes,
        dtype: str,
        histories: Sequence[History] = (),
    ) -> Draws:
        """Draw a token after each segment that wants one; None for the others.

        ``hidden`` has the segments' rows after the model's last block. Only the rows drawn from go through the
        unembedding. ``histories`` has one entry a segment, or none where no draw looks back.
        """
        head = self._need_head()
        rows = [end - 1 for end, segment in zip(_ends(segments), segments, strict=True) if segment.sample]
        if not rows:
            return Draws((None,) * len(segments))
        ops = self._ops
        with ops.scope():
            x = ops.take_rows(self._rows(segments, hidden, dtype), rows)
            logits = ops.to_numpy(logits_of(ops, head, self._config.logit_cap, x))
        return draw_all(logits, segments, sampling, histories)

    def sample_part(self, segments: Sequence[Segment], hidden: bytes, dtype: str) -> tuple[Best, ...]:
        """The likeliest of the tokens that the last member does not score, for each segment that wants one.

        ``hidden`` as in `sample`. Raises ProtocolError where the vocabulary is not divided.
        """
        own = self._need_head().own
        if own is None:
            raise ProtocolError("a batch came to be drawn in part, and the whole vocabulary is scored here")
        self._check_rows(segments, hidden, dtype)
        return self._best(own, _drawn_from(segments, hidden), dtype)

    def score(self, segments: Sequence[Segment], hidden: bytes, dtype: str) -> tuple[Best, ...]:
        """The likeliest of the tokens that are scored here and not by the head, for each segment that wants one.

        ``hidden`` as in `sample`: the rows as they travel to the head, which sees no others. Raises ProtocolError where
        none are scored here.
        """
        if self.scored is None:
            raise ProtocolError("a batch came that only the last member can score")
        self._check_rows(segments, hidden, dtype)
        return self._best(self.scored, _drawn_from(segments, hidden), dtype)

    def _best(self, held: ScoredRows[T], hidden: bytes, dtype: str) -> tuple[Best, ...]:
        """``hidden``: only the rows that tokens are drawn from."""
        if not hidden:
            return ()
        ops = self._ops
        with ops.scope():
            x = ops.from_bytes(hidden, dtype, self._config.hidden)
            logits = ops.to_numpy(logits_of(ops, held, self._config.logit_cap, x))
        return best_of(logits, held.first)

    def _run(self, x: T, placements: Sequence[Placement[T]], rows: int, *, last_only: bool) -> T:
        """``placements``: one a kind of rotation."""
        blocks = self._blocks if rows < PROMPT_ROWS or not self._may_read_files() else self._prompt_blocks
        if last_only and not blocks:
            return self._ops.take_rows(x, placements[0].last_rows())
        final = len(blocks) - 1 if last_only else -1
        run: Callable[[T, T, Placement[T]], T]
        for index, (run, kv, turned_by) in enumerate(zip(blocks, self._cache.storage, self._turned_by, strict=True)):
            if self._interrupted:
                raise DeviceError("stopped while it was computing")
            placement = placements[turned_by]
            x = run(x, kv, placement if index != final else replace(placement, last_only=True, masks={}))
        return x

    def _may_read_files(self) -> bool:
        """What was read of a file once is what a member answers with, whatever becomes of the file."""
        return self._stored is None or self._stored.unchanged()

    def _embed(self, segments: Sequence[Segment], tokens: Sequence[int]) -> T:
        head = self._need_head()
        rows = sum(segment.length for segment in segments)
        if len(tokens) != rows or min(tokens) < 0 or max(tokens) >= self._config.vocab:
            raise ProtocolError(
                f"a batch of {rows} rows came with {len(tokens)} tokens, or with one that does not exist"
            )
        x = self._ops.embed(head.table, tokens)
        scale = self._config.embedding_scale
        return x if scale == 1 else self._ops.scaled(x, scale)

    def _rows(self, segments: Sequence[Segment], hidden: bytes, dtype: str) -> T:
        self._check_rows(segments, hidden, dtype)
        return self._ops.from_bytes(hidden, dtype, self._config.hidden)

    def _check_rows(self, segments: Sequence[Segment], hidden: bytes, dtype: str) -> None:
        rows = sum(segment.length for segment in segments)
        item = DTYPE_BYTES.get(dtype)
        if item is None:
            raise ProtocolError(f"activations of type {dtype!r} came; known are {', '.join(DTYPE_BYTES)}")
        if len(hidden) != rows * self._config.hidden * item:
            raise ProtocolError(
                f"a batch of {rows} rows came with {len(hidden)} bytes, not {rows * self._config.hidden * item}"
            )

    def _need_head(self) -> HeadWeights[T]:
        if self.head is None:
            raise ProtocolError("a batch came that only the head can do")
        return self.head


def _drawn_from(segments: Sequence[Segment], hidden: bytes) -> bytes:
    """The last row of each segment that wants a token."""
    ends = list(_ends(segments))
    if len(hidden) == 0 or all(segment.sample and segment.length == 1 for segment in segments):
        return hidden
    width = len(hidden) // ends[-1]
    return b"".join(
        hidden[(end - 1) * width : end * width] for end, segment in zip(ends, segments, strict=True) if segment.sample
    )


def _ends(segments: Sequence[Segment]) -> Iterable[int]:
    """The row after each segment's last."""
    return accumulate(segment.length for segment in segments)
