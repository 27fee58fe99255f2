"""What is read for neighbours: parts of this checkpoint's files that are there, and of no other file."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.shard.cache_folder import SOURCE_NAME
from kafila.shard.file_names import ABSENT_SUFFIX
from kafila.shard.held import Held, layout_of
from kafila.shard.journal import SparseFile, Version
from kafila.types import FilePart, FilePiece, Withheld
from tests.shard.checkpoints import make_checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made") / "tiny", "llama", blocks=2)


@pytest.fixture
def cache(folder: Path, tmp_path: Path) -> Path:
    """A folder of the cache that holds the configuration and nothing else yet."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / SOURCE_NAME).write_text("{}")
    keep(tmp_path / "cache" / "config.json", (folder / "config.json").read_bytes())
    return tmp_path / "cache"


def keep(path: Path, data: bytes, *ranges: tuple[int, int], etag: str = '"v1"') -> None:
    """A file of the cache of which ``ranges`` are complete; without any, all of it."""
    with SparseFile(path, Version(len(data), etag)) as file:
        for start, end in ranges or [(0, len(data))]:
            file.write(start, data[start:end])
            file.commit(start, end)


def header_bytes(folder: Path) -> int:
    return 8 + int.from_bytes((folder / WEIGHTS).read_bytes()[:8], "little")


def digest_of(folder: Path) -> bytes:
    return sha256((folder / WEIGHTS).read_bytes()[: header_bytes(folder)]).digest()


def test_a_whole_folder_gives_any_part_of_its_files(folder: Path) -> None:
    data, held = (folder / WEIGHTS).read_bytes(), Held(folder)
    part = FilePart(WEIGHTS, 500, 900, size=len(data), etag='"of a server"', layout=digest_of(folder))
    assert held.read(part) == FilePiece(500, len(data), "", data[500:900])
    assert held.read(FilePart(WEIGHTS, len(data) - 5, 2**62)) == FilePiece(len(data) - 5, len(data), "", data[-5:])
    assert held.read(FilePart(WEIGHTS, len(data), 2**62)) is Withheld.NOT_HELD
    assert held.read(FilePart("tokenizer.json", 0, 10)) is Withheld.ABSENT


@pytest.mark.parametrize(
    "name",
    [
        *("../secret.txt", "secret.txt", "/etc/passwd", "..", ".", "sub/model.safetensors", "./config.json"),
        *("model.safetensors\0", "model.safetensors.journal", SOURCE_NAME, "other.safetensors", "é" * 300),
    ],
)
def test_nothing_but_the_checkpoints_own_files_is_looked_for(folder: Path, tmp_path: Path, name: str) -> None:
    inside = Path(shutil.copytree(folder, tmp_path / "tiny"))
    for path in (tmp_path / "secret.txt", inside / "secret.txt", inside / "other.safetensors", inside / SOURCE_NAME):
        path.write_text("secret")
    assert Held(inside).read(FilePart(name, 0, 10)) is Withheld.NOT_HELD


@given(st.text(max_size=60), st.integers(0, 2**62), st.integers(1, 2**20))
def test_no_name_and_no_place_raises(folder: Path, name: str, start: int, count: int) -> None:
    for file in (name, WEIGHTS, "config.json"):
        piece = Held(folder).read(FilePart(file, start, start + count))
        assert isinstance(piece, Withheld) or piece.data == (folder / file).read_bytes()[start : start + count]


def test_an_index_decides_which_files_hold_weights(folder: Path, tmp_path: Path) -> None:
    inside = Path(shutil.copytree(folder, tmp_path / "tiny"))
    (inside / "part.safetensors").write_bytes(b"weights")
    index = {"weight_map": dict.fromkeys(_names(inside), "part.safetensors")}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Held(inside).read(FilePart("part.safetensors", 0, 7)) == FilePiece(0, 7, "", b"weights")
    assert Held(inside).read(FilePart(WEIGHTS, 0, 7)) is Withheld.NOT_HELD
    index = {"weight_map": dict.fromkeys(_names(inside), "../secret.safetensors")}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    assert Held(inside).read(FilePart("../secret.safetensors", 0, 7)) is Withheld.NOT_HELD


def _names(folder: Path) -> list[str]:
    data = (folder / WEIGHTS).read_bytes()
    return [name for name in json.loads(data[8 : header_bytes(folder)]) if name != "__metadata__"]


def test_of_the_cache_only_what_is_complete_is_given(folder: Path, cache: Path) -> None:
    data, header = (folder / WEIGHTS).read_bytes(), header_bytes(folder)
    keep(cache / WEIGHTS, data, (0, header), (header + 100, header + 300))
    held = Held(cache)
    asked = FilePart(WEIGHTS, header + 200, header + 900, len(data), '"v1"', layout=digest_of(folder))
    assert held.read(asked) == FilePiece(header + 200, len(data), '"v1"', data[header + 200 : header + 300])
    assert held.read(FilePart(WEIGHTS, header, header + 200)) is Withheld.NOT_HELD  # a hole
    (cache / "generation_config.json").write_text("{}")  # without a journal
    assert held.read(FilePart("generation_config.json", 0, 2)) is Withheld.NOT_HELD
    assert held.read(FilePart("chat_template.jinja", 0, 2)) is Withheld.NOT_HELD
    (cache / f"chat_template.jinja{ABSENT_SUFFIX}").touch()
    assert held.read(FilePart("chat_template.jinja", 0, 2)) is Withheld.ABSENT


def test_another_file_under_the_same_name_is_not_given(folder: Path, cache: Path) -> None:
    data, right = (folder / WEIGHTS).read_bytes(), digest_of(folder)
    keep(cache / WEIGHTS, data)
    assert layout_of(cache / WEIGHTS) == right
    held = Held(cache, revision="a" * 40)
    for part in (
        FilePart(WEIGHTS, 0, 9, size=len(data) + 1),
        FilePart(WEIGHTS, 0, 9, etag='"v2"'),
        FilePart(WEIGHTS, 0, 9, etag='"v2"', revision="b" * 40),
        FilePart(WEIGHTS, 0, 9, layout=sha256(b"another").digest()),
    ):
        assert held.read(part) is Withheld.OTHER_VERSION
    same = FilePart(WEIGHTS, 0, 9, len(data), '"v2"', "a" * 40, right)  # a commit's files never change
    assert held.read(same) == FilePiece(0, len(data), '"v1"', data[:9])


def test_a_file_without_its_whole_header_has_no_layout(folder: Path, cache: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    for have in ((0, 4), (0, 8), (0, header_bytes(folder) - 1)):
        (cache / WEIGHTS).unlink(missing_ok=True)
        keep(cache / WEIGHTS, data, have)
        assert layout_of(cache / WEIGHTS) == b""
    assert layout_of(cache / "nothing.safetensors") == b""
    keep(cache / "lies.safetensors", (2**60).to_bytes(8, "little") + b"{}")
    assert layout_of(cache / "lies.safetensors") == b""
