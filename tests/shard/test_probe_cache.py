"""What is measured once a day, and what is never believed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.shard import probe_cache
from kafila.shard.config import parse_config
from kafila.shard.probe_cache import EXPIRY_S, MAX_ENTRIES, ProbeCache, default_path, digest, measure_or_recall
from kafila.shard.rope import Rope
from kafila.shard.torch_ops import TorchOps
from kafila.types import Capability
from tests.shard.test_config import LLAMA

TINY = parse_config(json.dumps(LLAMA))
FOUND = Capability("cpu", 1000, 2e9, 3e-4, 4e10, 0.05, 5e9)


class Battery(NamedTuple):
    power_plugged: bool | None


@dataclass
class Machine:
    """Counts how often it was measured."""

    cache: ProbeCache
    now: float = 1e9
    spread: float = 0.05
    measured: int = 0
    ops: TorchOps | None = None

    def ask(self, cache: bool = True, **changed: Any) -> Capability:
        ops = self.ops or TorchOps("cpu", "float32", threads=1)
        config = replace(TINY, **changed)
        return measure_or_recall(ops, config, self.cache if cache else None, context=64, slots=1)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(ProbeCache(tmp_path / "new" / "probes.json", lambda: made.now))

    def measure(*_: object, **__: object) -> Capability:
        made.measured += 1
        return replace(FOUND, bandwidth_spread=made.spread)

    monkeypatch.setattr(probe_cache, "measure", measure)
    monkeypatch.setattr("psutil.sensors_battery", lambda: None, raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 99.0, 99.0))
    return made


def test_a_second_session_of_the_day_does_not_measure(machine: Machine) -> None:
    assert machine.ask().remarks == ()
    machine.now += 3 * 3600
    again = machine.ask()
    assert machine.measured == 1
    assert (again.bandwidth_bytes_per_s, again.overhead_s, again.flops) == (2e9, 3e-4, 4e10)
    assert (again.bandwidth_spread, again.head_bytes_per_s) == (0.05, 5e9)
    assert again.remarks == ("speed as measured 3 hours ago; --no-probe-cache measures anew",)


def test_memory_is_looked_at_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.ask()
    monkeypatch.setattr("kafila.shard.probe.available_ram", lambda: 10**10)
    assert machine.ask().memory_bytes == 10**10 - (512 << 20) - 10**10 // 20
    assert machine.ask().workspace_bytes > 0


@pytest.mark.parametrize(
    "changed",
    [{"hidden": 96}, {"vocab": 999}, {"windows": (8, 8, 8, 8)}, {"intermediate": 96}, {"qk_norm": True}],
)
def test_other_shapes_are_measured(machine: Machine, changed: dict[str, Any]) -> None:
    machine.ask()
    machine.ask(**changed)
    assert machine.measured == 2


def test_another_dtype_and_other_threads_are_measured(machine: Machine) -> None:
    for dtype, threads in (("float32", 1), ("bfloat16", 1), ("bfloat16", 2)):
        machine.ops = TorchOps("cpu", dtype, threads=threads)
        machine.ask()
    TorchOps("cpu", "float32", threads=1)
    assert machine.measured == 3


def test_another_version_is_measured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.ask()
    monkeypatch.setattr(probe_cache, "version", lambda package: "99")
    machine.ask()
    assert machine.measured == 2


def test_what_changes_numbers_and_not_time_is_not_measured_again(machine: Machine) -> None:
    machine.ask()
    machine.ask(ropes=(Rope(1.0),) * 2, eos_ids=(1,))
    assert machine.measured == 1


def test_a_day_later_it_is_measured_again(machine: Machine) -> None:
    machine.ask()
    machine.now += EXPIRY_S + 1
    machine.ask()
    assert machine.measured == 2
    machine.now -= 10  # a clock that was set back: the entry is of the future
    machine.ask()
    assert machine.measured == 3


def test_without_the_cache_it_is_measured_and_kept_nowhere(machine: Machine) -> None:
    machine.ask(cache=False)
    assert not machine.cache.path.exists()
    machine.ask()
    machine.ask(cache=False)
    assert machine.measured == 3


def test_what_a_busy_machine_measured_is_not_kept(machine: Machine) -> None:
    machine.spread = 0.4
    machine.ask()
    assert not machine.cache.path.exists()


def test_what_an_evenly_overloaded_machine_measured_is_not_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (4.1, 0.0, 0.0))
    machine.ask()
    assert not machine.cache.path.exists()


def test_a_failed_measurement_is_not_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_cache, "measure", lambda *_, **__: Capability("cpu", 1, None, None, None))
    machine.ask()
    assert not machine.cache.path.exists()


def test_a_battery_is_said_and_measured_for_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.ask()
    monkeypatch.setattr("psutil.sensors_battery", lambda: Battery(False), raising=False)
    assert machine.ask().remarks == ("this machine runs on battery, which may make it slower",)
    assert machine.measured == 2
    monkeypatch.setattr("psutil.sensors_battery", lambda: Battery(None), raising=False)
    assert len(machine.ask().remarks) == 1
    assert machine.measured == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "null", '{"x": 1}'])
def test_a_damaged_file_is_as_good_as_none(machine: Machine, text: str) -> None:
    machine.cache.path.parent.mkdir()
    machine.cache.path.write_text(text)
    machine.ask()
    machine.ask()
    assert machine.measured == 1


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), st.lists, max_leaves=4))
def test_a_damaged_entry_is_none(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    cache = ProbeCache(tmp_path_factory.mktemp("cache") / "probes.json", lambda: 1e9)
    cache.put("key", FOUND)
    entries = json.loads(cache.path.read_bytes())
    for name in entries["key"]:
        entry = {**entries["key"], name: value}
        cache.path.write_text(json.dumps({"key": entry}))
        found = cache.get("key")
        assert found is None or (isinstance(value, float) and value >= 0)
    cache.path.write_text(json.dumps({"key": value}))
    assert cache.get("key") is None
    cache.put("other", FOUND)
    assert cache.get("other") is not None


def test_a_folder_that_cannot_be_written_is_no_trouble(machine: Machine) -> None:
    machine.cache.path.parent.write_text("a file where the folder should be")
    assert machine.ask().bandwidth_bytes_per_s == 2e9
    assert machine.ask().bandwidth_bytes_per_s == 2e9


def test_old_entries_go(machine: Machine) -> None:
    for number in range(MAX_ENTRIES + 5):
        machine.now += 1
        machine.cache.put(str(number), FOUND)
    kept = json.loads(machine.cache.path.read_bytes())
    assert set(kept) == {str(number) for number in range(5, MAX_ENTRIES + 5)}
    assert [path.name for path in machine.cache.path.parent.iterdir()] == ["probes.json"]
    machine.now += EXPIRY_S
    machine.cache.put("new", FOUND)
    assert set(json.loads(machine.cache.path.read_bytes())) == {str(MAX_ENTRIES + 4), "new"}


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "kafila" / "probes.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # not to be used, says the specification
    assert default_path() == Path.home() / ".cache" / "kafila" / "probes.json"


def test_a_digest_is_the_same_in_every_process() -> None:
    ops = TorchOps("cpu", "float32", threads=1)
    assert digest(ops, TINY, battery=False) == digest(ops, parse_config(json.dumps(LLAMA)), battery=False)
    assert digest(ops, TINY, battery=False) != digest(ops, TINY, battery=True)
