"""torch and MLX, apart and in one ring, say the same on the demonstration model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kafila.types import Segment
from tests.integration import oracle
from tests.integration.oracle import PROMPTS, Reference, demonstration_model
from tests.integration.processes import machine
from tests.integration.test_ring import told
from tests.shard.backends import needs_mlx
from tests.shard.rings import LocalRing

TOKENS = 8
"""Of each answer in a ring of processes."""
ALONE_TOKENS = 3
"""Of each answer by MLX alone, whose CPU build takes seconds for a prompt."""
BLOCKS = 30
CHECKED_ROWS = 40
LOGIT_ERROR, MEAN_ERROR, AGREEMENT = 2.0, 0.3, 0.9
"""bfloat16 against float32: by how much a logit may be off at most and on average, where they span seventy, and the
least share of positions whose likeliest token is the same. transformers' own bfloat16 is off by 1.3 and 0.17."""

pytestmark = [needs_mlx, pytest.mark.slow]


@pytest.fixture(scope="module")
def smollm() -> Path:
    return demonstration_model()


@pytest.fixture(scope="module")
def references(smollm: Path) -> list[Reference]:
    return oracle.references(smollm, PROMPTS, TOKENS)


async def test_a_ring_of_both_answers_as_in_transformers(smollm: Path, references: list[Reference]) -> None:
    options = ("--dtype", "float32", "--max-tokens", str(TOKENS), "--context", "256", "--shares", f"{BLOCKS - 4},4")
    async with machine() as here:
        ring = await here.ring(smollm, 2, *options, friend_options=("--device", "mlx", "--max-tokens", str(TOKENS)))
        assert "mlx " in ring[1].err
        assert await told(ring[1], PROMPTS) == "".join(f"{reference.text}\n" for reference in references)


def test_mlx_alone_answers_as_in_transformers(smollm: Path, references: list[Reference]) -> None:
    """In one process: what all prompts begin with is computed once, and each starts from there."""
    ring = LocalRing(smollm, (BLOCKS,), context=128, slots=1, backends=("mlx",))
    columns = zip(*(reference.prompt for reference in references), strict=False)
    shared = next(n for n, column in enumerate(columns) if len(set(column)) > 1)
    ring.forward([Segment(0, 0, shared, sample=False)], references[0].prompt[:shared])
    for reference in references:
        answer: list[int] = []
        start, new = shared, reference.prompt[shared:]
        while len(answer) < ALONE_TOKENS:
            (token,) = ring.step([Segment(0, start, len(new), sample=True)], new)
            assert token is not None
            start, new = start + len(new), [token]
            answer.append(token)
        assert answer == reference.answer[:ALONE_TOKENS]


def test_bfloat16_on_both_is_near_float32(smollm: Path, references: list[Reference]) -> None:
    tokens = (references[0].prompt + references[0].answer)[:CHECKED_ROWS]
    exact = _logits(LocalRing(smollm, (BLOCKS,), context=64, slots=1), tokens)
    for backends in (("mlx",), ("torch", "mlx")):
        ring = LocalRing(smollm, (20, 10), dtype="bfloat16", context=64, slots=1, backends=backends)
        logits = _logits(ring, tokens)
        off = np.abs(logits - exact)
        assert off.max() <= LOGIT_ERROR
        assert off.mean() <= MEAN_ERROR
        assert (logits.argmax(1) == exact.argmax(1)).mean() >= AGREEMENT


def _logits(ring: LocalRing, tokens: list[int]) -> npt.NDArray[np.float32]:
    """(tokens, vocab)."""
    hidden = ring.forward([Segment(0, 0, len(tokens), sample=False)], tokens)
    shard = ring.shards[0]
    head, ops = shard.head, shard._ops
    assert head is not None
    with ops.scope():
        rows = ops.from_bytes(hidden, ring.dtype, ring.config.hidden)
        return ops.to_numpy(head.unembedding(ops.rms_norm(rows, head.norm)))
