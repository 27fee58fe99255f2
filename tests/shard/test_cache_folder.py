"""What lies in the cache, who may remove it, and when."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kafila.errors import FetchFailed
from kafila.shard.cache_folder import CacheFolder, cache_folder, cached, folder_name, prune
from kafila.shard.journal import SparseFile, Version
from kafila.shard.patience import Patience

NOW = 1_700_000_000.0
DAY = 86_400.0


def _make(root: Path, name: str, used: float, held: int = 10) -> CacheFolder:
    folder = CacheFolder(root / name, f"http://host/{name}/", "")
    with SparseFile(folder.path / "model.safetensors", Version(100, "")) as file:
        file.commit(0, held)
    os.utime(folder.path / ".in-use", (used, used))
    return folder


def test_each_source_and_commit_has_a_folder_people_can_tell(tmp_path: Path) -> None:
    names = {
        folder_name("http://host/a b/tiny/", ""),
        folder_name("http://other/tiny/", ""),
        folder_name("https://hub/org/tiny", "c1"),
        folder_name("https://hub/org/tiny", "c2"),
    }
    assert len(names) == 4
    assert all(name.startswith("tiny-") for name in names)
    odd = folder_name("http://host/../%2e%2e/", "")
    assert "/" not in odd
    assert not odd.startswith(".")


def test_what_is_there_the_last_used_first(tmp_path: Path) -> None:
    for name, used in (("old", NOW - 9 * DAY), ("new", NOW)):
        _make(tmp_path, name, used).close()
    (tmp_path / "somebody's").mkdir()
    found = cached(tmp_path)
    assert [(item.path.name, item.bytes_held, item.bytes_in_all) for item in found] == [
        ("new", 10, 100),
        ("old", 10, 100),
    ]
    assert found[0].source == "http://host/new/"
    assert cached(tmp_path / "nowhere") == []


def test_what_is_old_goes_unless_it_is_in_use(tmp_path: Path) -> None:
    for name, used in (("old", NOW - 9 * DAY), ("new", NOW)):
        _make(tmp_path, name, used).close()
    busy = _make(tmp_path, "busy", NOW - 9 * DAY)
    removed, kept = prune(tmp_path, NOW - 5 * DAY)
    assert [item.path.name for item in removed] == ["old"]
    assert [item.path.name for item in kept] == ["busy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "new"]
    busy.close()
    removed, kept = prune(tmp_path, NOW + DAY)
    assert len(removed) == 2
    assert not kept
    assert not list(tmp_path.iterdir())


def test_use_counts_from_its_beginning(tmp_path: Path) -> None:
    _make(tmp_path, "one", NOW - 9 * DAY).close()
    CacheFolder(tmp_path / "one", "http://host/one/", "").close()
    assert cached(tmp_path)[0].used > NOW


def test_one_fetches_and_the_other_waits(tmp_path: Path) -> None:
    one, other = (CacheFolder(tmp_path / "x", "s", "") for _ in range(2))
    waits: list[str] = []
    inside = threading.Event()
    order: list[str] = []

    def second() -> None:
        inside.wait()
        with other.fetching(Patience(), lambda: waits.append("waiting")):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with one.fetching(Patience()):
        inside.set()
        while not waits:
            pass
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    one.close()
    other.close()


def test_waiting_ends_when_the_member_leaves(tmp_path: Path) -> None:
    one, other = (CacheFolder(tmp_path / "x", "s", "") for _ in range(2))
    patience = Patience()
    with (
        one.fetching(Patience()),
        pytest.raises(FetchFailed, match="leaving"),
        other.fetching(patience, patience.stopping.set),
    ):
        pass
    one.close()
    other.close()


@pytest.mark.parametrize(("named", "used"), [("", False), ("relative", False), ("/elsewhere", True)])
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, named: str, *, used: bool) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert (cache_folder() == Path("/elsewhere/kafila/checkpoints")) is used
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == Path.home() / "Library/Caches/kafila/checkpoints"
