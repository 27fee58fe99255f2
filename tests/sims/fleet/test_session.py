"""Whole sessions of the deployed code with simulated devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kafila.plan import Allocation, Objective
from kafila.types import PathKind
from sims.fleet.place import Net
from sims.fleet.session import run_trial
from sims.fleet.trial import Outcome, Refused, Trial
from sims.models import load_model

SHORT = Trial("lan", "Qwen3-8B", Net.OVERHEAD, generations=2, answer_tokens=16, prompt_tokens=8)


def served(trial: Trial) -> Outcome:
    outcome = run_trial(trial)
    assert isinstance(outcome, Outcome), outcome
    return outcome


def written(folder: Path, members: str) -> str:
    path = folder / "own.toml"
    path.write_text(members, encoding="utf-8")
    return str(path)


def test_the_lan_fleet_serves_as_the_paper_measured() -> None:
    ours = served(replace(SHORT, users=4, batching=False))
    assert ours.one_user == pytest.approx(21.5, rel=0.1)
    assert ours.all_users / ours.one_user >= 3.9
    assert ours.network_s / ours.circuit_s == pytest.approx(0.12, abs=0.02)
    assert sum(edge.hop_s for edge in ours.edges) == pytest.approx(ours.network_s, rel=0.02)
    uniform = served(replace(SHORT, users=4, batching=False, allocation=Allocation.UNIFORM))
    assert uniform.counts == (9, 9, 9, 9)
    assert 1.7 <= uniform.all_users / uniform.one_user <= 2.5
    assert ours.bottleneck_s < uniform.bottleneck_s / 2


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_gain_does_not_depend_on_how_short_the_answers_are(seed: int) -> None:
    """All four have to be at it for a while. With these seeds two answers, or three, overlap for a token alone."""
    found = served(replace(SHORT, users=4, batching=False, prompt_tokens=32, answer_tokens=8, seed=seed))
    assert 3.9 < found.all_users / found.one_user < 4.1


def test_the_largest_model_of_the_us_fleet_serves_as_the_paper_measured() -> None:
    ours = served(replace(SHORT, fleet="us-central", model="Qwen3-32B", batching=False))
    assert ours.one_user == pytest.approx(8.8, rel=0.1)


def test_exactly_the_papers_edges_relay_and_ours_go_direct() -> None:
    theirs = served(replace(SHORT, fleet="intercontinental", network=Net.GEOGRAPHY))
    direct = [edge for edge in theirs.edges if edge.kind is PathKind.DIRECT]
    assert [{edge.source, edge.target} for edge in direct] == [{"L40S", "M3 Pro"}]
    assert all(edge.direct_s is None for edge in theirs.edges if edge.kind is PathKind.RELAYED)
    # Data flows within a second where the paper's relayed edges took 20.8.
    assert max(edge.linked_s for edge in theirs.edges) < 1
    # Relayed, one way: half of both round trips to the rendezvous, 79 to 115 ms each.
    assert all(0.079 < edge.hop_s < 0.125 for edge in theirs.edges if edge.kind is PathKind.RELAYED)
    ours = served(replace(SHORT, fleet="intercontinental", network=Net.PATHS))
    assert all(edge.kind is PathKind.DIRECT for edge in ours.edges)
    assert ours.one_user > theirs.one_user


def test_members_that_only_slow_the_ring_are_let_go() -> None:
    alone = served(replace(SHORT, objective=Objective.THROUGHPUT))
    assert alone.names == ("L40S",)
    assert alone.edges == ()
    assert alone.one_user > 1.4 * 21.5


def test_what_does_not_fit_is_declined_by_name() -> None:
    tight = replace(SHORT, fleet="intercontinental", model="Qwen3-32B", context=32_768)
    refused = run_trial(replace(tight, allocation=Allocation.UNIFORM))
    assert isinstance(refused, Refused)
    assert "M3 Pro" in refused.text


FRIENDS = """
[[member]]
name = "tower"
memory_gb = 24
bandwidth_gbps = [400, 500]
uplink_mbps = 2

[[member]]
name = "friend"
memory_gb = 24
bandwidth_gbps = [400, 500]
"""


def test_the_same_seed_gives_the_same_session_and_an_uplink_its_own_time(tmp_path: Path) -> None:
    own = written(tmp_path, FRIENDS)
    trial = replace(SHORT, fleet=own, network=Net.PATHS, batching=True)
    first, second, other = served(trial), served(trial), served(replace(trial, seed=1))
    assert (first.names, first.counts, first.stage_s) == (second.names, second.counts, second.stage_s)
    assert first.one_user == pytest.approx(second.one_user, rel=0.01)
    assert first.stage_s != other.stage_s
    up = next(edge for edge in first.edges if edge.source == "tower")
    down = next(edge for edge in first.edges if edge.target == "tower")
    # 8,192 bytes of hidden numbers, and headers, at 2 Mbit/s.
    assert 8192 * 8 / 2e6 < up.hop_s - down.hop_s < 1.25 * 8192 * 8 / 2e6


def test_a_prompts_rows_do_not_wait_for_the_last_uplink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = written(tmp_path, FRIENDS.replace("uplink_mbps = 2\n", "") + "uplink_mbps = 2\n")
    trial = replace(SHORT, fleet=own, network=Net.PATHS, prompt_tokens=64)
    cut = served(trial)
    assert cut.names == ("tower", "friend")
    monkeypatch.setattr("kafila.members.KNOWN", ())
    whole = served(trial)
    row_s = 8192 * 8 / 2e6
    assert cut.first_token_s < 2 * cut.circuit_s
    assert 63 * row_s < whole.first_token_s - cut.first_token_s < 1.25 * 63 * row_s
    assert whole.one_user == pytest.approx(cut.one_user, rel=0.01)


def test_twelve_members(tmp_path: Path) -> None:
    members = "\n".join(
        f'[[member]]\nname = "m{n}"\nmemory_gb = 4\nbandwidth_gbps = {60 + 5 * n}\nlan = "hall"' for n in range(12)
    )
    trial = replace(SHORT, fleet=written(tmp_path, f"hop_ms = 0.2\n{members}"), network=Net.PATHS, users=3)
    outcome = served(trial)
    assert len(outcome.names) == 12
    assert sum(outcome.counts) == 36
    assert outcome.all_users > 2.5 * outcome.one_user
    assert all(edge.kind is PathKind.DIRECT for edge in outcome.edges)


def test_users_go_on_asking_for_as_long_as_they_are_told(tmp_path: Path) -> None:
    trial = replace(SHORT, fleet=written(tmp_path, FRIENDS), network=Net.PATHS, users=2, minutes=0.1)
    outcome = served(trial)
    assert outcome.soak_tokens >= 6 * 0.5 * outcome.all_users


def test_a_vocabulary_in_two_parts_takes_what_the_longer_part_takes(tmp_path: Path) -> None:
    own = written(tmp_path, FRIENDS.replace("uplink_mbps = 2", "").replace("24\n", "24\nlan = 'home'\n"))
    trial = replace(SHORT, fleet=own, network=Net.PATHS)
    whole, divided = served(trial), served(replace(trial, divide_head=True))
    assert divided.counts == whole.counts
    head_s = load_model(trial.model).head_read_bytes / 450e9
    # Both read at 400 to 500 GB/s, so each does about half of it in the place of one doing all; who serves slower than
    # it was probed takes a little longer.
    assert 0.35 * head_s < whole.circuit_s - divided.circuit_s < 0.55 * head_s
    assert whole.stage_s[0] - divided.stage_s[0] == pytest.approx(head_s / 2, rel=0.2)
    assert divided.stage_s[1] == pytest.approx(whole.stage_s[1], rel=0.01)
    assert sum(edge.hop_s for edge in divided.edges) == pytest.approx(sum(edge.hop_s for edge in whole.edges), rel=0.05)


def test_several_batches_on_their_way_are_not_slowed_by_scoring() -> None:
    trial = replace(SHORT, users=4, batching=False)
    whole, divided = served(trial), served(replace(trial, divide_head=True))
    assert divided.all_users >= 0.98 * whole.all_users
    assert divided.one_user > whole.one_user
