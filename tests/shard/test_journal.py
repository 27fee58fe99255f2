"""What a journal says is there is there, wherever its writing was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.shard.journal import SparseFile, Version, forget, journal_path, recorded

V1 = Version(100, '"one"')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_nothing_is_known_of_a_file_nobody_wrote(path: Path) -> None:
    assert recorded(path) is None
    path.write_bytes(bytes(100))  # data without a journal may be holes
    assert recorded(path) is None


def test_only_what_was_committed_counts(path: Path) -> None:
    with SparseFile(path, V1) as file:
        file.write(10, b"abc")
        file.commit(10, 13)
        file.write(50, b"lost")
        assert file.lacks([(0, 20)]) == [(0, 10), (13, 20)]
    known = recorded(path)
    assert known is not None
    assert known.version == V1
    assert known.have == ((10, 13),)
    data = path.read_bytes()
    assert len(data) == 100
    assert data[10:13] == b"abc"


def test_another_run_goes_on_and_another_version_begins_anew(path: Path) -> None:
    with SparseFile(path, V1) as file:
        file.write(0, b"x" * 50)
        file.commit(0, 50)
    with SparseFile(path, V1) as file:
        assert file.lacks([(0, 100)]) == [(50, 100)]
        file.commit(50, 60)
    with SparseFile(path, Version(100, '"two"')) as file:
        assert file.lacks([(0, 100)]) == [(0, 100)]
    assert path.read_bytes() == bytes(100)


def test_a_file_that_was_replaced_keeps_its_bytes_for_whoever_has_it_open(path: Path) -> None:
    with SparseFile(path, V1) as file:
        file.write(0, b"old")
        file.commit(0, 3)
    with path.open("rb") as reader:
        with SparseFile(path, Version(7, '"two"')):
            pass
        assert reader.read(3) == b"old"


def test_data_of_another_length_is_not_what_the_journal_is_about(path: Path) -> None:
    with SparseFile(path, V1) as file:
        file.commit(0, 100)
    with path.open("r+b") as data:
        data.truncate(99)
    assert recorded(path) is None


@given(cut=st.integers(0, 400), garbage=st.binary(max_size=40))
def test_a_torn_journal_says_less_and_never_more(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "f"
    committed = [(0, 8), (8, 20), (30, 44), (90, 100)]
    with SparseFile(path, V1) as file:
        for start, end in committed:
            file.commit(start, end)
    whole = journal_path(path).read_bytes()
    journal_path(path).write_bytes(whole[:cut] + garbage)
    known = recorded(path)
    if known is not None:
        assert known.version == V1
        assert not [byte for start, end in known.have for byte in range(start, end) if not _in(byte, committed)]
    with SparseFile(path, V1) as file:  # and can be gone on with
        file.commit(60, 70)
    after = recorded(path)
    assert after is not None
    assert not after.lacks([(60, 70)])


def _in(byte: int, ranges: list[tuple[int, int]]) -> bool:
    return any(start <= byte < end for start, end in ranges)


def test_a_forgotten_file_is_gone_and_may_be_forgotten_again(path: Path) -> None:
    with SparseFile(path, V1) as file:
        file.commit(0, 100)
    forget(path)
    forget(path)
    assert not list(path.parent.iterdir())
