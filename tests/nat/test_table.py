"""The table of paths: bounded, whoever fills it."""

from __future__ import annotations

from kafila.nat.candidates import MAX_CANDIDATES, Candidate, CandidateKind
from kafila.nat.path import Path, PathState
from kafila.nat.table import SPARES, PathTable
from kafila.types import Address


def address(number: int) -> Address:
    return Address("203.0.113.7", 2000 + number)


def make_usable(path: Path) -> Path:
    path.punch(0.0)
    path.acked(74, 0, 0.01, 0.01, 15.0)
    path.acked(1200, path.mtu.generation, 0.01, 0.02, 15.0)
    assert path.state is PathState.USABLE
    return path


def test_never_more_than_thirty_two_and_learned_ones_go_first() -> None:
    table = PathTable()
    table.advertise([Candidate(address(n), CandidateKind.HOST) for n in range(20)])
    for number in range(20, 200):
        path = table.add(address(number), CandidateKind.LEARNED)
        assert path is not None
        path.heard_at = float(number)
        assert len(table) <= MAX_CANDIDATES
    assert all(table.get(address(n)) is not None for n in range(20)), "the peer's own addresses stay"
    assert table.get(address(199)) is not None
    assert table.get(address(20)) is None, "heard from longest ago"


def test_what_is_in_use_is_not_evicted() -> None:
    table = PathTable()
    for number in range(MAX_CANDIDATES):
        path = table.add(address(number), CandidateKind.LEARNED)
        assert path is not None
        path.punch(0.0)
    assert table.add(address(99), CandidateKind.LEARNED) is None


def test_a_new_list_of_addresses_keeps_what_works() -> None:
    table = PathTable()
    table.advertise([Candidate(address(n), CandidateKind.HOST) for n in range(3)])
    works = table.get(address(1))
    assert works is not None
    make_usable(works)
    table.advertise([Candidate(address(7), CandidateKind.HOST)])
    assert [path.address for path in table] == [address(1), address(7)]
    assert not works.advertised


def test_a_few_spares_are_kept_alive() -> None:
    table = PathTable()
    paths = [path for n in range(6) if (path := table.add(address(n), CandidateKind.LEARNED)) is not None]
    for path in paths:
        make_usable(path)
    table.thin_out(paths[0], 1.0)
    assert len(table.usable()) == 1 + SPARES
    assert paths[0].state is PathState.USABLE


def test_the_nearest_is_tried_first() -> None:
    table = PathTable()
    for host in ("203.0.113.7", "192.168.1.7"):
        path = table.add(Address(host, 4242), CandidateKind.HOST)
        assert path is not None
        path.punch(0.0)
        path.acked(74, 0, 0.01, 0.01, 15.0)
    trial = table.trial()
    assert trial is not None
    assert trial.address.host == "192.168.1.7"
