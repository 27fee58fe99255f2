"""What a probe found, kept for a day: a session that begins again need not measure again.

One JSON file, ``~/.cache/kafila/probes.json``: speeds by a digest of everything that they depend on (machine, device,
threads, shapes, dtype, versions, mains or battery). Memory is never kept, it is looked at anew each time. What a
busy machine measured is not kept either. A file that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]  # it ships no types; we call one function

from kafila.shard.config import DecoderConfig
from kafila.shard.ops import Ops
from kafila.shard.probe import BUSY_SPREAD, measure, memory_of
from kafila.types import Capability

T = TypeVar("T")

EXPIRY_S = 86_400.0
"""A day: what changes a machine's speed without showing in the digest (drivers, power settings, a dusty fan) changes
over days, and people who come back to a session do so the same evening."""
MAX_ENTRIES = 64
"""More models and devices than anybody goes through in a day; the oldest go first."""
_LIBRARIES = ("kafila", "torch", "mlx", "numpy")
_NO_MATTER = {"max_context", "ropes", "eos_ids", "norm_eps"}
"""Of a configuration: what changes numbers and not how long they take."""


@dataclass(frozen=True, slots=True)
class ProbeCache:
    """``path`` of the file; ``clock`` tells seconds since the epoch."""

    path: Path
    clock: Callable[[], float]

    def get(self, key: str) -> tuple[Capability, float] | None:
        """Speeds kept under ``key`` (everything else of the capability is empty) and their age in seconds."""
        try:
            entry = self._read()[key]
            age_s = self.clock() - _number(entry["measured_at"])
            found = Capability(
                device="",
                memory_bytes=0,
                bandwidth_bytes_per_s=_number(entry["bandwidth_bytes_per_s"]),
                overhead_s=_number(entry["overhead_s"]),
                flops=_number(entry["flops"]),
                bandwidth_spread=_number(entry["bandwidth_spread"]),
                head_bytes_per_s=_number(entry["head_bytes_per_s"]),
            )
        except (KeyError, TypeError, ValueError):
            return None
        return (found, age_s) if 0 <= age_s <= EXPIRY_S else None

    def put(self, key: str, found: Capability) -> None:
        """Keep ``found``'s speeds, for as long as they hold."""
        now = self.clock()
        entries = {name: entry for name, entry in self._read().items() if _age(entry, now) <= EXPIRY_S}
        entries[key] = {
            "measured_at": now,
            "bandwidth_bytes_per_s": found.bandwidth_bytes_per_s,
            "overhead_s": found.overhead_s,
            "flops": found.flops,
            "bandwidth_spread": found.bandwidth_spread,
            "head_bytes_per_s": found.head_bytes_per_s,
        }
        newest = sorted(entries.items(), key=lambda item: _age(item[1], now))[:MAX_ENTRIES]
        self._write(json.dumps(dict(newest)))

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, text: str) -> None:
        """Whole or not at all, whoever else writes."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix="probes-", delete=False) as file:
                file.write(text)
            os.replace(file.name, self.path)
        except OSError:
            return  # measured again next time


def default_path() -> Path:
    """Where a person's programs keep what they can make again (the XDG base directory specification)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return base / "kafila" / "probes.json"


def measure_or_recall(
    ops: Ops[T],
    config: DecoderConfig,
    cache: ProbeCache | None,
    *,
    context: int,
    slots: int,
    memory_cap: int | None = None,
) -> Capability:
    """`kafila.shard.probe.measure`, or what it found within the last day; its remarks say which. None: no cache."""
    battery = on_battery()
    key = digest(ops, config, battery=battery)
    kept = None if cache is None else cache.get(key)
    if kept is None:
        found = measure(ops, config, context=context, slots=slots, memory_cap=memory_cap)
        calm = found.bandwidth_spread <= BUSY_SPREAD and not overloaded()
        if cache is not None and found.bandwidth_bytes_per_s is not None and calm:
            cache.put(key, found)
    else:
        speeds, age_s = kept
        found = replace(
            memory_of(ops, config, context=context, slots=slots, memory_cap=memory_cap),
            bandwidth_bytes_per_s=speeds.bandwidth_bytes_per_s,
            overhead_s=speeds.overhead_s,
            flops=speeds.flops,
            bandwidth_spread=speeds.bandwidth_spread,
            head_bytes_per_s=speeds.head_bytes_per_s,
            remarks=(f"speed as measured {_ago(age_s)} ago; --no-probe-cache measures anew",),
        )
    if battery:
        found = replace(found, remarks=(*found.remarks, "this machine runs on battery, which may make it slower"))
    return found


def digest(ops: Ops[T], config: DecoderConfig, *, battery: bool) -> str:
    """Names everything that a measurement depends on."""
    shapes = {name: value for name, value in asdict(config).items() if name not in _NO_MATTER}
    facts = {
        "machine": [platform.node(), platform.machine(), platform.processor(), os.cpu_count()],
        "device": ops.device,
        "dtype": ops.dtype,
        "shapes": shapes,
        "versions": [platform.python_version(), *map(_version, _LIBRARIES)],
        "battery": battery,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def overloaded() -> bool:
    """Whether more programs wanted a processor in the last minute than there are processors. A machine that is busy all
    the time measures evenly, and wrong: one was taken for 18 times slower than it is."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def on_battery() -> bool:
    """Whether this machine is a portable one that is not plugged in."""
    if not hasattr(psutil, "sensors_battery"):
        return False
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError):  # a kernel that describes its battery oddly
        return False
    return battery is not None and battery.power_plugged is False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError
    return float(value)


def _age(entry: Any, now: float) -> float:
    """In seconds; endless for what is no entry, or of the future."""
    try:
        age_s = now - _number(entry["measured_at"])
    except (KeyError, TypeError, ValueError):
        return math.inf
    return age_s if age_s >= 0 else math.inf


def _ago(age_s: float) -> str:
    minutes = round(age_s / 60)
    if minutes < 1:
        return "less than a minute"
    if minutes < 60:
        return f"{minutes} minute{'s' if minutes > 1 else ''}"
    hours = round(age_s / 3600)
    return f"{hours} hour{'s' if hours > 1 else ''}"
