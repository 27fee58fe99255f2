"""What few bits cost the demonstration model, on the first words of the benchmark's text."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kafila.shard.manifest import open_checkpoint
from tests.integration.oracle import demonstration_model

BENCH = Path(__file__).parents[2] / "bench"
TOKENS = 512


def test_eight_bits_cost_a_hundredth_and_four_six(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demonstration_model()
    monkeypatch.syspath_prepend(BENCH)
    bench: Any = import_module("perplexity")
    checkpoint = open_checkpoint(folder)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(bench.TEXT.read_text()).ids[:TOKENS]
    plain = bench.perplexity(checkpoint, tokens, "bfloat16", 1)
    for scheme, most in (("int8", 0.01), ("int4", 0.06)):
        config = bench.with_scheme(checkpoint.config, scheme)
        few = bench.perplexity(bench.replace(checkpoint, config=config), tokens, "bfloat16", 1)
        assert abs(few / plain - 1) < most, scheme
