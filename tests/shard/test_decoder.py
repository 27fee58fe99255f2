"""The decoder against transformers in float32, whole and in every split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import DeviceError, ProtocolError
from kafila.shard.decoder import logits_of
from kafila.shard.torch_ops import TorchOps
from kafila.types import Sampling, Segment
from tests.shard.backends import RINGS, needs_mlx
from tests.shard.checkpoints import VOCAB, make_checkpoint, reference_answer, reference_logits
from tests.shard.rings import GREEDY, OTHERS, PROMPT, SPLITS, LocalRing, assert_every_ring_answers

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, sharded": ("llama", {"tied": True, "sharded": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama no grouping": ("llama", {"num_key_value_heads": 6}),
    "llama one key head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 6, "sharded": True}),
    "qwen2 tied": ("qwen2", {"tied": True}),
    "qwen2 sharded": ("qwen2", {"sharded": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "gemma2": (
        "gemma2",
        {"tied": True, "sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    ),
    "gemma2 sharded": ("gemma2", {"sharded": True, "sliding_window": 32}),
    "gemma2 uncapped": ("gemma2", {"attn_logit_softcapping": None, "attention_bias": True}),
    "gemma3": ("gemma3", {"tied": True, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24}),
    "gemma3 ropes": ("gemma3", {"sliding_window": 5, "sliding_window_pattern": 3, "rope_parameters": GEMMA3_ROPES}),
    "gemma3 that sees": ("gemma3 that sees", {"tied": True, "sliding_window": 6, "sharded": True}),
    "qwen3": ("qwen3", {"sharded": True}),
    "qwen3 tied": ("qwen3", {"tied": True, "head_dim": 32}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
}
COUNT = 24

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A case's folder, made once."""

    def folder(case: str) -> Path:
        family, options = CASES[case]
        return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, **options)

    return cache(folder)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backends", RINGS)
def test_greedy_tokens_are_those_of_transformers(case: str, backends: Sequence[str], checkpoint: Checkpoints) -> None:
    assert_every_ring_answers(checkpoint(case), backends, reference_answer(checkpoint(case), PROMPT, COUNT))


@pytest.mark.parametrize("case", ["llama", "qwen2 window", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 12])
@pytest.mark.parametrize("backends", [RINGS[0], RINGS[-1]])
def test_prefill_in_chunks_changes_nothing(
    case: str, chunk: int, backends: Sequence[str], checkpoint: Checkpoints
) -> None:
    answer = reference_answer(checkpoint(case), PROMPT, COUNT)
    assert LocalRing(checkpoint(case), (2, 2), backends=backends).answer(PROMPT, COUNT, chunk=chunk) == answer


@pytest.mark.parametrize("case", ["llama", "qwen2 window", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("backends", RINGS)
def test_requests_that_share_batches_are_answered_as_alone(
    case: str, backends: Sequence[str], checkpoint: Checkpoints
) -> None:
    prompts = [PROMPT, *OTHERS]
    alone = [reference_answer(checkpoint(case), prompt, COUNT) for prompt in prompts]
    ring = LocalRing(checkpoint(case), (3, 1), backends=backends)
    # The first decodes while the second prefills in two chunks and the third in one.
    first = [ring.prefill(PROMPT, slot=2)]
    tokens = [first[0], *prompts[1][:2], *prompts[2]]
    drawn = ring.step(
        [
            Segment(2, len(PROMPT), 1, sample=True),
            Segment(0, 0, 2, sample=False),
            Segment(1, 0, len(prompts[2]), sample=True),
        ],
        tokens,
    )
    assert drawn[1] is None
    answers = [[first[0], drawn[0]], [], [drawn[2]]]
    step = [Segment(0, 2, 1, sample=True), Segment(2, len(PROMPT) + 1, 1, sample=True)]
    second, third = ring.step(step, [prompts[1][2], answers[0][1] or 0])
    answers[1].append(second)
    answers[0].append(third)
    slots = (2, 0, 1)
    while min(map(len, answers)) < COUNT:
        batch = [
            Segment(slot, len(prompt) + len(answer) - 1, 1, sample=True)
            for slot, prompt, answer in zip(slots, prompts, answers, strict=True)
        ]
        for answer, token in zip(answers, ring.step(batch, [answer[-1] or 0 for answer in answers]), strict=True):
            answer.append(token)
    assert [answer[:COUNT] for answer in answers] == alone


@pytest.mark.parametrize("backends", RINGS)
def test_a_batch_may_hold_one_slots_segments_one_after_another(
    backends: Sequence[str], checkpoint: Checkpoints
) -> None:
    ring = LocalRing(checkpoint("llama"), (2, 2), backends=backends)
    parts = [Segment(0, 0, 5, sample=False), Segment(1, 0, 3, sample=True), Segment(0, 5, len(PROMPT) - 5, sample=True)]
    drawn = ring.step(parts, [*PROMPT[:5], *OTHERS[0], *PROMPT[5:]])
    assert drawn[0] is None
    assert drawn[2] == reference_answer(checkpoint("llama"), PROMPT, 1)[0]
    assert drawn[1] == reference_answer(checkpoint("llama"), OTHERS[0], 1)[0]


@pytest.mark.parametrize("case", ["llama biases", "qwen2 window", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("backends", RINGS[:2])
@pytest.mark.parametrize(("dtype", "scheme"), [("float32", ""), ("bfloat16", ""), ("float32", "int8")])
def test_last_rows_are_the_same_alone(
    case: str, backends: Sequence[str], dtype: str, scheme: str, checkpoint: Checkpoints
) -> None:
    """And so are the answers that follow: nothing of the last block's cache is left out."""
    rings = [LocalRing(checkpoint(case), (1, 3), dtype=dtype, backends=backends, quantize=scheme) for _ in range(2)]
    width = rings[0].config.hidden
    batches: list[tuple[list[Segment], list[int]]] = [
        ([Segment(0, 0, 9, sample=False), Segment(1, 0, 3, sample=True)], [*PROMPT[:9], *OTHERS[0]]),
        ([Segment(1, 3, 1, sample=True), Segment(0, 9, 4, sample=True)], [7, *PROMPT[9:]]),
        ([Segment(0, 13, 1, sample=True), Segment(1, 4, 1, sample=True)], [5, 6]),
    ]
    for segments, tokens in batches:
        whole, last = (
            torch.frombuffer(bytearray(ring.forward(segments, tokens, last_only=only)), dtype=getattr(torch, dtype))
            for ring, only in zip(rings, (False, True), strict=True)
        )
        ends = torch.tensor([segment.length for segment in segments]).cumsum(0) - 1
        torch.testing.assert_close(last.view(-1, width), whole.view(-1, width)[ends], rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("backends", RINGS)
def test_a_slot_is_reused_by_starting_at_zero(backends: Sequence[str], checkpoint: Checkpoints) -> None:
    ring = LocalRing(checkpoint("qwen3"), (2, 2), backends=backends)
    ring.answer(PROMPT, COUNT)
    assert ring.answer(OTHERS[0], COUNT) == reference_answer(checkpoint("qwen3"), OTHERS[0], COUNT)


@pytest.mark.parametrize("backends", RINGS)
def test_a_wrong_guess_is_dropped_by_starting_earlier(backends: Sequence[str], checkpoint: Checkpoints) -> None:
    ring = LocalRing(checkpoint("llama"), (2, 2), backends=backends)
    answer = ring.answer(PROMPT, 4)
    start = len(PROMPT)
    ring.forward([Segment(0, start, 6, sample=False)], [1, 2, 3, 4, 5, 6])
    (token,) = ring.step([Segment(0, start, 3, sample=True)], answer[:3])
    assert token == answer[3]


@given(cuts=st.lists(st.integers(1, 12), max_size=5, unique=True), split=st.sampled_from(SPLITS))
def test_logits_do_not_depend_on_chunks_or_splits(cuts: list[int], split: tuple[int, ...]) -> None:
    ring = _ring(split)
    edges = [0, *sorted(cuts), len(PROMPT)]
    rows = b""
    for start, end in pairwise(edges):
        rows += ring.forward([Segment(0, start, end - start, sample=False)], PROMPT[start:end])
    whole = ring.forward([Segment(1, 0, len(PROMPT), sample=False)], PROMPT)
    np.testing.assert_allclose(np.frombuffer(rows, "<f4"), np.frombuffer(whole, "<f4"), rtol=2e-4, atol=2e-4)


_RINGS: dict[tuple[int, ...], LocalRing] = {}
_FOLDERS: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _rings_for_properties(checkpoint: Checkpoints) -> None:
    """Hypothesis calls a test many times: what is costly is made once, here."""
    _FOLDERS.append(checkpoint("llama"))


def _ring(split: tuple[int, ...]) -> LocalRing:
    if split not in _RINGS:
        _RINGS[split] = LocalRing(_FOLDERS[-1], split)
    return _RINGS[split]


def _logits(
    folder: Path, dtype: str, tokens: list[int], backends: Sequence[str] = ("torch",), quantize: str = ""
) -> torch.Tensor:
    """(tokens, vocab): the head's logits of every row."""
    ring = LocalRing(folder, (2, 2), dtype=dtype, backends=backends, quantize=quantize)
    head = ring.shards[0]
    hidden = ring.forward([Segment(0, 0, len(tokens), sample=False)], tokens)
    weights = head.head
    assert weights is not None
    with head._ops.scope():
        rows = head._ops.from_bytes(hidden, dtype, ring.config.hidden)
        return torch.from_numpy(head._ops.to_numpy(logits_of(head._ops, weights, ring.config.logit_cap, rows)))


@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("backends", RINGS)
def test_logits_are_those_of_transformers(case: str, backends: Sequence[str], checkpoint: Checkpoints) -> None:
    """More than their order, which a cap at the end would leave."""
    theirs = reference_logits(checkpoint(case), PROMPT)
    torch.testing.assert_close(_logits(checkpoint(case), "float32", PROMPT, backends), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_a_family_with_more_norms_can_be_quantized(case: str, scheme: str, checkpoint: Checkpoints) -> None:
    exact = reference_logits(checkpoint(case), PROMPT)
    quantized = _logits(checkpoint(case), "bfloat16", PROMPT, quantize=scheme)
    lost = (quantized - exact).abs().mean() / exact.std()
    assert lost < (0.05 if scheme == "int8" else 0.3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama biases", "qwen2 tied", "qwen3", "qwen2 window", "gemma2", "gemma3"])
def test_sixteen_bits_are_at_least_as_close_to_float32_as_transformers(
    case: str, dtype: str, checkpoint: Checkpoints
) -> None:
    folder = checkpoint(case)
    exact = reference_logits(folder, PROMPT)
    ours = (_logits(folder, dtype, PROMPT) - exact).abs().mean()
    theirs = (reference_logits(folder, PROMPT, dtype) - exact).abs().mean()
    assert ours <= theirs * 1.2


@pytest.mark.parametrize("case", ["llama", "llama biases", "qwen2 window", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_fused_block_gives_the_same_numbers(
    case: str, dtype: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [Segment(1, 0, 7, sample=False), Segment(0, 0, 1, sample=False), Segment(2, 0, 9, sample=False)]
    tokens = list(range(17))
    fused = LocalRing(checkpoint(case), (4,), dtype=dtype).forward(segments, tokens)
    monkeypatch.setattr(TorchOps, "fused_block", lambda *_: None)
    assert LocalRing(checkpoint(case), (4,), dtype=dtype).forward(segments, tokens) == fused


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama biases", "qwen3 tied", "qwen2 window", "gemma2", "gemma3"])
def test_devices_that_pack_nothing_agree(
    case: str, dtype: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of GPUs, and of processors without the packed kernels: activations of 16 bits, real rotations."""
    monkeypatch.setattr("kafila.shard.torch_ops._can_pack", lambda: False)
    exact = reference_logits(checkpoint(case), PROMPT)
    ours = (_logits(checkpoint(case), dtype, PROMPT) - exact).abs().mean()
    theirs = (reference_logits(checkpoint(case), PROMPT, dtype) - exact).abs().mean()
    assert ours <= theirs * 1.5


@needs_mlx
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama biases", "qwen3 tied", "qwen2 window", "gemma2", "gemma3"])
@pytest.mark.parametrize("backends", [("mlx",), ("torch", "mlx")])
def test_backends_agree_in_sixteen_bits(
    case: str, dtype: str, backends: Sequence[str], checkpoint: Checkpoints
) -> None:
    """MLX keeps activations in 16 bits, as transformers does."""
    exact = reference_logits(checkpoint(case), PROMPT)
    ours = (_logits(checkpoint(case), dtype, PROMPT, backends) - exact).abs().mean()
    theirs = (reference_logits(checkpoint(case), PROMPT, dtype) - exact).abs().mean()
    assert ours <= theirs * 1.5


@needs_mlx
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_backends_agree_on_what_is_quantized(scheme: str, tmp_path: Path, *, tied: bool) -> None:
    """A member on MLX to what torch's 8-bit kernel rounds activations to, far below what quantizing loses; a head on
    MLX, which holds the embedding in few bits where torch leaves it in its file, to what quantizing loses."""
    options: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
    folder = make_checkpoint(tmp_path, "llama", tied=tied, **options)
    exact, wanted = (_logits(folder, "float32", PROMPT, quantize=how) for how in ("", scheme))
    lost = (exact - wanted).abs().mean()
    assert (_logits(folder, "float32", PROMPT, ("torch", "mlx"), scheme) - wanted).abs().mean() < lost / 10
    for backends in (("mlx",), ("mlx", "torch")):
        assert (_logits(folder, "float32", PROMPT, backends, scheme) - exact).abs().mean() < 1.5 * lost


def test_matrices_in_pieces_change_nothing(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _logits(checkpoint("llama biases"), "bfloat16", PROMPT)
    monkeypatch.setattr("kafila.shard.torch_matrices.PACK_WEIGHTS", 1000)
    torch.testing.assert_close(_logits(checkpoint("llama biases"), "bfloat16", PROMPT), whole, rtol=1e-2, atol=1e-2)


def test_sampling_is_by_seed_and_position_and_not_by_company(checkpoint: Checkpoints) -> None:
    ring = LocalRing(checkpoint("llama"), (4,))
    how = Sampling(temperature=1.0, seed=7)
    alone = ring.step([Segment(0, 0, len(PROMPT), sample=True)], PROMPT, how)[0]
    together = ring.step(
        [Segment(1, 0, 3, sample=True), Segment(0, 0, len(PROMPT), sample=True)], [*OTHERS[0], *PROMPT], how
    )
    assert together[1] == alone
    seeds = [Sampling(1.0, seed=seed) for seed in range(12)]
    others = [ring.step([Segment(0, 0, 13, sample=True)], PROMPT, seed) for seed in seeds]
    assert len(set(others)) > 3
    assert [ring.step([Segment(0, 12, 1, sample=True)], PROMPT[12:], seed) for seed in seeds] == others


ONE = [Segment(0, 0, 1, sample=True)]


@pytest.mark.parametrize(
    ("segments", "tokens", "said"),
    [
        (ONE, [1, 2], "1 rows came with 2 tokens"),
        (ONE, [VOCAB], "does not exist"),
        (ONE, [-1], "does not exist"),
        ([Segment(3, 0, 1, sample=True)], [1], "slot 3 of 3"),
        ([Segment(-1, 0, 1, sample=True)], [1], "slot -1 of 3"),
        ([Segment(2, 1, 1, sample=True)], [1], "from position 1 on for slot 2, which holds 0"),
        ([Segment(0, 0, 0, sample=True)], [], "0 tokens"),
        ([Segment(0, 0, 129, sample=True)], [1] * 129, "--context"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_and_changes_nothing(
    segments: list[Segment], tokens: list[int], said: str
) -> None:
    ring = _ring((4,))
    with pytest.raises(ProtocolError, match=said):
        ring.forward(segments, tokens)
    assert ring.answer(PROMPT, 3) == reference_answer(_FOLDERS[-1], PROMPT, 3)


def test_activations_of_the_wrong_size_or_type_are_refused() -> None:
    ring = _ring((1, 3))
    last = ring.shards[1]
    with pytest.raises(ProtocolError, match="191 bytes, not 192"):
        last.forward(ONE, None, b"\0" * 191, "float32")
    with pytest.raises(ProtocolError, match="float8"):
        last.forward(ONE, None, b"\0" * 192, "float8")
    with pytest.raises(ProtocolError, match="only the head"):
        last.sample(ONE, [GREEDY], b"\0" * 192, "float32")
    with pytest.raises(ProtocolError, match="only the head"):
        last.forward(ONE, [1], None, "float32")


def test_edges_may_carry_another_dtype_than_the_weights(checkpoint: Checkpoints) -> None:
    ring = LocalRing(checkpoint("llama"), (2, 2))
    ring.dtype = "float16"
    ours = np.frombuffer(ring.forward([Segment(0, 0, 13, sample=False)], PROMPT), "<f2").astype("f4")
    ring.dtype = "float32"
    exact = np.frombuffer(ring.forward([Segment(0, 0, 13, sample=False)], PROMPT), "<f4")
    np.testing.assert_allclose(ours, exact, rtol=0.02, atol=0.02)


def test_an_interrupted_shard_gives_up_between_blocks(checkpoint: Checkpoints) -> None:
    ring = LocalRing(checkpoint("llama"), (4,))
    ring.shards[0].interrupt()
    with pytest.raises(DeviceError, match="stopped"):
        ring.forward(ONE, [1])
