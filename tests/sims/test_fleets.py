"""Fleet files: the paper's three, a person's own, and every mistake in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kafila.errors import KafilaError, UsageError
from kafila.types import NatClass, PathKind
from sims.fleets import PAPER_FLEETS, load_fleet
from sims.geography import fibre_rtt_s
from sims.models import PAPER_MODELS, load_model

OWN = """
name = "friends"
host = "tower"
hop_ms = 2

[[member]]
name = "laptop"
memory_gb = 8
rtt_ms = 40
tflops = 3

[[member]]
name = "tower"
memory_gb = 24
bandwidth_gbps = [800, 900]
overhead_us = 30
rtt_ms = 30
nat = "permissive"
site = "Utrecht"

[[member]]
name = "attic"
memory_gb = 16
bandwidth_gbps = 60
rtt_ms = 35
nat = "restrictive"
site = "Utrecht"

[site.Utrecht]
latitude = 52.09
longitude = 5.12

[[edge]]
between = ["tower", "laptop"]
kind = "relayed"

[[edge]]
between = ["laptop", "attic"]
kind = "direct"
rtt_ms = 7

[[edge]]
between = ["tower", "attic"]
kind = "relayed"
rtt_ms = 90
network = "hotel"
"""


def write(folder: Path, text: str, name: str = "own.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_fleet_of_ones_own(tmp_path: Path) -> None:
    fleet = load_fleet(write(tmp_path, OWN))
    laptop, tower, attic = fleet.members
    assert (fleet.name, fleet.host, fleet.networks) == ("friends", 1, ("hotel",))
    assert (laptop.bandwidth_bytes_per_s, laptop.flops, laptop.nat) == (None, 3e12, NatClass.ORDINARY)
    assert laptop.overhead_s == pytest.approx(50e-6)
    assert (tower.memory_bytes, tower.bandwidth_bytes_per_s, tower.rtt_s) == (24 * 10**9, 850e9, 0.03)
    assert tower.overhead_s == pytest.approx(30e-6)
    assert attic.nat is NatClass.RESTRICTIVE
    assert fleet.bandwidths == (None, (800e9, 900e9), (60e9, 60e9))


def test_edges_are_as_measured_over_the_rendezvous_or_by_distance(tmp_path: Path) -> None:
    edges = load_fleet(write(tmp_path, OWN)).edges
    relayed, measured, near = edges[0, 1], edges[0, 2], edges[1, 2]
    assert relayed.kind is PathKind.RELAYED
    assert relayed.rtt_s == pytest.approx(0.040 + 0.030 + 2 * 0.002)
    assert (measured.kind, measured.rtt_s) == (PathKind.DIRECT, 0.007)
    assert near.kind is PathKind.DIRECT
    assert near.rtt_s == pytest.approx(2 * 0.002)


def test_a_network_changes_its_own_edges_alone(tmp_path: Path) -> None:
    own = write(tmp_path, OWN)
    usual, hotel = load_fleet(own).edges, load_fleet(own, "hotel").edges
    assert (hotel[1, 2].kind, hotel[1, 2].rtt_s) == (PathKind.RELAYED, 0.09)
    assert {pair: edge for pair, edge in hotel.items() if pair != (1, 2)} == {
        pair: edge for pair, edge in usual.items() if pair != (1, 2)
    }
    assert load_fleet(own, "predicted").edges == {}


def test_json_has_the_same_shape(tmp_path: Path) -> None:
    fleet = {"host": "b", "member": [{"name": "a", "memory_gb": 1}, {"name": "b", "memory_gb": 2}]}
    assert load_fleet(write(tmp_path, json.dumps(fleet), "own.json")).host == 1


def test_the_papers_fleets_are_table_ii() -> None:
    lan, us, world = (load_fleet(name) for name in PAPER_FLEETS)
    assert [(one.name, one.memory_bytes // 10**9) for one in lan.members] == [
        ("L40S", 24),
        ("L40", 24),
        ("A40", 12),
        ("M3 Pro", 18),
    ]
    assert lan.bandwidths[0] == (512e9, 529e9)
    assert [one.memory_bytes // 10**9 for one in us.members] == [80, 32, 24, 48, 48]
    assert [one.memory_bytes // 10**9 for one in world.members] == [32, 40, 24, 24, 18]
    assert all(one.overhead_s == pytest.approx(50e-6) for fleet in (lan, us, world) for one in fleet.members)
    assert {one.rtt_s for one in world.members} <= {0.079, 0.090, 0.091, 0.113, 0.115}


def test_the_papers_run_relayed_every_edge_but_the_one_in_melbourne() -> None:
    fleet = load_fleet("intercontinental", "paper")
    direct = [pair for pair, edge in fleet.edges.items() if edge.kind is PathKind.DIRECT]
    assert [{fleet.members[index].name for index in pair} for pair in direct] == [{"L40S", "M3 Pro"}]


def test_within_europe_distance_prices_an_edge() -> None:
    fleet = load_fleet("Intercontinental")
    arad, prague = fleet.sites[0], fleet.sites[1]
    assert arad is not None
    assert prague is not None
    assert fleet.edges[0, 1].rtt_s == pytest.approx(fibre_rtt_s(arad, prague) + 2 * 0.0056)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "laptop"', "", "'name'"),
        ("memory_gb = 8", 'memory_gb = "8"', "'memory_gb'"),
        ("memory_gb = 8", "memory_gb = -1", "'memory_gb'"),
        ("memory_gb = 8", "memory_gb = 1e300", "1e+09 or less"),
        ("memory_gb = 8", "memory_gb = nan", "'memory_gb'"),
        ("memory_gb = 8", "memory_gb = true", "'memory_gb'"),
        ("memory_gb = 8", "memory = 8", "unknown key 'memory'"),
        ("bandwidth_gbps = 60", "bandwidth_gbps = 0", "above 0"),
        ("bandwidth_gbps = 60", "bandwidth_gbps = [9, 5]", "wrong way round"),
        ("bandwidth_gbps = 60", "bandwidth_gbps = [1, 2, 3]", "range of two"),
        ('nat = "permissive"', 'nat = "open"', "permissive, ordinary, restrictive"),
        ('nat = "permissive"', "nat = 3", "permissive, ordinary, restrictive"),
        ('site = "Utrecht"', 'site = "Paris"', "[site.Paris]"),
        ('host = "tower"', 'host = "cellar"', "laptop, tower, attic"),
        ('name = "attic"', 'name = "tower"', "same name"),
        ("latitude = 52.09", "latitude = 152.09", "90 or less"),
        ("latitude = 52.09", "latitude = -91", "-90"),
        ('between = ["tower", "laptop"]', 'between = ["tower", "cellar"]', "'cellar'"),
        ('between = ["tower", "laptop"]', 'between = ["tower", "tower"]', "two members"),
        ('between = ["tower", "laptop"]', 'between = ["tower"]', "two names"),
        ('kind = "relayed"\n', 'kind = "pigeon"\n', "direct, relayed"),
        ("[[edge]]", "[edge.x]", "TOML"),
        ("[site.Utrecht]", "[[site]]", "'site'"),
        ("hop_ms = 2", "hop_ms = ", "TOML"),
    ],
)
def test_a_mistake_is_said_in_one_line_with_the_file_and_the_place(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in OWN
    with pytest.raises(UsageError) as caught:
        load_fleet(write(tmp_path, OWN.replace(old, new)))
    message = str(caught.value)
    assert "own.toml" in message
    assert "\n" not in message
    assert said in message


@pytest.mark.parametrize("text", ["", "member = 3", "member = [3]", "member = []", '[[edge]]\nbetween = ["a", "b"]'])
def test_a_fleet_without_members_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        load_fleet(write(tmp_path, text))


def test_files_that_are_none(tmp_path: Path) -> None:
    for name in ("nowhere.toml", "x" * 5000, "a\0b"):
        with pytest.raises(UsageError, match="paper's fleets"):
            load_fleet(name)
    with pytest.raises(UsageError, match="cannot be read"):
        load_fleet(str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_fleet(str(tmp_path / "binary.toml"))
    with pytest.raises(UsageError, match="not JSON"):
        load_fleet(write(tmp_path, "[" * 100_000, "deep.json"))
    with pytest.raises(UsageError, match="not a table"):
        load_fleet(write(tmp_path, "[1]", "list.json"))


def test_an_unknown_network_lists_the_known() -> None:
    with pytest.raises(UsageError, match="predicted, paper"):
        load_fleet("intercontinental", "moon")


@pytest.mark.parametrize(
    ("name", "blocks", "parameters"),
    [("Qwen3-8B", 36, 8_190_735_360), ("Qwen3-14B", 40, 14_768_307_200), ("qwen3-32b", 64, 32_762_123_264)],
)
def test_the_papers_models_have_their_published_sizes(name: str, blocks: int, parameters: int) -> None:
    model = load_model(name)
    assert model.name in PAPER_MODELS
    assert model.blocks == blocks
    assert (model.blocks * model.block_bytes + model.head_bytes) // 2 == parameters


def test_a_model_of_ones_own_is_a_file_or_a_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    folder = tmp_path / "little"
    folder.mkdir()
    path = write(folder, json.dumps(config), "config.json")
    assert load_model(str(folder)).name == "little"
    assert load_model(path).blocks == 3
    for wrong in (str(tmp_path), str(tmp_path / "none.json"), "y" * 5000):
        with pytest.raises(UsageError, match="neither"):
            load_model(wrong)
    with pytest.raises(KafilaError, match="mamba"):
        load_model(write(tmp_path, json.dumps({"model_type": "mamba"}), "other.json"))
