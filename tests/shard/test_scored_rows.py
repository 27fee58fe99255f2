"""A vocabulary divided between the head and a ring's last member, against the head alone."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kafila.errors import ModelIncomplete, ProtocolError
from kafila.shard.decoder import logits_of
from kafila.shard.formats import Affine
from kafila.shard.load import load_shard
from kafila.shard.manifest import Checkpoint, open_checkpoint, own_specs, own_tensors
from kafila.shard.torch_ops import TorchOps
from kafila.types import Best, BlockRange, Segment, scored_from
from tests.shard.backends import RINGS, needs_mlx
from tests.shard.checkpoints import VOCAB, make_checkpoint, reference_answer
from tests.shard.quantized import WIDE, mlx_checkpoint
from tests.shard.rings import GREEDY, PROMPT, LocalRing, better

PERCENT = 50
FIRST = scored_from(VOCAB, PERCENT)
COUNT = 24
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"sharded": True}),
    "tied": ("llama", {"tied": True}),
    "capped, tied": ("gemma2", {"tied": True, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "capped": ("gemma2", {"sliding_window": 6, "final_logit_softcapping": 2.0}),
    "wide": ("llama", WIDE),
    "wide, tied": ("llama", {**WIDE, "tied": True, "vocab_size": 160}),
}
STORED: dict[str, tuple[str, Affine, dict[str, Any]]] = {
    "4 bits": ("llama", Affine(4, 64), {"vocab_size": 160}),
    "4 bits, odd": ("qwen3", Affine(4, 32), {}),
    "4 bits, tied": ("qwen2", Affine(4, 32), {"tied": True, "vocab_size": 160}),
    "8 bits": ("llama", Affine(8, 128), {"vocab_size": 160}),
    "8 bits, tied": ("qwen2", Affine(8, 64), {"tied": True}),
}
ONE = [Segment(0, 0, 1, sample=True)]
RAGGED = [Segment(1, 0, 5, sample=True), Segment(0, 0, 3, sample=False), Segment(2, 0, 1, sample=True)]

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A case's checkpoint, made once."""

    def make(case: str) -> Path:
        into = tmp_path_factory.mktemp("checkpoint")
        if case in STORED:
            family, form, options = STORED[case]
            return mlx_checkpoint(into, family, form, {}, **options)[0]
        family, options = CASES[case]
        return make_checkpoint(into, family, **options)

    return cache(make)


@pytest.mark.parametrize("case", ["untied", "tied", "capped", "capped, tied"])
@pytest.mark.parametrize("backends", RINGS)
def test_the_better_of_two_parts_is_the_models_answer(case: str, backends: Sequence[str], folder: Checkpoints) -> None:
    ring = LocalRing(
        folder(case), (1, 2, 1) if len(backends) == 1 else (3, 1), backends=backends, scored_percent=PERCENT
    )
    answer, winners = ring.divided_answer(PROMPT, COUNT)
    assert answer == reference_answer(folder(case), PROMPT, COUNT)
    assert winners == {0, 1}, "one part that always wins tests little"


def _whole(ring: LocalRing, segments: Sequence[Segment], hidden: bytes) -> tuple[np.ndarray[Any, Any], list[int]]:
    """The head's logits of the rows that tokens are drawn from, and the tokens, with nobody's help."""
    head = ring.shards[0]
    assert head.head is not None
    ends = np.cumsum([segment.length for segment in segments])
    drawn = [int(end) - 1 for end, segment in zip(ends, segments, strict=True) if segment.sample]
    with head._ops.scope():
        rows = head._ops.take_rows(head._ops.from_bytes(hidden, ring.dtype, ring.config.hidden), drawn)
        logits = head._ops.to_numpy(logits_of(head._ops, head.head, ring.config.logit_cap, rows))
    tokens = head.sample(segments, [GREEDY] * len(segments), hidden, ring.dtype).tokens
    return logits, [token for token in tokens if token is not None]


def _assert_parts_are_the_whole(ring: LocalRing, *, close: float) -> None:
    """In a ragged batch and in many that decode; ``close``: of logits, by how much their rounding may differ."""
    batches: list[tuple[list[Segment], list[int]]] = [(RAGGED, list(range(40, 49)))]
    batches += [
        ([Segment(0, 3 + at, 1, sample=True), Segment(2, 1 + at, 1, sample=True)], [at, 9 * at]) for at in range(14)
    ]
    winners = set()
    for segments, tokens in batches:
        hidden = ring.forward(segments, tokens)
        parts = ring.parts(segments, hidden)
        logits, drawn = _whole(ring, segments, hidden)
        cut = scored_from(ring.config.vocab, PERCENT)
        for pair, row in zip(parts, logits, strict=True):
            own, other = pair
            assert own.token < cut <= other.token
            np.testing.assert_allclose(
                [own.logit, other.logit], [row[:cut].max(), row[cut:].max()], rtol=close, atol=close
            )
            winners.add(int(other.logit > own.logit))
        assert [better(*pair) for pair in parts] == drawn
    assert winners == {0, 1}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kernels", [True, False])
def test_parts_are_what_the_head_alone_would_find(
    case: str, dtype: str, folder: Checkpoints, monkeypatch: pytest.MonkeyPatch, *, kernels: bool
) -> None:
    """In packed kernels a column is the same number whatever lies beside it. Without them: the path of GPUs."""
    if not kernels:
        monkeypatch.setattr("kafila.shard.torch_ops._can_pack", lambda: False)
    ring = LocalRing(folder(case), (2, 2), dtype=dtype, scored_percent=PERCENT)
    packed = kernels and dtype != "float32"
    _assert_parts_are_the_whole(ring, close=0 if packed else 1e-6 if dtype == "float32" else 0.01)


@pytest.mark.parametrize("case", STORED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_of_a_quantized_checkpoint(case: str, dtype: str, folder: Checkpoints) -> None:
    _assert_parts_are_the_whole(LocalRing(folder(case), (2, 2), dtype=dtype, scored_percent=PERCENT), close=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("case", ["untied", "wide", "wide, tied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_of_what_is_quantized_while_loading(scheme: str, case: str, dtype: str, folder: Checkpoints) -> None:
    ring = LocalRing(folder(case), (2, 2), dtype=dtype, quantize=scheme, scored_percent=PERCENT)
    _assert_parts_are_the_whole(ring, close=1e-5)


@needs_mlx
@pytest.mark.parametrize("case", ["untied", "tied", "capped, tied", "4 bits", "8 bits, tied"])
@pytest.mark.parametrize("turned", [True, False])
def test_parts_on_mlx(case: str, folder: Checkpoints, monkeypatch: pytest.MonkeyPatch, *, turned: bool) -> None:
    """``turned``: dense matrices lie in memory as CPUs like it; else as on a GPU."""
    if not turned:
        monkeypatch.setattr("kafila.shard.mlx_matrices.TURNED_WEIGHTS", 0)
    ring = LocalRing(folder(case), (2, 2), backends=("mlx",), scored_percent=PERCENT)
    _assert_parts_are_the_whole(ring, close=1e-4)


@pytest.mark.parametrize("backends", RINGS[:2])
def test_rows_are_scored_as_they_travel(backends: Sequence[str], folder: Checkpoints) -> None:
    """An edge in fewer bits than its members compute in: both score the same rows."""
    ring = LocalRing(folder("untied"), (2, 2), backends=backends, scored_percent=PERCENT)
    ring.dtype = "bfloat16"
    _assert_parts_are_the_whole(ring, close=1e-5)


def test_who_may_score_what(folder: Checkpoints) -> None:
    ring = LocalRing(folder("untied"), (1, 2, 1), scored_percent=PERCENT)
    head, middle, last = ring.shards
    assert middle.scored is None
    hidden = ring.forward(ONE, [7])
    with pytest.raises(ProtocolError, match="only the last member can score"):
        middle.score(ONE, hidden, "float32")
    with pytest.raises(ProtocolError, match="191 bytes, not 192"):
        last.score(ONE, hidden[:-1], "float32")
    with pytest.raises(ProtocolError, match="only the head"):
        last.sample_part(ONE, hidden, "float32")
    with pytest.raises(ProtocolError, match="191 bytes, not 192"):
        head.sample_part(ONE, hidden[:-1], "float32")
    with pytest.raises(ProtocolError, match="in part"):
        LocalRing(folder("untied"), (2, 2)).shards[0].sample_part(ONE, hidden, "float32")
    unsampled = [Segment(0, 1, 2, sample=False)]
    hidden = ring.forward(unsampled, [1, 2])
    assert ring.parts(unsampled, hidden) == []


def test_without_a_division_nothing_is_held(folder: Checkpoints) -> None:
    ring = LocalRing(folder("untied"), (2, 2), dtype="bfloat16")
    ring.forward(ONE, [7])
    head, last = ring.shards
    assert head.head is not None
    assert head.head.own is None
    assert type(head.head.unembedding).__name__ == "PackedMatrix"
    assert last.scored is None


@pytest.mark.parametrize("percent", [100, 300])
def test_a_plan_that_leaves_a_part_empty_is_refused(percent: int, folder: Checkpoints) -> None:
    for head in (True, False):
        with pytest.raises(ProtocolError, match="one part is empty"):
            _load(open_checkpoint(folder("untied")), head=head, percent=percent)


def _load(checkpoint: Checkpoint, *, head: bool = False, percent: int = PERCENT) -> Any:
    ops = TorchOps("cpu", "float32", threads=1)
    return load_shard(
        ops, checkpoint, BlockRange(3, 4), holds_head=head, slots=1, context=8, scored_percent=percent
    )  # fmt: skip


def _scored(checkpoint: Checkpoint) -> tuple[Best, ...]:
    shard = _load(checkpoint)
    width = checkpoint.config.hidden
    return tuple(shard.score(ONE, struct.pack(f"<{width}f", *(np.arange(width) % 7 - 3)), "float32"))


@pytest.mark.parametrize("case", ["untied", "tied", "4 bits", "4 bits, tied"])
def test_the_last_member_reads_its_rows_and_no_others(case: str, tmp_path: Path, folder: Checkpoints) -> None:
    """Every other byte of the weights may be anything, in every dtype."""
    for path in folder(case).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    checkpoint = open_checkpoint(tmp_path)
    before = _scored(checkpoint)
    own = own_specs(checkpoint, BlockRange(3, 4), holds_head=False, scored_percent=PERCENT)
    for file in {spec.file for spec in checkpoint.tensors.values()}:
        data = (tmp_path / file).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        spoilt = bytearray(data[:start] + b"\xff" * (len(data) - start))
        for spec in own:
            if spec.file == file:
                spoilt[spec.start : spec.end] = data[spec.start : spec.end]
        (tmp_path / file).write_bytes(spoilt)
    assert _scored(checkpoint) == before


@pytest.mark.parametrize("case", ["untied", "tied", "4 bits", "8 bits, tied"])
def test_what_the_last_member_holds_is_its_share(case: str, folder: Checkpoints) -> None:
    checkpoint = open_checkpoint(folder(case))
    vocab = checkpoint.config.vocab
    blocks = BlockRange(3, 4)
    plain = [checkpoint.tensors[name] for name in own_tensors(checkpoint, blocks, holds_head=False)]
    more = own_specs(checkpoint, blocks, holds_head=False, scored_percent=PERCENT)[len(plain) :]
    module = "model.embed_tokens" if "tied" in case.split(", ") else "lm_head"
    whole = sum(spec.end - spec.start for name, spec in checkpoint.tensors.items() if name.startswith(module))
    norm = checkpoint.tensors["model.norm.weight"]
    rows = vocab - scored_from(vocab, PERCENT)
    assert sum(spec.end - spec.start for spec in more) == whole // vocab * rows + norm.end - norm.start
    assert own_specs(checkpoint, blocks, holds_head=False) == plain
    head = own_specs(checkpoint, blocks, holds_head=True)
    assert own_specs(checkpoint, blocks, holds_head=True, scored_percent=PERCENT) == head


def test_rows_that_a_file_lost_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, "llama", sharded=True))
    spec = checkpoint.tensors["lm_head.weight"]
    path = tmp_path / spec.file
    path.write_bytes(path.read_bytes()[: spec.end - 1])
    with pytest.raises(ModelIncomplete, match=rf"lm_head\.weight\[{FIRST}:\] cannot be read.*download"):
        _load(checkpoint)
