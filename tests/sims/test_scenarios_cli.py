"""``kafila-sim nat``: its lists, lines, objects, traces and refusals."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from sims.cli import main
from sims.scenarios.catalogue import SCENARIOS

QUICK = "first-byte-relayed"


def nat(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["nat", *arguments])


def test_the_list_names_every_scenario_with_its_sentence() -> None:
    result = nat("--list")
    assert result.exit_code == 0
    assert all(name in result.output and scenario.sentence in result.output for name, scenario in SCENARIOS.items())


def test_a_run_prints_a_line_a_scenario_and_a_count() -> None:
    result = nat(QUICK)
    assert result.exit_code == 0
    assert QUICK in result.output
    assert result.output.splitlines()[-1] == "1 passed, 0 failed"


def test_several_scenarios_and_seeds_run_beside_one_another_and_come_in_order() -> None:
    result = nat("same-lan", "public-hosts", "--seeds", "2")
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.output.splitlines()[:2]] == [
        ["passed", "same-lan"],
        ["passed", "public-hosts"],
    ]
    assert result.output.splitlines()[-1] == "2 passed, 0 failed"


def test_json_is_one_object_with_figures_and_targets() -> None:
    found = json.loads(nat(QUICK, "--json").output)
    assert set(found) == {"name", "figures", "targets", "context"}
    assert found["figures"][f"{QUICK}.first_byte_rtts.median"] > 0
    assert found["targets"][f"{QUICK}.first_byte_rtts.median"] == 2
    assert found["context"]["passed"] == [QUICK]
    assert not found["context"]["known_failures"]


def test_a_trace_is_text_or_pcapng_by_its_suffix(tmp_path: Path) -> None:
    text, binary = tmp_path / "run.txt", tmp_path / "run.pcapng"
    assert nat(QUICK, "--trace", str(text)).exit_code == 0
    assert "sent" in text.read_text()
    assert nat(QUICK, "--trace", str(binary)).exit_code == 0
    assert binary.read_bytes()[:4] == bytes.fromhex("0a0d0d0a")


def test_mistakes_are_named_in_a_line() -> None:
    unknown = nat("nowhere")
    assert unknown.exit_code == 1
    assert "no scenario is called 'nowhere'" in unknown.output
    several = nat(QUICK, "--seeds", "2", "--trace", "x")
    assert several.exit_code == 1
    assert "a trace is of one run" in several.output
    unwritable = nat(QUICK, "--trace", "/nowhere/at/all.txt")
    assert unwritable.exit_code == 1
    assert "cannot be written" in unwritable.output
