"""Models with experts against transformers in float32: whole, in every split, in chunks and in shared batches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kafila.errors import ModelIncomplete, UnsupportedModel
from kafila.plan import manifest_from_config, read_bytes
from kafila.shard.decoder import logits_of
from kafila.shard.formats import Affine
from kafila.shard.manifest import block_bytes, model_manifest, open_checkpoint
from kafila.shard.schemes import SCHEMES
from kafila.types import Segment
from tests.shard.backends import RINGS, needs_mlx
from tests.shard.checkpoints import edit_config, make_checkpoint, reference_answer, reference_logits
from tests.shard.quantized import SINGLE, Override, mlx_checkpoint
from tests.shard.rings import OTHERS, PROMPT, LocalRing, assert_every_ring_answers

SMALL: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "seed": 2}
CASES: dict[str, dict[str, Any]] = {
    "normalised": {"norm_topk_prob": True},
    "weights as they are, sharded": {"sharded": True, "attention_bias": True, "num_experts_per_tok": 3},
    "every second block": {"decoder_sparse_step": 2, "norm_topk_prob": True},
    "some blocks dense, tied": {"mlp_only_layers": [0, 2], "tied": True},
    "window": {"use_sliding_window": True, "sliding_window": 6, "norm_topk_prob": True},
}
COUNT = 16

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A case's folder, made once."""
    return cache(lambda case: make_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3_moe", **(SMALL | CASES[case])))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backends", RINGS)
def test_greedy_tokens_are_those_of_transformers(case: str, backends: Sequence[str], checkpoint: Checkpoints) -> None:
    assert_every_ring_answers(checkpoint(case), backends, reference_answer(checkpoint(case), PROMPT, COUNT))


@pytest.mark.parametrize("chunk", [1, 5, 12])
@pytest.mark.parametrize("backends", RINGS)
def test_prefill_in_chunks_changes_nothing(chunk: int, backends: Sequence[str], checkpoint: Checkpoints) -> None:
    folder = checkpoint("every second block")
    answer = reference_answer(folder, PROMPT, COUNT)
    assert LocalRing(folder, (1, 3), backends=backends).answer(PROMPT, COUNT, chunk=chunk) == answer


@pytest.mark.parametrize("backends", RINGS)
def test_requests_that_share_batches_are_answered_as_alone(backends: Sequence[str], checkpoint: Checkpoints) -> None:
    folder = checkpoint("weights as they are, sharded")
    prompts = [PROMPT, *OTHERS]
    ring = LocalRing(folder, (2, 2), backends=backends)
    segments = [Segment(slot, 0, len(prompt), sample=True) for slot, prompt in enumerate(prompts)]
    answers = [[token] for token in ring.step(segments, [token for prompt in prompts for token in prompt])]
    while len(answers[0]) < COUNT:
        segments = [
            Segment(slot, len(prompt) + len(answers[slot]) - 1, 1, sample=True) for slot, prompt in enumerate(prompts)
        ]
        for answer, token in zip(answers, ring.step(segments, [answer[-1] or 0 for answer in answers]), strict=True):
            answer.append(token)
    assert answers == [reference_answer(folder, prompt, COUNT) for prompt in prompts]


def test_a_long_prompt_goes_through_experts_in_their_order(checkpoint: Checkpoints) -> None:
    """So many rows that kernels are given them sorted."""
    folder, tokens = checkpoint("normalised"), [(7 * index) % 131 for index in range(90)]
    exact = reference_logits(folder, tokens)
    for backends in (("torch",), ("mlx",)):
        torch.testing.assert_close(_logits(folder, "float32", tokens, backends), exact, rtol=1e-3, atol=2e-3)


def _logits(
    folder: Path, dtype: str, tokens: Sequence[int], backends: Sequence[str] = ("torch",), quantize: str = ""
) -> torch.Tensor:
    """(tokens, vocab): the head's logits of every row."""
    ring = LocalRing(folder, (2, 2), dtype=dtype, backends=backends, quantize=quantize)
    head = ring.shards[0]
    hidden = ring.forward([Segment(0, 0, len(tokens), sample=False)], tokens)
    assert head.head is not None
    ops = head._ops
    with ops.scope():
        rows = ops.from_bytes(hidden, dtype, ring.config.hidden)
        return torch.from_numpy(ops.to_numpy(logits_of(ops, head.head, 0.0, rows)))


@needs_mlx
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["packed", "dense", "mlx"])
def test_sixteen_bits_are_about_as_close_to_float32_as_transformers(
    dtype: str, way: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the median: a row that another rounding sends through another expert is another row. And a token alone comes
    out as within a prompt, though it goes through its experts another way."""
    if way == "dense":
        monkeypatch.setattr("kafila.shard.torch_ops._can_pack", lambda: False)
    folder = checkpoint("normalised")
    exact = reference_logits(folder, PROMPT)
    theirs = (reference_logits(folder, PROMPT, dtype) - exact).abs().median()
    backends = ("mlx",) if way == "mlx" else ("torch",)
    assert (_logits(folder, dtype, PROMPT, backends) - exact).abs().median() <= 1.5 * theirs
    ring = LocalRing(folder, (2, 2), dtype=dtype, backends=backends)
    whole = ring.forward([Segment(0, 0, 3, sample=False)], PROMPT[:3])
    single = b"".join(ring.forward([Segment(1, at, 1, sample=False)], [PROMPT[at]]) for at in range(3))
    torch.testing.assert_close(_rows(single, dtype), _rows(whole, dtype), rtol=0.05, atol=0.1)


def _rows(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).float()


@needs_mlx
@pytest.mark.parametrize("backends", [("torch",), ("mlx",)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_are_quantized_while_loading(scheme: str, backends: Sequence[str], tmp_path: Path) -> None:
    """The logits of a prompt stay near what they were, and a token's row is what it is within its prompt."""
    options = SMALL | {"hidden_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 8}
    folder = make_checkpoint(tmp_path, "qwen3_moe", **options)
    exact = reference_logits(folder, PROMPT).log_softmax(-1)
    ours = _logits(folder, "bfloat16", PROMPT, backends, scheme).log_softmax(-1)
    assert 0 < float((exact.exp() * (exact - ours)).sum(-1).median()) < {"int8": 0.02, "int4": 0.3}[scheme]
    ring = LocalRing(folder, (2, 2), dtype="bfloat16", backends=backends, quantize=scheme)
    whole = ring.forward([Segment(0, 0, 2, sample=False)], PROMPT[:2])
    single = b"".join(ring.forward([Segment(1, at, 1, sample=False)], [PROMPT[at]]) for at in range(2))
    torch.testing.assert_close(_rows(single, "bfloat16"), _rows(whole, "bfloat16"), rtol=0.05, atol=0.15)


@needs_mlx
def test_what_mlx_quantized_is_read_stacked_as_it_is(tmp_path: Path) -> None:
    overrides: dict[str, Override] = {
        "model.layers.0.mlp.gate": {"bits": 8, "group_size": 64},
        "model.layers.1.mlp.switch_mlp.gate_proj": {"bits": 8, "group_size": 32},
        "model.layers.2.mlp.gate": False,
    }
    options = SMALL | {"moe_intermediate_size": 64, "norm_topk_prob": True, "mlp_only_layers": [3]}
    stored, twin = mlx_checkpoint(tmp_path, "qwen3_moe", Affine(4, 32), overrides, **options)
    expected = reference_answer(twin, PROMPT, COUNT)
    assert len(set(expected)) > 4, "an answer that repeats itself tests little"
    for counts, backends in [((4,), ("torch",)), ((1, 3), ("mlx",)), ((1, 1, 1, 1), ("torch", "mlx"))]:
        assert LocalRing(stored, counts, backends=backends).answer(PROMPT, COUNT) == expected, counts


@pytest.mark.parametrize("case", ["normalised", "some blocks dense, tied", "every second block"])
def test_sizes_are_those_of_the_files_and_of_the_configuration_alone(case: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(case)
    opened = open_checkpoint(folder)
    sizes = model_manifest("m", opened.config, "float32")
    values = json.loads((folder / "config.json").read_text())
    assert sizes == manifest_from_config(values, "m")
    assert opened.config.experts is not None
    blocks = [block_bytes(opened.config, index, 4) for index in range(4)]
    assert sizes.block_bytes == max(blocks)
    assert read_bytes(sizes, 10_000) == pytest.approx(sum(blocks) / 4, abs=1)
    expert = 3 * 48 * 32 * 4
    idle = expert * (6 - 2) * sum(opened.config.experts.sparse)
    assert read_bytes(sizes) == pytest.approx((sum(blocks) - idle) / 4, abs=1)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", **SMALL)
    tensors = load_file(folder / SINGLE)
    name = "model.layers.2.mlp.experts.4.up_proj.weight"
    missing = tensors.pop(name)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(ModelIncomplete, match=f"model.safetensors has no tensor {re.escape(name)}"):
        open_checkpoint(folder)
    tensors[name] = missing[1:].clone()
    save_file(tensors, folder / SINGLE)
    with pytest.raises(ModelIncomplete, match=r"experts\.4\.up_proj\.weight has shape \[31, 48\]"):
        open_checkpoint(folder)


def test_experts_stacked_without_being_quantized_are_declined_in_words(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", **SMALL)
    tensors = {name: tensor for name, tensor in load_file(folder / SINGLE).items() if ".experts." not in name}
    tensors["model.layers.0.mlp.switch_mlp.up_proj.weight"] = torch.zeros(6, 32, 48)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(UnsupportedModel, match="experts stacked"):
        open_checkpoint(folder)


def test_more_experts_for_a_token_than_there_are_make_no_sense(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", **SMALL)
    edit_config(folder, num_experts_per_tok=7)
    with pytest.raises(ModelIncomplete, match="7 of 6 experts"):
        open_checkpoint(folder)
    edit_config(folder, num_experts_per_tok=2, num_local_experts=None, num_experts=6)  # as transformers 4 has it
    assert open_checkpoint(folder).config.experts is not None
