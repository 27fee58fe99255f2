"""What ``kafila-node cache`` prints and removes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kafila.cache_commands import list_cache, prune_cache
from kafila.errors import UsageError
from kafila.shard.cache_folder import CacheFolder
from kafila.shard.journal import SparseFile, Version

DAY = 86_400.0


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kafila" / "checkpoints"


def _fetched(root: Path, name: str, days: float) -> CacheFolder:
    folder = CacheFolder(root / name, f"http://host/{name}/", "0123456789abcdef")
    with SparseFile(folder.path / "model.safetensors", Version(5000, "")) as file:
        file.commit(0, 2000)
    when = time.time() - days * DAY
    os.utime(folder.path / ".in-use", (when, when))
    return folder


def test_an_empty_cache(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_cache()
    assert capsys.readouterr().out == f"nothing has been fetched into {root}\n"
    prune_cache(None, everything=True)
    assert "0 bytes are free now" in capsys.readouterr().out


def test_a_line_a_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fetched(root, "old", 9).close()
    _fetched(root, "new", 0).close()
    list_cache()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["fetched", "of", "last", "used", "from", "folder"]
    assert "2 kB" in lines[1]
    assert "5 kB" in lines[1]
    assert lines[1].endswith("http://host/new/@0123456789ab  new")
    assert lines[2].endswith("old")
    assert lines[3] == f"4 kB in {root}"


def test_pruning_by_age_and_of_everything(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fetched(root, "old", 9).close()
    busy = _fetched(root, "busy", 9)
    _fetched(root, "new", 1).close()
    prune_cache(5, everything=False)
    shown = capsys.readouterr().out
    assert "removed http://host/old/@0123456789ab, 2 kB" in shown
    assert "kept http://host/busy/@0123456789ab: a kafila-node uses it" in shown
    assert "2 kB are free now" in shown
    prune_cache(None, everything=True)
    assert [path.name for path in root.iterdir()] == ["busy"]
    busy.close()


@pytest.mark.parametrize(("days", "everything"), [(None, False), (3.0, True)])
def test_what_to_remove_has_to_be_said(root: Path, days: float | None, *, everything: bool) -> None:
    with pytest.raises(UsageError, match="--older-than DAYS"):
        prune_cache(days, everything=everything)
