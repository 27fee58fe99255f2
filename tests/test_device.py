"""The deployed backend: what a host asked for reaches the offer, and from there every member's shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kafila.backend import Duty
from kafila.device import DeviceBackend, DeviceSettings
from kafila.errors import UsageError
from kafila.shard.decoder import Shard
from kafila.shard.formats import Affine
from kafila.shard.patience import Patience
from kafila.types import BlockRange, Sampling, Segment
from tests.shard.checkpoints import make_checkpoint
from tests.shard.quantized import WIDE, mlx_checkpoint
from tests.shard.web import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("device"), "llama", **WIDE)


@pytest.mark.parametrize(("quantize", "kind"), [("", "PackedMatrix"), ("int8", "RowMatrix"), ("int4", "Int4Matrix")])
async def test_members_hold_what_the_host_asked_for(quantize: str, kind: str, folder: Path) -> None:
    settings = DeviceSettings(
        device="cpu", dtype="auto" if quantize else "bfloat16", quantize=quantize, kv_dtype="float32", threads=1
    )
    host = DeviceBackend(settings)
    offer = await host.offer(str(folder), context=32, slots=1)
    assert (offer.dtype, offer.quantize, offer.kv_dtype) == ("bfloat16", quantize, "float32")
    assert offer.manifest.kv_bytes_per_token_per_block == 2 * 2 * 16 * 4
    friend = DeviceBackend(DeviceSettings(device="cpu", threads=1))
    duty = Duty(BlockRange(1, 3), holds_head=False, slots=1, context=32, dtype=offer.dtype)
    shard = friend._load(offer, duty, lambda _: None, Patience())
    assert isinstance(shard, Shard)
    assert {type(weights.o).__name__ for weights in shard.weights} == {kind}
    assert {str(storage.dtype) for storage in shard._cache.storage} == {"torch.float32"}
    host.close()
    friend.close()


async def test_a_divided_vocabulary_reaches_head_and_last_member(folder: Path) -> None:
    backend = DeviceBackend(DeviceSettings(device="cpu", dtype="bfloat16", threads=1))
    offer = await backend.offer(str(folder), context=32, slots=1)

    def load(first: int, stop: int, *, head: bool) -> Shard[Any]:
        duty = Duty(BlockRange(first, stop), head, slots=1, context=32, dtype=offer.dtype, scored_percent=50)
        shard = backend._load(offer, duty, lambda _: None, Patience())
        assert isinstance(shard, Shard)
        return shard

    one = (Segment(0, 0, 1, sample=True),)
    head, last = load(0, 2, head=True), load(2, 4, head=False)
    hidden = last.forward(one, None, head.forward(one, (7,), None, "bfloat16"), "bfloat16")
    parts = (*head.sample_part(one, hidden, "bfloat16"), *last.score(one, hidden, "bfloat16"))
    (token,) = head.sample(one, (Sampling(),), hidden, "bfloat16").tokens
    assert max(parts).token == token
    assert [part.token >= 64 for part in parts] == [False, True]
    backend.close()


async def test_a_last_member_fetches_its_part_of_the_vocabulary(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(folder) as web:
        backend = DeviceBackend(DeviceSettings(device="cpu", threads=1))
        offer = await backend.offer(web.base, context=32, slots=1)
        duty = Duty(BlockRange(2, 4), holds_head=False, slots=1, context=32, dtype=offer.dtype, scored_percent=50)
        shard = backend._load(offer, duty, lambda _: None, Patience())
        assert isinstance(shard, Shard)
        assert shard.scored is not None
        assert shard.scored.first == 64
        backend.close()


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A checkpoint in MLX's format."""
    return mlx_checkpoint(tmp_path, "llama", Affine(4, 64), {})[0]


async def test_a_quantized_checkpoint_is_not_quantized_again(quantized: Path) -> None:
    backend = DeviceBackend(DeviceSettings(quantize="int8"))
    with pytest.raises(UsageError, match="--quantize"):
        await backend.offer(str(quantized), context=32, slots=1)
    backend.close()


async def test_a_quantized_checkpoint_is_offered_in_its_own_size(quantized: Path, folder: Path) -> None:
    backend = DeviceBackend(DeviceSettings())
    few = await backend.offer(str(quantized), context=32, slots=1)
    plain = await backend.offer(str(folder), context=32, slots=1)
    assert few.dtype == "bfloat16"
    assert plain.dtype == "float32"
    assert few.manifest.block_bytes == pytest.approx(plain.manifest.block_bytes * 4.5 / 32, rel=0.02)
    backend.close()
