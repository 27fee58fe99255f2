"""Models with experts against transformers in float32: whole, in every split, in chunks and in shared batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kafila.types import Segment
from tests.shard.backends import RINGS
from tests.shard.checkpoints import make_checkpoint, reference_answer
from tests.shard.rings import LocalRing

SMALL: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "seed": 2}
CASES: dict[str, dict[str, Any]] = {
    "normalised": {"norm_topk_prob": True},
    "weights as they are, sharded": {"sharded": True, "attention_bias": True, "num_experts_per_tok": 3},
    "every second block": {"decoder_sparse_step": 2, "norm_topk_prob": True},
    "some blocks dense, tied": {"mlp_only_layers": [0, 2], "tied": True},
    "window": {"use_sliding_window": True, "sliding_window": 6, "norm_topk_prob": True},
}
PROMPT = [5, 17, 99, 3, 3, 120, 64, 8, 1, 77, 2, 41, 30]
OTHERS = [[9, 8, 7], [100, 1, 50, 51, 52, 53, 20]]
COUNT = 16
SPLITS = [(4,), (1, 3), (2, 1, 1), (1, 1, 1, 1)]

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A case's folder, made once."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = make_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3_moe", **(SMALL | CASES[case]))
        return made[case]

    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backends", RINGS)
def test_greedy_tokens_are_those_of_transformers(case: str, backends: Sequence[str], checkpoint: Checkpoints) -> None:
    expected = reference_answer(checkpoint(case), PROMPT, COUNT)
    assert len(set(expected)) > 4, "an answer that repeats itself tests little"
    for counts in SPLITS if backends == ("torch",) else SPLITS[len(backends) - 1 :: 2]:
        assert LocalRing(checkpoint(case), counts, backends=backends).answer(PROMPT, COUNT) == expected, counts
