"""How much memory a shard may take: free, within the limits of the container, less a reserve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships no types; we call one function

RESERVE_BYTES = 512 << 20
"""Kept free for what grows after admission: activations of a prefill chunk, the tensor library's own workspace."""
RESERVE_SHARE = 0.05
"""And of what is free, for whatever else the owner does with the machine meanwhile."""
_V1_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of a page in 63 bits."""


def room_bytes(free: int, cap: int | None = None) -> int:
    """Of ``free`` bytes, those a plan may use; ``cap`` is the owner's own limit."""
    room = max(0, free - RESERVE_BYTES - int(free * RESERVE_SHARE))
    return room if cap is None else min(room, cap)


def available_ram(root: Path = Path("/")) -> int:
    """Bytes of main memory that can be taken without swapping, within every cgroup this process is in.

    ``root`` is where ``proc`` and ``sys`` are found; elsewhere than on Linux there are none.
    """
    free = int(psutil.virtual_memory().available)
    return min([free, *_cgroup_free(root)])


def _cgroup_free(root: Path) -> Iterator[int]:
    """What each limited cgroup above this process has left (Linux kernel documentation, cgroup-v2 and cgroup-v1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Above "high" a group is not killed, only throttled to a crawl.
            for limit in ("memory.max", "memory.high"):
                yield from _left(base, path, limit, "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(base / "memory", path, *names)


def _left(base: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    group = base / path.lstrip("/")
    # A container may see the host's path in /proc and its own group mounted at the root: look all the way up.
    for folder in (group, *group.parents):
        if base not in (folder, *folder.parents):
            return
        try:
            limit = int((folder / limit_name).read_text())
            usage = int((folder / usage_name).read_text())
        except (OSError, ValueError):  # no such group here, or "max"
            continue
        if limit < _V1_UNLIMITED:
            yield max(0, limit - usage + _reclaimable(folder / "memory.stat", cache_name))


def _reclaimable(stat: Path, name: str) -> int:
    """File pages that the kernel drops when memory is asked for."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0
