"""Prompts through matrices as they are stored. Any CPU can do the arithmetic; which is quick at it is not tested."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812  - torch's own name for it

from kafila.shard import torch_prompts as prompts
from kafila.shard.decoder import logits_of
from kafila.shard.ops import PROMPT_ROWS
from kafila.shard.torch_ops import TorchOps
from kafila.types import Segment
from tests.shard.checkpoints import VOCAB, make_checkpoint, reference_logits
from tests.shard.rings import LocalRing
from tests.shard.test_decoder import CASES

ROWS = PROMPT_ROWS + 9
TOKENS = [index * 29 % VOCAB for index in range(ROWS)]


pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines,
    reason="without packed matrices there is nothing that stored ones are quicker than",
)


@pytest.fixture(autouse=True)
def _quick_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "multiplies_bfloat16", lambda: True)


def ring_of(folder: Path, spare_bytes: int, context: int = 128) -> LocalRing:
    """Two members in bfloat16."""
    return LocalRing(folder, (2, 2), dtype="bfloat16", context=context, spare_bytes=spare_bytes)


def logits(ring: LocalRing, hidden: bytes) -> torch.Tensor:
    """Of every row."""
    head = ring.shards[0].head
    assert head is not None
    ops = TorchOps("cpu", "bfloat16", threads=1)
    with ops.scope():
        x = ops.from_bytes(hidden, "bfloat16", ring.config.hidden)
        return torch.from_numpy(ops.to_numpy(logits_of(ops, head, ring.config.logit_cap, x)))


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_as_close_to_float32_as_transformers_in_bfloat16(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    folder = make_checkpoint(tmp_path, family, dtype="bfloat16", **options)
    exact, theirs = (reference_logits(folder, TOKENS, dtype) for dtype in ("float32", "bfloat16"))
    ring = ring_of(folder, 1 << 30)
    assert all(weights.stored for shard in ring.shards for weights in shard.weights)
    ours = logits(ring, ring.forward([Segment(0, 0, ROWS, sample=True)], TOKENS))
    assert (ours - exact).square().mean() <= 1.1 * (theirs - exact).square().mean()
    assert (ours - exact).abs().max() > 0


@pytest.mark.parametrize("case", ["llama biases", "qwen2 window", "qwen3", "gemma2", "gemma3"])
def test_a_prompt_may_go_on_by_either_way(case: str, tmp_path: Path) -> None:
    """Keys and values that one way wrote are the other's: a long chunk, a short one, a long one, a token."""
    family, options = CASES[case]
    folder = make_checkpoint(tmp_path, family, dtype="bfloat16", **options)
    tokens, ends = [*TOKENS, *TOKENS], (ROWS, ROWS + 5, 2 * ROWS - 1, 2 * ROWS)
    rows = {}
    for spare in (0, 1 << 30):
        ring, start, rows[spare] = ring_of(folder, spare), 0, b""
        for end in ends:
            rows[spare] += ring.forward([Segment(1, start, end - start, sample=True)], tokens[start:end])
            start = end
    ring = ring_of(folder, 0)
    packed, stored = (logits(ring, hidden) for hidden in rows.values())
    exact, theirs = (reference_logits(folder, tokens, dtype) for dtype in ("float32", "bfloat16"))
    assert (stored - exact).square().mean() <= 1.1 * (theirs - exact).square().mean()
    assert rows[0] != rows[1 << 30], "both went the same way"
    assert not torch.equal(packed, stored)


@pytest.mark.parametrize("case", ["llama biases", "gemma2"])
def test_last_rows_alone(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    folder = make_checkpoint(tmp_path, family, dtype="bfloat16", **options)
    segments = [Segment(0, 0, 4, sample=True), Segment(1, 0, ROWS - 4, sample=False)]
    whole, last = (ring_of(folder, 1 << 30).forward(segments, TOKENS, last_only=only) for only in (False, True))
    width = len(whole) // ROWS
    assert len(last) == 2 * width
    for row, end in zip((last[:width], last[width:]), (4, ROWS), strict=True):
        one, other = (
            torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
            for data in (row, whole[(end - 1) * width :][:width])
        )
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


def test_few_rows_go_through_packed_matrices(tmp_path: Path) -> None:
    """Numbers of a batch with few rows do not depend on what prompts use."""
    folder = make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    rows = PROMPT_ROWS - 1
    segments = [Segment(0, 0, rows, sample=True)]
    without, beside = (ring_of(folder, spare).forward(segments, TOKENS[:rows]) for spare in (0, 1 << 30))
    assert without == beside


@pytest.mark.parametrize(
    ("dtype", "stored", "takes"),
    [
        ("bfloat16", "BF16", True),
        ("bfloat16", "F32", False),
        ("bfloat16", "F16", False),
        ("float16", "BF16", False),
        ("float32", "BF16", False),
    ],
)
def test_what_is_taken_as_it_is_stored(dtype: str, stored: str, *, takes: bool) -> None:
    assert TorchOps("cpu", dtype, threads=1).takes_stored(stored) == takes


@pytest.mark.parametrize(
    ("known", "multiplies"),
    [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx512_bf16": False}, False), ({}, False)],
)
def test_what_processors_multiply(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any], *, multiplies: bool) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert prompts.multiplies_bfloat16() == multiplies


@pytest.mark.parametrize("multiplies", [True, False, None])
def test_what_processors_multiply_in_older_versions(monkeypatch: pytest.MonkeyPatch, multiplies: bool | None) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    if multiplies is not None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: multiplies, raising=False)
    assert prompts.multiplies_bfloat16() == bool(multiplies)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_rows_are_made_up_and_cut_again(rows: int) -> None:
    x, weight, bias = (torch.randn(size).bfloat16() for size in ((rows, 8), (5, 8), (5,)))
    y = prompts.padded_linear(x, weight, bias)
    torch.testing.assert_close(y.float(), F.linear(x.float(), weight.float(), bias.float()), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("change", ["shorter", "touched", "gone"])
def test_a_file_that_changes_is_not_read_any_more(change: str, tmp_path: Path) -> None:
    """A shorter one's pages would end the process."""
    folder = make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    segments = [Segment(0, 0, ROWS, sample=True)]
    packed, stored = (ring_of(folder, spare).forward(segments, TOKENS) for spare in (0, 1 << 30))
    assert packed != stored
    ring = ring_of(folder, 1 << 30)
    assert ring.forward(segments, TOKENS) == stored
    # The embedding is the head's alone, and mapped from the same file here: what follows is a member's in the middle.
    hidden = ring.shards[0].forward(segments, TOKENS, None, "bfloat16")
    file = folder / "model.safetensors"
    if change == "shorter":
        with file.open("r+b") as stream:
            stream.truncate(0)
    elif change == "touched":
        os.utime(file, ns=(0, 0))
    else:
        file.unlink()
    after = ring.shards[1].forward(segments, None, hidden, "bfloat16")
    assert after != stored
    assert len(after) == len(stored)


def test_biases_may_be_of_another_dtype(tmp_path: Path) -> None:
    """As some checkpoints have them, and not all alike."""
    folder = make_checkpoint(tmp_path, "qwen2", dtype="bfloat16")
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    changed = {
        name: tensor.float() if name.endswith(("q_proj.bias", "v_proj.bias")) else tensor
        for name, tensor in tensors.items()
    }
    segments = [Segment(0, 0, ROWS, sample=True)]
    before = ring_of(folder, 1 << 30).forward(segments, TOKENS)
    safetensors.torch.save_file(changed, file, {"format": "pt"})
    assert ring_of(folder, 1 << 30).forward(segments, TOKENS) == before
