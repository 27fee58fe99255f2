"""``kafila-sim plan`` as a person and a program use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kafila.plan import Plan
from sims.cli import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def figures(*arguments: str) -> dict[str, float]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, float] = json.loads(result.stdout)["figures"]
    assert all(isinstance(value, (int, float)) for value in found.values())
    return found


def test_a_plan_is_printed_as_a_table() -> None:
    result = run("lan", "Qwen3-8B")
    assert result.exit_code == 0
    assert "L40S (head)" in result.stdout
    assert "the fullest ring is not the fastest" in result.stdout.lower()


def test_json_carries_the_plan_and_its_figures() -> None:
    result = run("us-central", "qwen3-14b", "--json", "--users", "2")
    record = json.loads(result.stdout)
    plan = Plan.from_json(json.dumps(record["plan"]))
    assert record["figures"]["members"] == len(plan.stages) == 5
    assert record["figures"]["users"] == 2
    assert record["figures"]["bottleneck_ms"] == pytest.approx((plan.bottleneck_s or 0) * 1e3)
    assert record["figures"]["circuit_ms"] == pytest.approx((plan.circuit_s or 0) * 1e3)


def test_every_plan_tells_both_objectives_in_figures() -> None:
    for arguments in (
        ("--objective", "throughput"),
        ("--objective", "bottleneck"),
        ("--allocation", "uniform"),
        ("--shares", "9,9,9,9"),
    ):
        found = figures("lan", "Qwen3-8B", "--users", "1", *arguments)
        assert found["throughput_over_bottleneck_one_user"] >= 1.5
    several = figures("lan", "Qwen3-8B", "--objective", "throughput", "--users", "4")
    assert several["throughput_over_bottleneck_one_user"] >= 1.5
    assert several["throughput_over_bottleneck_all_users"] >= 1.0
    assert several["tokens_per_s"] == pytest.approx(several["throughput_objective_tokens_per_s_all_users"])


@pytest.mark.parametrize("allocation", ["kafila", "uniform", "memory"])
def test_every_allocation(allocation: str) -> None:
    assert figures("lan", "Qwen3-8B", "--allocation", allocation)["utilisation_percent"] > 30


def test_shares_host_and_memory_are_taken_from_the_command_line() -> None:
    record = json.loads(run("lan", "Qwen3-8B", "--shares", "10,11,12,3", "--host", "A40", "--json").stdout)
    assert [stage["name"] for stage in record["plan"]["stages"]] == ["A40", "M3 Pro", "L40S", "L40"]
    record = json.loads(run("lan", "Qwen3-8B", "--memory", "M3 Pro=13.5", "--allocation", "memory", "--json").stdout)
    laptop = next(stage for stage in record["plan"]["stages"] if stage["name"] == "M3 Pro")
    assert laptop["memory_room_bytes"] == 13_500_000_000
    assert laptop["blocks"]["stop"] - laptop["blocks"]["first"] == 6


def test_the_host_may_insist_on_serving() -> None:
    arguments = ("lan", "Qwen3-8B", "--objective", "throughput", "--users", "1", "--host", "M3 Pro", "--json")
    free = json.loads(run(*arguments).stdout)["plan"]
    asked = json.loads(run(*arguments, "--host-must-serve").stdout)["plan"]
    assert [stage["name"] for stage in free["stages"]] == ["L40S"]
    assert "M3 Pro" in [stage["name"] for stage in asked["stages"]]


def test_networks_change_the_edges() -> None:
    assert figures("intercontinental", "Qwen3-32B")["relayed_edges"] == 2
    assert figures("intercontinental", "Qwen3-32B", "--network", "paper")["relayed_edges"] == 4
    predicted = figures("lan", "Qwen3-8B", "--network", "predicted")
    assert "circuit_ms" not in predicted
    assert predicted["relayed_edges"] == 4


def test_without_prices_the_throughput_objective_says_that_it_gave_way() -> None:
    result = run("lan", "Qwen3-8B", "--network", "predicted", "--objective", "throughput")
    assert result.exit_code == 0
    assert "needs every member's speed" in result.stdout


def test_compare_prints_table_iv_on_the_papers_network() -> None:
    result = run("intercontinental", "--compare")
    assert result.exit_code == 0
    assert result.stdout.count("Kafila") == 3
    assert "8.3 (8.3)" in result.stdout
    found = figures("intercontinental", "Qwen3-8B", "--compare")
    assert found["Qwen3-8B_kafila_ours_tokens_per_s"] == pytest.approx(2.3, rel=0.05)
    assert found["Qwen3-8B_kafila_paper_tokens_per_s"] == 2.3


def test_a_refusal_names_who_and_what_would_help_and_exits_with_1() -> None:
    arguments = ("intercontinental", "Qwen3-32B", "--allocation", "uniform", "--context", "32768")
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "M3 Pro" in result.stderr
    assert "1.04 GB too little" in result.stderr
    assert "would help: Kafila's own division, which fits" in result.stderr
    record = json.loads(run(*arguments, "--json").stdout)
    assert record["declined"]["who"] == "M3 Pro"
    assert record["figures"]["shortfall_bytes"] > 10**9


@pytest.mark.parametrize(
    "arguments",
    [
        ("nowhere", "Qwen3-8B"),
        ("lan", "nothing"),
        ("lan",),
        ("lan", "Qwen3-8B", "--context", "0"),
        ("lan", "Qwen3-8B", "--concurrency", "-1"),
        ("lan", "Qwen3-8B", "--users", "0"),
        ("lan", "Qwen3-8B", "--shares", "1,2"),
        ("lan", "Qwen3-8B", "--shares", "a,b,c,d"),
        ("lan", "Qwen3-8B", "--shares", "36,0,0,0"),
        ("lan", "Qwen3-8B", "--host", "nobody"),
        ("lan", "Qwen3-8B", "--memory", "nobody=3"),
        ("lan", "Qwen3-8B", "--memory", "L40S"),
        ("lan", "Qwen3-8B", "--memory", "L40S=lots"),
        ("lan", "Qwen3-8B", "--memory", "L40S=nan"),
        ("lan", "Qwen3-8B", "--memory", "L40S=inf"),
        ("lan", "Qwen3-8B", "--memory", "L40S=-1"),
        ("lan", "Qwen3-8B", "--network", "moon"),
        ("lan", "Qwen3-8B", "--objective", "throughput", "--allocation", "uniform"),
        ("lan", "Qwen3-8B", "--objective", "throughput", "--shares", "9,9,9,9"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_a_broken_file_is_one_line_too(tmp_path: Path) -> None:
    for name, text in (("a.toml", "member = ["), ("b.json", "{"), ("c.toml", '[[member]]\nname = "x"')):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        for arguments in ((str(path), "Qwen3-8B"), ("lan", str(path))):
            result = run(*arguments)
            assert result.exit_code == 1
            assert result.stderr.count("\n") == 1
