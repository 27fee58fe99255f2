"""Memory within containers."""

from __future__ import annotations

from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships no types
import pytest

from kafila.shard.memory import RESERVE_BYTES, available_ram, room_bytes

MB = 1 << 20


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Free:
        available = 10_000 * MB

    monkeypatch.setattr(psutil, "virtual_memory", Free)


def _group(root: Path, path: str, files: dict[str, object]) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def _process(root: Path, text: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)
    return root


def test_without_cgroups_it_is_the_systems_free_memory(tmp_path: Path) -> None:
    assert available_ram(tmp_path) == 10_000 * MB
    assert available_ram(_process(tmp_path, "0::/user.slice\n")) == 10_000 * MB


def test_version_2_takes_the_tightest_group_on_the_way_up(tmp_path: Path) -> None:
    root = _process(tmp_path, "0::/box/inner\n")
    _group(root, "box/inner", {"memory.max": "max", "memory.current": 5 * MB})
    _group(root, "box", {"memory.max": 2000 * MB, "memory.current": 700 * MB})
    (root / "sys/fs/cgroup/box/memory.stat").write_text(f"anon 3\ninactive_file {100 * MB}\n")
    assert available_ram(root) == 1400 * MB


def test_memory_beyond_which_a_group_is_throttled_is_not_counted(tmp_path: Path) -> None:
    root = _process(tmp_path, "0::/box\n")
    _group(root, "box", {"memory.max": 2000 * MB, "memory.high": 1500 * MB, "memory.current": 700 * MB})
    assert available_ram(root) == 800 * MB


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    root = _process(tmp_path, "0::/docker/0123abcd\n")
    _group(root, "", {"memory.max": 900 * MB, "memory.current": 1000 * MB})
    assert available_ram(root) == 0


def test_version_1(tmp_path: Path) -> None:
    root = _process(tmp_path, "4:cpu:/x\n3:memory:/job\n")
    _group(root, "memory/job", {"memory.limit_in_bytes": 512 * MB, "memory.usage_in_bytes": 12 * MB})
    _group(root, "memory", {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 0})
    assert available_ram(root) == 500 * MB


def test_room_leaves_the_reserve_and_keeps_the_owners_limit() -> None:
    assert room_bytes(10_000 * MB) == 9500 * MB - RESERVE_BYTES
    assert room_bytes(10_000 * MB, cap=12 * MB) == 12 * MB
    assert room_bytes(100 * MB) == 0
