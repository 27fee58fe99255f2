"""Two copies of one checkpoint look alike, and no two checkpoints do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kafila.shard.fingerprint import SAMPLE_BYTES, SAMPLES, fingerprint, samples
from kafila.shard.manifest import open_checkpoint
from tests.shard.checkpoints import edit_config, make_checkpoint


def _print(folder: Path) -> str:
    return fingerprint(open_checkpoint(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama")


def test_sharding_and_who_wrote_it_change_nothing(folder: Path, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", "llama", sharded=True)
    edit_config(sharded, transformers_version="4.0.0", _name_or_path="elsewhere")
    assert _print(sharded) == _print(folder)


def test_other_weights_another_dtype_and_other_settings_do(folder: Path, tmp_path: Path) -> None:
    others = [
        make_checkpoint(tmp_path / "weights", "llama", seed=1),
        make_checkpoint(tmp_path / "dtype", "llama", dtype="bfloat16"),
        Path(shutil.copytree(folder, tmp_path / "config")),
    ]
    edit_config(others[2], rope_theta=20_000.0, rope_parameters=None)
    assert len({_print(folder), *(_print(other) for other in others)}) == 4


def test_samples_are_few_and_inside_their_tensors(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    found = samples(checkpoint)
    assert len(found) == SAMPLES
    for sample in found:
        tensor = checkpoint.tensors[sample.name]
        assert tensor.start <= sample.start < sample.end <= tensor.end
        assert sample.end - sample.start <= SAMPLE_BYTES
    assert len({sample.name.split(".")[2] for sample in found if sample.name.startswith("model.layers.")}) > 1
