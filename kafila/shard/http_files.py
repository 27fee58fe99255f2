"""Reading a source's files over HTTP: byte ranges (RFC 9110 section 14), again where it breaks off.

Every answer is held against the version of the file that is wanted, so that bytes of two versions never meet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from kafila.errors import FetchFailed, ModelNotFound
from kafila.shard.journal import Version
from kafila.shard.patience import Attempts, Patience
from kafila.shard.source import Hub, Remote

TIMEOUT = httpx.Timeout(30.0, connect=10.0)
"""A connection that brings nothing for half a minute is taken for broken, and resumed."""
SMALL_BYTES = 64 * 2**20
"""A file that a server will not give in parts is taken whole up to this size: seconds on any line."""
TEXT_BYTES = 256 * 2**20
"""Longer than any tokenizer; a bound on what a server can make us hold in memory."""
SPARE = 0.01
"""Of what is wanted, so much more may be fetched to save requests. A member's target is 0.02 in all."""
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Sink = Callable[[int, bytes], None]
"""Takes bytes that belong at an offset."""


class SourceChanged(Exception):
    """The source has another version of ``file`` now; caught by whoever can begin it anew."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self.file = file


class _Again(Exception):
    """This attempt came to nothing and the next may do better."""

    def __init__(self, why: str, retry_after: str | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class HttpFiles:
    """The files of one remote source. Any thread may read."""

    spare = SPARE

    def __init__(self, source: Remote, patience: Patience, timeout: httpx.Timeout = TIMEOUT) -> None:
        self._source = source
        self._patience = patience
        self._client = httpx.Client(
            follow_redirects=True,
            timeout=timeout,
            # What is compressed on its way has no byte ranges of its own.
            headers={"Accept-Encoding": "identity", "User-Agent": "kafila", **source.headers},
        )

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def text(self, file: str, known: Version | None = None) -> tuple[Version, bytes] | None:
        """A small file, whole; None where the source has no such file.

        Raises `Unchanged` where it still is ``known``, FetchFailed where it does not come.
        """
        asked = {} if known is None else _unless(known.etag)
        attempts = self._attempts(file)
        while True:
            try:
                with self._ask(self._source.url(file), file, asked) as response:
                    if response.status_code == httpx.codes.NOT_MODIFIED:
                        raise Unchanged(file)
                    data = self._whole(response, file, TEXT_BYTES)
                    return Version(len(data), _validator(response)), data
            except ModelNotFound:
                return None
            except _Again as again:
                attempts.failed(str(again), again.retry_after)

    def commit(self, hub: Hub) -> str:
        """The commit that the hub has under a revision. Raises ModelNotFound, FetchFailed."""
        attempts = Attempts(self._patience, f"the commit of {hub}")
        while True:
            try:
                with self._ask(hub.commit_url, str(hub), {}) as response:
                    return str(json.loads(self._whole(response, str(hub), TEXT_BYTES))["sha"])
            except (ValueError, KeyError, TypeError) as error:
                raise FetchFailed(f"the hub does not say which commit {hub} is: check HF_ENDPOINT") from error
            except _Again as again:
                attempts.failed(str(again), again.retry_after)

    def beginning(self, file: str, count: int) -> tuple[Version, bytes]:
        """The file's version and its first bytes: ``count``, or all of them from a server that gives no parts.

        Raises ModelNotFound, FetchFailed.
        """
        attempts = self._attempts(file)
        while True:
            try:
                with self._ask(self._source.url(file), file, {"Range": f"bytes=0-{count - 1}"}) as response:
                    if response.status_code == httpx.codes.PARTIAL_CONTENT:
                        size = self._placed(response, file, 0)
                        return Version(size, _validator(response)), self._whole(response, file, count)
                    data = self._unparted(response, file)
                    return Version(len(data), _validator(response)), data
            except _Again as again:
                attempts.failed(str(again), again.retry_after)

    def read(self, file: str, version: Version, start: int, end: int, sink: Sink) -> None:
        """Bytes ``start`` to ``end`` of ``version`` into ``sink``, in order, each once.

        Raises SourceChanged, ModelNotFound, FetchFailed, and what ``sink`` raises.
        """
        attempts = self._attempts(file)
        at = start
        while at < end:
            try:
                for data in self._some(file, version, at, end):
                    sink(at, data)
                    at += len(data)
                    attempts.progressed()
            except _Again as again:
                attempts.failed(str(again), again.retry_after)
            else:
                if at < end:
                    attempts.failed("the connection breaks off")

    def _some(self, file: str, version: Version, start: int, end: int) -> Iterator[bytes]:
        """One request's worth, from ``start`` on; fewer than wanted where the connection breaks off."""
        asked = {"Range": f"bytes={start}-{end - 1}"}
        if version.etag.startswith('"'):  # only a strong validator may stand here (RFC 9110 section 13.1.5)
            asked["If-Range"] = version.etag
        with self._ask(self._source.url(file), file, asked) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise SourceChanged(file)
            parted = response.status_code == httpx.codes.PARTIAL_CONTENT
            if _validator(response) != version.etag:
                raise SourceChanged(file)
            if not parted:
                data = self._unparted(response, file)
                if len(data) != version.size:
                    raise SourceChanged(file)
                yield data[start:end]
                return
            if self._placed(response, file, start) != version.size:
                raise SourceChanged(file)
            left = end - start
            for data in self._stream(response):
                yield data[:left]
                left -= len(data)
                if left <= 0:
                    return

    def _unparted(self, response: httpx.Response, file: str) -> bytes:
        """All of a file whose server does not give parts. Raises FetchFailed where that is too much."""
        size = response.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > SMALL_BYTES:
            shown = f"{int(size) / 1e9:.1f} GB" if size.isdecimal() else "of a size it does not tell"
            raise FetchFailed(
                f"the server of {self._source} does not give parts of files (it ignores Range), and {file} is {shown}: "
                "fetch the checkpoint another way and point --model at its folder"
            )
        data = self._whole(response, file, SMALL_BYTES)
        if len(data) != int(size):
            raise _Again("the connection breaks off")
        return data

    def _placed(self, response: httpx.Response, file: str, start: int) -> int:
        """The size of the file of which this is the part that was asked for."""
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if (
            match is None
            or int(match[1]) != start
            or response.headers.get("Content-Encoding", "identity") != "identity"
        ):
            raise FetchFailed(
                f"the server of {self._source} answers with another part of {file} than it was asked for: "
                "fetch the checkpoint another way and point --model at its folder"
            )
        return int(match[3])

    def _whole(self, response: httpx.Response, file: str, limit: int) -> bytes:
        data = bytearray()
        for chunk in self._stream(response):
            data += chunk
            if len(data) > limit:
                raise FetchFailed(f"{file} of {self._source} is longer than {limit:,} bytes: is it the right address?")
        return bytes(data)

    def _stream(self, response: httpx.Response) -> Iterator[bytes]:
        for chunk in response.iter_bytes():  # as it comes: what was waited for to fill a chunk would be lost in a break
            self._patience.go_on()
            yield chunk

    @contextmanager
    def _ask(self, url: str, file: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """One request. Raises _Again for what passes, ModelNotFound and FetchFailed for what does not."""
        self._patience.go_on()
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                self._judge(response, file)
                yield response
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Again(_words(error)) from error
        except (httpx.TooManyRedirects, httpx.InvalidURL) as error:
            raise FetchFailed(f"{file} of {self._source} cannot be asked for ({_words(error)})") from error

    def _judge(self, response: httpx.Response, file: str) -> None:
        status = response.status_code
        if response.is_success or status in {httpx.codes.NOT_MODIFIED, httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE}:
            return
        said = f"{status} {response.reason_phrase}".strip()
        if status in _TRY_AGAIN:
            raise _Again(f"its server says {said}", response.headers.get("Retry-After"))
        if status in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            remedy = (
                "it may be private, gated or not exist; accept its terms on its page and log in with `hf auth login`, "
                "or set HF_TOKEN"
                if isinstance(self._source, Hub)
                else "this address is not open to everybody"
            )
            raise FetchFailed(f"{file} of {self._source} is not given to this machine ({said}): {remedy}")
        if status in {httpx.codes.NOT_FOUND, httpx.codes.GONE}:
            raise ModelNotFound(f"{self._source} has no {file}: point --model at a Hugging Face checkpoint")
        raise FetchFailed(f"{file} of {self._source} does not come: its server says {said}")

    def _attempts(self, file: str) -> Attempts:
        return Attempts(self._patience, f"{file} of {self._source}")


class Unchanged(Exception):
    """The file still is the version that is known."""


def _validator(response: httpx.Response) -> str:
    """What tells versions of a file apart: its ETag, without one its date, without both nothing."""
    return str(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")


def _unless(validator: str) -> dict[str, str]:
    """The header that asks for a file only if it is another one."""
    if validator.startswith(('"', "W/")):
        return {"If-None-Match": validator}
    return {"If-Modified-Since": validator} if validator else {}


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
