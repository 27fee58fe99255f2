"""Random weights of a model's own shapes on a device, ready to be timed: blocks and an unembedding.

What takes long is getting weights onto the device (on a CPU they are packed), so the rig is as large as can be built
in the time it is given: blocks are made narrower, then fewer, and the unembedding shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kafila.shard.cache import KvCache
from kafila.shard.config import DecoderConfig
from kafila.shard.decoder import Shard
from kafila.shard.experts import ExpertShape
from kafila.shard.formats import Affine
from kafila.shard.load import build_block
from kafila.shard.manifest import (
    DTYPE_BYTES,
    EMBEDDING,
    UNEMBEDDING,
    block_bytes,
    block_tensors,
    mlp_weight,
    model_manifest,
    typical_block,
    weight_format,
)
from kafila.shard.ops import BlockWeights, HeadWeights, HostMatrix, HostTensor, Ops, QuantizedTensor
from kafila.types import BlockRange, ModelManifest, Sampling, Segment

T = TypeVar("T")
Clock = Callable[[], float]

CACHES_OVER = 3
"""The blocks' bytes over the last-level cache's: at twice, a cache that does not replace strictly by age still keeps
part of what is read in turn."""
WORKING_SET_LIMITS = (64 << 20, 160 << 20)
"""Bytes: for machines that do not tell their cache, and for those whose cache is larger than two seconds can fill."""
MAX_BLOCKS = 32
"""Of a model so small that its blocks never leave the cache, there is nothing more to learn from many."""
TRIAL_WEIGHTS = 1 << 20
"""Built first, to see how fast this device takes weights: 20 ms where it is slowest."""
BLOCKS_S = 0.7
"""Building blocks stops then, whatever there is; a single one is made narrow enough for half of it."""
HEAD_S = 0.2
"""What building the unembedding may take."""
LEAST_WEIGHTS = 1 << 22
"""Nothing is made smaller than this: it would no longer run at the memory's speed."""
CHUNK = 64
"""Rows of the prefill-shaped pass that arithmetic is measured by; also the tokens in the cache at the timed token."""
_PATTERN = 1 << 16
_GROUP = 128  # the largest that checkpoints are quantized in
_TOKEN = (Segment(slot=0, start=CHUNK, length=1, sample=True),)
_CHUNK = (Segment(slot=0, start=0, length=CHUNK, sample=False),)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds one token took at each."""

    blocks_s: float
    overhead_s: float
    """A stage without blocks."""
    head_s: float


@dataclass(frozen=True, slots=True)
class Rig(Generic[T]):
    """The same blocks as three stages: all of them with the head, one, none."""

    block_sizes: ModelManifest
    """Of a block as it was built."""
    head_sizes: ModelManifest
    """Of the head as it was built."""
    count: int
    weights: int
    """In one block as it was built."""
    whole: Shard[T]
    one: Shard[T]
    none: Shard[T]
    dtype: str
    evict: Callable[[], object]
    """Puts the weights out of the processor's caches."""

    def round(self, clock: Clock) -> Round:
        """Time a token. The order is a ring's: what the overhead and the head read is out of the caches by then."""
        row = bytes(self.block_sizes.hidden_bytes)
        self.evict()
        blocks_s = timed(partial(self.whole.forward, _TOKEN, None, row, self.dtype), clock)
        overhead_s = timed(partial(self.none.forward, _TOKEN, None, row, self.dtype), clock)
        head_s = timed(partial(self.whole.sample, _TOKEN, (Sampling(),), row, self.dtype), clock)
        return Round(blocks_s, overhead_s, head_s)

    def chunk_s(self, clock: Clock) -> float:
        """A prefill-shaped pass of `CHUNK` rows through one block."""
        rows = bytes(self.block_sizes.hidden_bytes * CHUNK)
        return timed(partial(self.one.forward, _CHUNK, None, rows, self.dtype), clock)


def timed(work: Callable[[], object], clock: Clock) -> float:
    """Seconds ``work`` takes."""
    began = clock()
    work()
    return clock() - began


def build_rig(ops: Ops[T], config: DecoderConfig, clock: Clock, last_level_cache: int) -> Rig[T]:
    """Build within the time that the constants above allow, on whatever device this is."""
    random = _Random()
    trial = max(1, min(config.vocab, TRIAL_WEIGHTS // config.hidden))
    with ops.scope():
        form = weight_format(config, mlp_weight(config, "up_proj"))
        took_s = timed(lambda: ops.matrix([random.matrix(trial, config.hidden, form)], None), clock)
        weights_per_s = trial * config.hidden / took_s if took_s > 0 else math.inf
        shape = narrowed(config, max(LEAST_WEIGHTS, weights_per_s * BLOCKS_S / 2))
        index, item = typical_block(shape), DTYPE_BYTES[ops.dtype]
        sizes = replace(model_manifest("probe", shape, ops.dtype), block_bytes=block_bytes(shape, index, item))
        until = clock() + BLOCKS_S
        blocks = _build_blocks(ops, shape, block_count(sizes.block_bytes, last_level_cache), until, clock, random)
        shorter = _shortened(config, max(LEAST_WEIGHTS, weights_per_s * HEAD_S))
        head = _build_head(ops, shorter, random)
    windows, ropes = (config.windows[index],) * len(blocks), (config.ropes[index],) * len(blocks)
    shape = replace(shape, windows=windows, ropes=ropes, vocab=shorter.vocab)

    def stage(size: int, with_head: HeadWeights[T] | None = None) -> Shard[T]:
        held = BlockRange(0, size)
        cache = KvCache(ops, shape, held, slots=1, context=CHUNK + 1)
        cache.extend(_CHUNK)  # zeros take as long to attend to as anything else
        return Shard(ops, shape, held, blocks[:size], with_head, cache)

    read = len(blocks) * sizes.block_bytes
    return Rig(
        block_sizes=sizes,
        head_sizes=model_manifest("probe", shorter, ops.dtype),
        count=len(blocks),
        weights=block_weights(shape),
        whole=stage(len(blocks), head),
        one=stage(1),
        none=stage(0),
        dtype=ops.dtype,
        evict=_evictor(2 * last_level_cache if ops.memory_bytes() is None and read < 2 * last_level_cache else 0),
    )


def narrowed(config: DecoderConfig, most_weights: float) -> DecoderConfig:
    """``config`` with fewer heads and a smaller intermediate size, until a block has no more than ``most_weights``.

    Of experts there are as many as a token goes through, or fewer, each of its own size: what a token reads is what is
    timed.
    """
    divisor = 1
    if (experts := config.experts) is not None:
        config = replace(config, experts=replace(experts, count=experts.active))
    narrow = config
    while block_weights(narrow) > most_weights and divisor < config.intermediate:
        divisor *= 2
        kv_heads = max(1, config.kv_heads // divisor)
        narrow = replace(
            config,
            kv_heads=kv_heads,
            heads=kv_heads * max(1, config.heads // config.kv_heads // max(1, divisor // config.kv_heads)),
            intermediate=_whole_groups(config.intermediate // divisor),
            experts=None if experts is None else _fewer(experts, max(1, experts.active // divisor)),
        )
    return narrow


def _fewer(experts: ExpertShape, count: int) -> ExpertShape:
    return replace(experts, count=count, active=count)


def _whole_groups(size: int) -> int:
    """At most ``size``, and such that quantized groups fit where they fitted before."""
    return size // _GROUP * _GROUP or size


def block_count(read_bytes: int, last_level_cache: int) -> int:
    """Blocks whose bytes do not fit the cache."""
    low, high = WORKING_SET_LIMITS
    return min(MAX_BLOCKS, ceil(min(high, max(low, CACHES_OVER * last_level_cache)) / read_bytes))


def cache_bytes(root: Path = Path("/")) -> int:
    """The largest cache of the first processor as Linux tells it, else 0."""
    sizes = [0]
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        digits = text.rstrip("KM")
        sizes.append(int(digits) * factor if digits.isdigit() else 0)
    return max(sizes)


def block_weights(config: DecoderConfig) -> int:
    """Numbers in the block that is probed."""
    return sum(prod(shape) for shape in block_tensors(config, typical_block(config)).values())


class _Random:
    """Numbers of the size that trained weights have, as bfloat16; each matrix is made once and used again."""

    def __init__(self) -> None:
        self._pattern = np.random.default_rng(0).standard_normal(_PATTERN, dtype=np.float32)
        self._made: dict[tuple[int, ...], HostTensor] = {}
        self._codes: dict[tuple[int, int, Affine], QuantizedTensor] = {}

    def matrix(self, outputs: int, inputs: int, form: Affine | None) -> HostMatrix:
        """Held in ``form``, if it divides into that."""
        if form is None or not form.fits(inputs):
            return self.tensor((outputs, inputs))
        key = (outputs, inputs, form)
        if key not in self._codes:
            words = np.resize(self._pattern.view(np.uint32) * np.uint32(2654435761), (outputs, form.words(inputs)))
            scale = np.float32(inputs**-0.5 / (1 << (form.bits - 1)))
            scales = np.full((outputs, inputs // form.group(inputs)), scale)
            biases = scales * np.float32(-(1 << (form.bits - 1)))
            self._codes[key] = QuantizedTensor(
                words, HostTensor("F32", scales), HostTensor("F32", biases), form.bits, form.group(inputs)
            )
        return self._codes[key]

    def tensor(self, shape: tuple[int, ...]) -> HostTensor:
        if shape not in self._made:
            scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
            bits = (self._pattern * np.float32(scale)).view(np.uint32) >> np.uint32(16)
            self._made[shape] = HostTensor("BF16", np.resize(bits.astype(np.uint16), shape))
        return self._made[shape]


@dataclass(frozen=True, slots=True)
class _RandomBlock:
    """Implements `kafila.shard.load.Weights`."""

    shapes: Mapping[str, tuple[int, ...]]
    config: DecoderConfig
    random: _Random

    def tensor(self, name: str) -> HostTensor:
        return self.random.tensor(self.shapes[f"model.layers.{typical_block(self.config)}.{name}"])

    def matrix(self, module: str) -> HostMatrix:
        return self._matrix(f"model.layers.{typical_block(self.config)}.{module}.weight")

    def expert(self, index: int, name: str) -> HostMatrix:  # noqa: ARG002  - they are all alike
        return self._matrix(mlp_weight(self.config, name))

    def _matrix(self, name: str) -> HostMatrix:
        *_, outputs, inputs = self.shapes[name]
        return self.random.matrix(outputs, inputs, weight_format(self.config, name))


def _build_blocks(
    ops: Ops[T], config: DecoderConfig, most: int, until: float, clock: Clock, random: _Random
) -> list[BlockWeights[T]]:
    """Up to ``most``, one after the other while there is time."""
    weights = _RandomBlock(block_tensors(config, typical_block(config)), config, random)
    build = partial(build_block, ops, config, weights, sparse=config.experts is not None)
    blocks = [build()]
    while len(blocks) < most and clock() < until:
        blocks.append(build())
    return blocks


def _shortened(config: DecoderConfig, most_weights: float) -> DecoderConfig:
    """``config`` with a smaller vocabulary, so that the unembedding has no more than ``most_weights``."""
    return replace(config, vocab=max(1, min(config.vocab, int(min(most_weights, 2**62)) // config.hidden)))


def _build_head(ops: Ops[T], config: DecoderConfig, random: _Random) -> HeadWeights[T]:
    norm = ops.norm(random.tensor((config.hidden,)), config.norm_eps)
    embedding, unembedding = (
        random.matrix(config.vocab, config.hidden, weight_format(config, f"{module}.weight"))
        for module in (EMBEDDING, UNEMBEDDING)
    )
    table = ops.table(embedding)
    return HeadWeights(table, norm, ops.tied_matrix(table) if config.tied else ops.matrix([unembedding], None))


def _evictor(size: int) -> Callable[[], object]:
    """What reads so many bytes of main memory."""
    if not size:
        return lambda: None
    other: npt.NDArray[np.int64] = np.ones(size // 8, np.int64)
    return other.sum
