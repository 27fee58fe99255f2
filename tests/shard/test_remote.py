"""A member takes its own bytes of a checkpoint from a server, and makes of them what a whole copy would give."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from kafila.errors import FetchFailed, ModelIncomplete, ModelNotFound, UnsupportedModel
from kafila.shard.cache_folder import cached
from kafila.shard.chat import ChatFormat
from kafila.shard.journal import SparseFile, Version, recorded
from kafila.shard.load import load_shard
from kafila.shard.manifest import Checkpoint, open_checkpoint, own_specs, own_tensors
from kafila.shard.patience import Patience
from kafila.shard.ranges import total
from kafila.shard.remote import RemoteCheckpoint
from kafila.shard.source import parse_source
from kafila.shard.tensor_files import read_tensor
from kafila.shard.torch_ops import TorchOps
from kafila.types import BlockRange, Segment, TensorSpec
from tests.integration.models import TEMPLATE, talking_checkpoint
from tests.shard.checkpoints import edit_config, make_checkpoint
from tests.shard.web import Asked, Fault, Web, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARE = BlockRange(1, 3)


def own(checkpoint: Checkpoint) -> list[str]:
    return own_tensors(checkpoint, SHARE, holds_head=False)


def specs(checkpoint: Checkpoint) -> list[TensorSpec]:
    return own_specs(checkpoint, SHARE, holds_head=False)


def unseen(_done: int, _of: int) -> None:
    pass


def weights_of(checkpoint: Checkpoint, names: list[str]) -> int:
    return sum(checkpoint.tensors[name].end - checkpoint.tensors[name].start for name in names)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files; every sync of every file of a cache takes its time."""
    return _in_few_files(make_checkpoint(tmp_path_factory.mktemp("made"), "llama"))


def _in_few_files(folder: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="130KB")
    return folder


def part(folder: Path, number: int) -> Path:
    """One of its weight files."""
    return sorted(folder.glob("*.safetensors"))[number]


@pytest.fixture
def original(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "web" / "tiny"))


@pytest.fixture
def web(original: Path) -> Iterator[Web]:
    with serving(original.parent) as web:
        yield web


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def here(web: Web, tmp_path: Path, told: list[str]) -> Iterator[Callable[[], RemoteCheckpoint]]:
    """Looks at the server with the test's cache; again and again, as processes do one after another."""
    opened: list[RemoteCheckpoint] = []

    def look(source: str | None = None, revision: str = "") -> RemoteCheckpoint:
        found = RemoteCheckpoint(
            parse_source(source or web.base + "tiny"),  # type: ignore[arg-type]  # never a folder here
            Patience(wait=lambda seconds: None),
            revision=revision,
            root=tmp_path / "cache",
            told=told.append,
        )
        opened.append(found)
        return found

    yield look
    for one in opened:
        one.close()


def same_bytes(fetched: Checkpoint, original: Path, names: list[str]) -> None:
    whole = open_checkpoint(original)
    for name in names:
        mine = read_tensor(fetched.folder, fetched.tensors[name])
        assert mine.data.tobytes() == read_tensor(original, whole.tensors[name]).data.tobytes(), name


def test_headers_alone_tell_what_a_whole_copy_tells(here: Any, original: Path, web: Web) -> None:
    checkpoint, _ = here().open()
    whole = open_checkpoint(original)
    assert checkpoint.name == "tiny"
    assert checkpoint.config == whole.config
    assert checkpoint.tensors == whole.tensors
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in original.glob("*.safetensors"))
    assert web.weight_bytes <= headers + 8 * 256


def test_own_tensors_and_hardly_a_byte_more(here: Any, original: Path, web: Web) -> None:
    remote = here()
    checkpoint, _ = remote.open()
    steps: list[tuple[int, int]] = []
    fetched = remote.fetch(specs, lambda done, of: steps.append((done, of)))
    same_bytes(fetched, original, own(fetched))
    share = weights_of(checkpoint, own(checkpoint))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in original.glob("*.safetensors"))
    assert web.weight_bytes <= share * 1.02 + headers + 8 * 256  # a tiny checkpoint's headers are no tiny part of it
    assert steps[-1][0] == steps[-1][1] >= share
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_of_the_vocabulary_a_last_member_fetches_its_rows(here: Any, original: Path, web: Web) -> None:
    last = BlockRange(3, 4)
    remote = here()
    checkpoint, _ = remote.open()
    web.forget()
    shares = [own_specs(checkpoint, last, holds_head=False, scored_percent=percent) for percent in (0, 50)]
    remote.fetch(lambda _: shares[0], unseen)
    without = web.weight_bytes
    remote.fetch(lambda _: shares[1], unseen)
    norm, rows = shares[1][len(shares[0]) :]
    assert norm.name == "model.norm.weight"
    assert web.weight_bytes - without <= 1.02 * (norm.end - norm.start + rows.end - rows.start)
    assert rows.shape == (67, 48)
    mine, whole = read_tensor(remote.folder, rows), read_tensor(original, checkpoint.tensors["lm_head.weight"])
    assert mine.data.tobytes() == whole.data[64:].tobytes()
    ops = TorchOps("cpu", "float32", threads=1)
    load_shard(ops, checkpoint, last, holds_head=False, slots=1, context=8, scored_percent=50)
    with pytest.raises(ModelIncomplete, match="was not fetched"):
        load_shard(ops, checkpoint, last, holds_head=True, slots=1, context=8, scored_percent=50)


def test_nothing_is_fetched_twice_by_whoever_comes_next(here: Any, original: Path, web: Web) -> None:
    here().open()
    here().fetch(specs, unseen)
    web.forget()
    fetched = here().fetch(specs, unseen)
    assert web.weight_bytes == 8 * len(list(original.glob("*.safetensors")))  # each file is still the same?
    web.forget()
    other = BlockRange(2, 4)
    here().fetch(lambda checkpoint: own_specs(checkpoint, other, holds_head=False), unseen)
    last = [name for name in own_tensors(fetched, other, holds_head=False) if name.startswith("model.layers.3.")]
    assert web.weight_bytes <= 1.02 * weights_of(fetched, last) + 8 * len(list(original.glob("*.safetensors")))


def test_a_share_computes_as_from_a_whole_copy_and_other_shares_are_refused(here: Any, original: Path) -> None:
    ops = TorchOps("cpu", "float32", threads=1)
    fetched = here().fetch(specs, unseen)

    def forward(checkpoint: Checkpoint) -> bytes:
        shard = load_shard(ops, checkpoint, SHARE, holds_head=False, slots=1, context=8)
        return shard.forward([Segment(0, 0, 1, sample=False)], None, np.ones(48, "<f4").tobytes(), "float32")

    assert forward(fetched) == forward(open_checkpoint(original))
    with pytest.raises(ModelIncomplete, match=r"safetensors: model\.layers\.3\..* was not fetched"):
        load_shard(ops, fetched, BlockRange(2, 4), holds_head=False, slots=1, context=8)


@pytest.mark.parametrize("whole", [False, True])
def test_a_file_that_another_process_begins_anew_while_it_is_loaded_is_noticed(here: Any, *, whole: bool) -> None:
    ops = TorchOps("cpu", "float32", threads=1)
    fetched = here().fetch(specs, unseen)

    def replaced(done: int, _of: int) -> None:
        path = fetched.folder / fetched.tensors[own(fetched)[-1]].file
        if done:
            with SparseFile(path, Version(path.stat().st_size, "another")) as file:
                file.commit(0, path.stat().st_size if whole else 8)

    with pytest.raises(ModelIncomplete, match="was replaced while" if whole else "was not fetched"):
        load_shard(ops, fetched, SHARE, holds_head=False, slots=1, context=8, progress=replaced)


def test_an_architecture_we_do_not_have_is_declined_from_its_config_alone(here: Any, original: Path, web: Web) -> None:
    edit_config(original, architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        here().open()
    assert list(web.sent) == ["tiny/config.json"]


def test_an_address_without_a_checkpoint(here: Any, web: Web) -> None:
    with pytest.raises(ModelNotFound, match=r"nowhere/ has no config\.json"):
        here(web.base + "nowhere").open()


def _damage_index(folder: Path, **weights: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= weights
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    path.write_text(json.dumps(index))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: _damage_index(folder, **{NORM: None}), "lists no tensor model.norm.weight"),
        (lambda folder: _damage_index(folder, **{NORM: part(folder, 0).name}), "has no tensor"),
        (lambda folder: _damage_index(folder, **{NORM: "gone.safetensors"}), "no gone.safetensors"),
        (lambda folder: _damage_index(folder, **{NORM: "../../x.safetensors"}), "no file beside it"),
        (lambda folder: _damage_index(folder, **{NORM: "source.json"}), "no .safetensors"),
        (lambda folder: edit_config(folder, intermediate_size=81), "has shape"),
        (lambda folder: os.truncate(part(folder, 1), 9000), "00002.* is truncated"),
        (lambda folder: os.truncate(part(folder, 1), 5), "00002.* is truncated"),
        (lambda folder: part(folder, 1).unlink(), "00002"),
    ],
)
def test_what_is_wrong_is_named_before_any_weight(
    here: Any, original: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(original)
    with pytest.raises(ModelIncomplete, match=words):
        here().open()


@pytest.mark.parametrize("home", ["tokenizer_config.json", "chat_template.jinja"])
def test_both_homes_of_the_chat_template(here: Any, original: Path, home: str) -> None:
    shutil.rmtree(original)
    talking_checkpoint(original)
    if home == "chat_template.jinja":
        (original / home).write_text(TEMPLATE)
        config = json.loads((original / "tokenizer_config.json").read_text())
        del config["chat_template"]
        (original / "tokenizer_config.json").write_text(json.dumps(config))
    remote = here()
    remote.open()
    fetched, whole = (ChatFormat.load(folder, lambda: None) for folder in (remote.language(), original))  # type: ignore[arg-type, return-value]  # no date in it
    hello = [{"role": "user", "content": "hello"}]
    assert fetched.encode(hello) == whole.encode(hello)
    assert fetched.stop_ids == whole.stop_ids


def test_the_older_dialect_of_the_config(here: Any, original: Path) -> None:
    edit_config(original, rope_parameters=None, rope_theta=5000.0, dtype=None, torch_dtype="float32")
    checkpoint, _ = here().open()
    assert (checkpoint.config.ropes[0].theta, checkpoint.config.dtype) == (5000.0, "float32")


def test_a_template_that_is_gone_at_the_source_is_gone_here(here: Any, original: Path) -> None:
    (original / "chat_template.jinja").write_text("x")
    remote = here()
    remote.open()
    assert (remote.language() / "chat_template.jinja").is_file()
    (original / "chat_template.jinja").unlink()
    assert not (here().language() / "chat_template.jinja").exists()


# -- sources that change ----------------------------------------------------------------------------------------------


def replaced(web: Web, path: Path, times: int) -> None:
    """As often as weights of a file are asked for, it is replaced before they go out."""
    left = [times]

    def fault(asked: Asked) -> Fault | None:
        if left[0] and asked.file.endswith(path.name) and asked.range is not None and asked.range[1] > 2000:
            left[0] -= 1
            _write_anew(path, left[0])
        return None

    web.fault = fault


def _write_anew(path: Path, mark: int) -> None:
    """The same tensors in a file of another ETag."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {"mark": str(mark)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_file_replaced_while_it_is_fetched_is_fetched_again(
    here: Any, original: Path, web: Web, told: list[str]
) -> None:
    remote = here()
    checkpoint, _ = remote.open()
    file = checkpoint.tensors[own(checkpoint)[3]].file
    replaced(web, original / file, times=1)
    fetched = remote.fetch(specs, unseen)
    same_bytes(fetched, original, own(fetched))
    assert any(f"{file} has changed" in line for line in told)


def test_a_file_that_keeps_changing_is_given_up(here: Any, original: Path, web: Web) -> None:
    remote = here()
    checkpoint, _ = remote.open()
    file = checkpoint.tensors[own(checkpoint)[3]].file
    replaced(web, original / file, times=1000)
    with pytest.raises(FetchFailed, match=f"{file} keeps changing"):
        remote.fetch(specs, unseen)


def test_another_checkpoint_at_the_same_place_is_not_mixed_in(
    here: Any, original: Path, web: Web, tmp_path: Path
) -> None:
    remote = here()
    _, first = remote.open()
    other = _in_few_files(make_checkpoint(tmp_path / "other", "llama", seed=1))
    shutil.copytree(other, original, dirs_exist_ok=True)
    with pytest.raises(FetchFailed, match="another checkpoint than when this session looked"):
        remote.fetch(specs, unseen)
    again = here()
    _, second = again.open()
    assert second != first
    fetched = again.fetch(specs, unseen)
    same_bytes(fetched, other, own(fetched))


def test_what_was_fetched_is_enough_where_the_source_is_away(
    here: Any, original: Path, web: Web, told: list[str]
) -> None:
    here().fetch(specs, unseen)
    here().language()
    web.fault = lambda asked: Fault(503)
    fetched = here().fetch(specs, unseen)
    same_bytes(fetched, original, own(fetched))
    assert sum("what was fetched before is used" in line for line in told) == 1
    other = here()
    other.open()
    with pytest.raises(FetchFailed, match="503"):
        other.fetch(lambda checkpoint: own_specs(checkpoint, BlockRange(0, 1), holds_head=False), unseen)


def test_a_server_without_ranges_gives_small_files_whole(here: Any, original: Path, web: Web) -> None:
    web.ranges = False
    fetched = here().fetch(specs, unseen)
    same_bytes(fetched, original, own(fetched))
    assert all(count == (original.parent / file).stat().st_size for file, count in web.sent.items())


def test_the_first_failure_ends_all_of_it_and_what_came_is_kept(here: Any, original: Path, web: Web) -> None:
    remote = here()
    checkpoint, _ = remote.open()
    last = checkpoint.tensors[own(checkpoint)[-1]].file
    web.fault = lambda asked: Fault(403) if asked.file.endswith(last) else None
    with pytest.raises(FetchFailed, match="403"):
        remote.fetch(specs, unseen)
    kept = {path.name: recorded(path) for path in original.parents[1].glob("cache/*/*.safetensors")}
    lacked = 0
    for name in own(checkpoint):
        spec = checkpoint.tensors[name]
        journal = kept[spec.file]
        assert journal is not None
        lacked += total(journal.lacks([(spec.start, spec.end)]))
    assert lacked
    web.fault = lambda asked: None
    web.forget()
    here().fetch(specs, unseen)
    assert lacked <= web.weight_bytes <= lacked * 1.02 + 8 * len(kept)


# -- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(web: Web, original: Path, monkeypatch: pytest.MonkeyPatch) -> Web:
    """The server as the hub's own paths: a branch that names a commit, and its files."""
    _commit(web, "main", COMMIT)
    resolved = web.folder / "org" / "tiny" / "resolve"
    resolved.mkdir(parents=True)
    (resolved / COMMIT).symlink_to(original)
    for room in ("source", "remote"):
        monkeypatch.setattr(f"kafila.shard.{room}.hub_endpoint", lambda: web.base.rstrip("/"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return web


def _commit(web: Web, revision: str, commit: str) -> None:
    path = web.folder / "api/models/org/tiny/revision" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sha": commit, "id": "org/tiny"}))


def test_a_name_on_the_hub_is_pinned_to_its_commit(here: Any, hub: Web, original: Path) -> None:
    remote = here("org/tiny")
    assert remote.revision == COMMIT
    fetched = remote.fetch(specs, unseen)
    assert fetched.name == "tiny"
    same_bytes(fetched, original, own(fetched))
    assert {asked.headers.get("Authorization") for asked in hub.asked} == {"Bearer hf_secret"}
    assert all(COMMIT in asked.file or asked.file.startswith("api/") for asked in hub.asked)
    # What is of a commit never changes: whoever knows the commit and has the files asks nobody.
    here("org/tiny", COMMIT).language()
    hub.forget()
    here("org/tiny", COMMIT).fetch(specs, unseen)
    assert hub.asked == []


def test_a_redirect_to_elsewhere_does_not_take_the_token_along(here: Any, hub: Web, original: Path) -> None:
    with serving(original) as store:
        hub.fault = lambda asked: (
            Fault(302, {"Location": store.base + asked.file.rpartition("/")[2]}) if "resolve" in asked.file else None
        )
        fetched = here("org/tiny").fetch(specs, unseen)
        same_bytes(fetched, original, own(fetched))
        assert store.asked
        assert not any("Authorization" in asked.headers for asked in store.asked)


def test_a_name_the_hub_does_not_have(here: Any, hub: Web) -> None:
    with pytest.raises(ModelNotFound, match=r"no folder org/other here, and the hub has no such model"):
        here("org/other")
    with pytest.raises(ModelNotFound, match="revision"):
        here("org/tiny@nowhere")


def test_an_endpoint_that_is_no_hub(here: Any, hub: Web) -> None:
    path = hub.folder / "api/models/org/tiny/revision/main"
    for answer in ("<html>", "[]", '{"id": "org/tiny"}'):
        path.write_text(answer)
        with pytest.raises(FetchFailed, match="HF_ENDPOINT"):
            here("org/tiny")


def test_the_last_commit_is_used_where_the_hub_does_not_answer(
    here: Any, hub: Web, original: Path, told: list[str]
) -> None:
    here("org/tiny").fetch(specs, unseen)
    hub.fault = lambda asked: Fault(503)
    again = here("org/tiny")
    assert again.revision == COMMIT
    same_bytes(again.fetch(specs, unseen), original, own(again.open()[0]))
    assert any("which was used last" in line for line in told)
    with pytest.raises(FetchFailed, match="503"):
        here("org/tiny@v2")
    with pytest.raises(FetchFailed, match="503"):
        here("org/another")


def test_two_commits_are_two_checkpoints(here: Any, hub: Web, original: Path, tmp_path: Path) -> None:
    first = here("org/tiny").fetch(specs, unseen)
    newer = _in_few_files(make_checkpoint(tmp_path / "newer", "llama", seed=5))
    (hub.folder / "org/tiny/resolve" / COMMIT[::-1]).symlink_to(newer)
    _commit(hub, "main", COMMIT[::-1])
    second = here("org/tiny").fetch(specs, unseen)
    same_bytes(first, original, own(first))
    same_bytes(second, newer, own(second))
    assert len({item.source for item in cached(tmp_path / "cache")}) == 2


# -- the disk ---------------------------------------------------------------------------------------------------------


def test_a_disk_too_small_is_known_before_weights_are_fetched(
    here: Any, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = here()
    remote.open()
    web.forget()
    real = os.statvfs

    def small(path: Path) -> os.statvfs_result:
        found = list(real(path))
        found[4] = 1  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr("kafila.shard.cache_folder.os.statvfs", small)
    with pytest.raises(FetchFailed, match=r"0\.00 GB are free.*cache prune"):
        remote.fetch(specs, unseen)
    assert web.asked == []


def test_a_disk_that_is_full_in_the_middle_says_so(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = here()
    remote.open()

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kafila.shard.journal.os.pwrite", full)
    with pytest.raises(FetchFailed, match="is full"):
        remote.fetch(specs, unseen)
    monkeypatch.undo()
    remote.fetch(specs, unseen)


def test_a_place_that_may_not_be_written_is_known_at_once(web: Web, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(FetchFailed, match="cannot be kept in"):
        RemoteCheckpoint(parse_source(web.base + "tiny"), Patience(), root=tmp_path / "file" / "cache")  # type: ignore[arg-type]  # no folder
    assert web.asked == []


def test_two_threads_of_different_owners_wait_for_one_another(here: Any, original: Path, web: Web) -> None:
    """The lock is between open files, so two owners in one process are as good as two processes."""
    fetched: list[Checkpoint] = []

    def fetch() -> None:
        fetched.append(here().fetch(specs, unseen))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 3
    for one in fetched:
        same_bytes(one, original, own(one))
    share = weights_of(fetched[0], own(fetched[0]))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in original.glob("*.safetensors"))
    assert web.weight_bytes <= 1.02 * share + 3 * headers + 8 * 256
    assert all(recorded(path) is not None for path in fetched[0].folder.glob("*.safetensors"))
