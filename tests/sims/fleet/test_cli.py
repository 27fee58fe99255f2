"""``kafila-sim fleet`` as a person and a program use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sims.cli import main

OWN = """
[[member]]
name = "tower"
memory_gb = 24
bandwidth_gbps = [400, 500]

[[member]]
name = "attic"
memory_gb = 24
bandwidth_gbps = 100
"""
QUICK = ("--sessions", "1", "--jobs", "1", "--tokens", "16")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["fleet", *arguments])


def own(folder: Path, text: str = OWN) -> str:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_fleet_of_ones_own_in_words_and_in_figures(tmp_path: Path) -> None:
    words = run(own(tmp_path), *QUICK, "--users", "2")
    assert words.exit_code == 0, words.output
    assert "tower (head)" in words.stdout
    assert "2 users:" in words.stdout
    record = json.loads(run(own(tmp_path), *QUICK, "--users", "2", "--json").stdout)
    figures = record["figures"]
    assert all(isinstance(value, int | float) for value in figures.values())
    assert figures["members"] == 2
    assert figures["gain"] == pytest.approx(figures["tokens_per_s_all_users"] / figures["tokens_per_s_one_user"])
    assert len(record["sessions"]) == 1


def test_a_head_that_scores_all_is_slower(tmp_path: Path) -> None:
    ways = ((), ("--whole-head",), ("--no-batching",))
    rates = [
        json.loads(run(own(tmp_path), *QUICK, *way, "--json").stdout)["figures"]["tokens_per_s_one_user"]
        for way in ways
    ]
    assert rates[0] > 1.002 * rates[1]
    assert rates[2] == pytest.approx(rates[1], rel=0.001), "as the paper's, it does"


def test_a_refusal_is_a_line_and_an_exit_code(tmp_path: Path) -> None:
    refused = run(own(tmp_path), *QUICK, "--model", "Qwen3-32B")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Declined: Qwen3-32B")
    assert json.loads(run(own(tmp_path), *QUICK, "--model", "Qwen3-32B", "--json").stdout)["figures"] == {"declined": 1}


WRONG = {
    'memory_gb = "much"': "'memory_gb' must be a number",
    "memory_gb = 24\nbandwidth_gbps = [9]": "must be a number or a range of two",
    "memory_gb = 24\nbandwidth_gbps = 0": "above 0",
    "memory_gb = 24\nuplink_mbps = 0": "'uplink_mbps' must be 0.1 or more",
    "memory_gb = 24\nlan = 3": "'lan' must be a text",
    "memory_gb = 24\nram = 3": "unknown key 'ram'",
    'memory_gb = 24\nnat = "odd"': "must be one of permissive, ordinary, restrictive",
    "memory_gb = ": "not TOML",
    f'memory_gb = 24\n[[member]]\nname = "{"x" * 41}"\nmemory_gb = 1': "at most 40 printable characters",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_field_is_one_line(tmp_path: Path, line: str) -> None:
    result = run(own(tmp_path, f'[[member]]\nname = "tower"\n{line}\n'))
    assert result.exit_code != 0
    assert WRONG[line] in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lan", "--allocation", "uniform", "--objective", "throughput"), "leave out --allocation"),
        (("lan", "--allocation", "memory", "--pin-head"), "Kafila's own bottleneck division"),
        (("lan", "--users", "5", "--concurrency", "4"), "need a concurrency of 5"),
        (("lan", "--context", "40", "--prompt-tokens", "30", "--tokens", "20"), "do not fit a context of 40"),
        (("nowhere",), "neither a file nor one of the paper's fleets"),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_papers_network_is_the_papers_fleets_alone(tmp_path: Path) -> None:
    result = run(own(tmp_path), "--network", "overhead")
    assert result.exit_code != 0
    assert "the paper's fleets alone" in result.stderr


def test_the_example_is_a_fleet_that_serves() -> None:
    example = Path(__file__).parents[3] / "sims/examples/friends.toml"
    result = run(str(example), *QUICK)
    assert result.exit_code == 0, result.output
    assert "gaming-pc (head)" in result.stdout
