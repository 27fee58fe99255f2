"""What --model means."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafila.errors import UsageError
from kafila.shard.source import Folder, Hub, Source, Web, parse_source, signed_in


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("/models/tiny", Folder(Path("/models/tiny"))),
        ("./org/name", Folder(Path("org/name"))),
        ("../models/tiny", Folder(Path("../models/tiny"))),
        ("tiny", Folder(Path("tiny"))),
        ("a/b/c", Folder(Path("a/b/c"))),
        ("org/name", Hub("org/name")),
        ("org/name-1.5_b@v2.0", Hub("org/name-1.5_b", "v2.0")),
        ("org/name@refs/pr/3", Hub("org/name", "refs/pr/3")),
        ("https://host/models/tiny", Web("https://host/models/tiny/")),
        ("http://host:8000", Web("http://host:8000/")),
        ("http://[::1]:8000/a/", Web("http://[::1]:8000/a/")),
    ],
)
def test_folders_addresses_and_names(text: str, source: Source) -> None:
    assert parse_source(text) == source


def test_the_address_of_a_hub_page_means_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafila.shard.source.hub_endpoint", lambda: "https://hub.example")
    assert parse_source("https://hub.example/org/name") == Hub("org/name")
    assert parse_source("https://hub.example/org/name/") == Hub("org/name")
    assert parse_source("https://hub.example/org/name/tree/v2") == Hub("org/name", "v2")
    assert parse_source("https://hub.example/org/name/a/b") == Web("https://hub.example/org/name/a/b/")
    assert parse_source("https://host.example/org/name") == Web("https://host.example/org/name/")


def test_a_folder_that_exists_is_meant_even_if_it_looks_like_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_source("org/name") == Folder(Path("org/name"))


def test_home_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert parse_source("~/tiny") == Folder(Path("/home/ada/tiny"))


@pytest.mark.parametrize("text", ["https://ada:secret@host/m/", "https://host/m?token=secret", "https://host/#secret"])
def test_an_address_with_a_secret_in_it_is_not_told_to_others(text: str) -> None:
    with pytest.raises(UsageError, match="told to every member") as caught:
        parse_source(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["http://", "https:///path", "http://host:port/", "http://[::1/"])
def test_an_address_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        parse_source(text)


def test_names_and_addresses_of_files() -> None:
    web = Web("https://host/models/a model/")
    assert web.name == "a model"
    assert web.url("x y.json") == "https://host/models/a model/x%20y.json"
    assert Web("https://host/").name == "host"
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub = Hub("org/name").at(commit)
    assert hub.name == "name"
    assert hub.commit == commit
    assert Hub("org/name").commit is None
    assert hub.url("config.json").endswith(f"/org/name/resolve/{commit}/config.json")


def test_a_token_stands_in_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub = signed_in(Hub("org/name"))
    assert hub.headers == {"Authorization": "Bearer hf_secret"}
    assert "secret" not in f"{hub} {hub!r}"
