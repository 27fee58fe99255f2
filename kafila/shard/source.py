"""Where a checkpoint comes from: a folder here, any web server, or the hub by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from kafila.errors import FetchFailed, UsageError

_HUB_NAME = re.compile(r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)
_HUB_PAGE = re.compile(r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(/tree/(?P<revision>[^/?#\s]+))?/?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
"""The hub's default revision."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A checkpoint on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class Web:
    """A folder of a web server; ``base`` ends with a slash."""

    base: str

    def __str__(self) -> str:
        return self.base

    @property
    def name(self) -> str:
        """What the checkpoint is called."""
        parts = urlsplit(self.base)
        return parts.path.rstrip("/").rpartition("/")[2] or parts.hostname or "checkpoint"

    def url(self, file: str) -> str:
        """Where a file of it is."""
        return self.base + quote(file)

    @property
    def headers(self) -> Mapping[str, str]:
        """Nothing to show: whoever knows the address may read."""
        return {}


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository of the hub at a revision: as typed, or the commit it was resolved to."""

    repository: str
    revision: str = MAIN
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """With this machine's token, where its owner is logged in. It is shown to the hub and goes nowhere else."""

    def __str__(self) -> str:
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"

    @property
    def name(self) -> str:
        """What the checkpoint is called."""
        return self.repository.rpartition("/")[2]

    @property
    def commit(self) -> str | None:
        """The commit, if the revision is one: what is there never changes."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None

    def at(self, commit: str) -> Hub:
        """The same repository at a commit."""
        return replace(self, revision=commit)

    def url(self, file: str) -> str:
        """Where a file of it is."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415  - half a second, for hub names alone

        return hf_hub_url(self.repository, file, revision=self.revision, endpoint=hub_endpoint())

    @property
    def commit_url(self) -> str:
        """What answers with the commit of the revision."""
        return f"{hub_endpoint()}/api/models/{self.repository}/revision/{quote(self.revision, safe='')}"


@dataclass(frozen=True, slots=True)
class Members:
    """No address: a checkpoint that another member of the session has in a folder of its own."""

    name: str
    """What the host calls it."""
    fingerprint: str

    def __str__(self) -> str:
        return self.name


Remote = Web | Hub
Elsewhere = Web | Hub | Members
Source = Folder | Web | Hub


def hub_endpoint() -> str:
    """The hub's address; ``HF_ENDPOINT`` in the environment overrides it. Raises FetchFailed where the hub's library is
    not installed."""
    try:
        from huggingface_hub import constants  # noqa: PLC0415  - as above
    except ModuleNotFoundError as error:
        raise FetchFailed(
            f"nothing can be fetched from the hub by name here ({error.name} is missing): pip install 'kafila[torch]'"
        ) from error
    return constants.ENDPOINT.rstrip("/")


def parse_source(text: str) -> Source:
    """What ``--model`` means. Raises UsageError for an address that cannot be handed on.

    A folder that exists is meant even where its path looks like a repository's name.
    """
    if text.startswith(("http://", "https://")):
        return _hub_page(text) or _web(text)
    path = Path(text).expanduser()
    match = _HUB_NAME.fullmatch(text)
    if match is None or path.exists():
        return Folder(path)
    return Hub(match["repository"], match["revision"] or MAIN)


def signed_in(source: Hub) -> Hub:
    """With the token of this machine's owner, who may have none."""
    from huggingface_hub import get_token  # noqa: PLC0415  - as above

    token = get_token()
    return replace(source, headers={"Authorization": f"Bearer {token}"} if token else {})


def _hub_page(text: str) -> Hub | None:
    """The repository whose page a person has copied the address of; None for other addresses."""
    try:
        page = text.removeprefix(hub_endpoint() + "/")
    except FetchFailed:
        return None
    match = _HUB_PAGE.fullmatch(page)
    return None if match is None else Hub(match["repository"], match["revision"] or MAIN)


def _web(text: str) -> Web:
    try:
        parts = urlsplit(text)
        known = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"{text!r} is no address: write it as https://host/path/")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            "the model's address is told to every member, so it may hold no password, ? or #: "
            "write it as https://host/path/"
        )
    return Web(text.rstrip("/") + "/")
