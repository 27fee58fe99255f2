"""Who may use the interface, and from where."""

from __future__ import annotations

import pytest

from kafila.api.guard import Guard, is_loopback
from kafila.api.refusals import Refused
from tests.api.world import ScriptedEngine, interface

OPEN = Guard("127.0.0.1")


def status(guard: Guard, headers: dict[str, str], path: str = "/v1/models", method: str = "GET") -> int:
    try:
        guard.check(method, path, headers)
    except Refused as refused:
        return refused.status
    return 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:11435", "LOCALHOST:1", "127.0.0.1:11435", "127.0.0.9", "[::1]:80", "host.docker.internal"],
)
def test_our_names(host: str) -> None:
    assert status(OPEN, {"host": host}) == 200


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:11435", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.2",
     "[::2]", "127.0.0.1@evil.example", "[127.0.0.1", "localhost:x:y", "[::1", ":11435", "0.0.0.0"],  # noqa: S104  - said, not bound
)  # fmt: skip
def test_other_names(host: str) -> None:
    assert status(OPEN, {"host": host}) == 403


def test_where_it_was_bound() -> None:
    assert status(Guard("box.lan", "k"), {"host": "box.lan:80", "x-api-key": "k"}) == 200
    wide = Guard("0.0.0.0", "k", frozenset({"box"}))  # noqa: S104  - what an owner may write
    for host, expected in (("192.168.1.2:80", 200), ("[fe80::1]", 200), ("box", 200), ("evil.example", 403)):
        assert status(wide, {"host": host, "x-api-key": "k"}) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": "http://localhost:80"}, 200),
        ({"origin": "http://localhost"}, 403),
        ({"origin": "http://localhost:81"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
    ],
)
def test_pages_of_others(headers: dict[str, str], expected: int) -> None:
    assert status(OPEN, {"host": "localhost:80", **headers}) == expected


def test_a_link_to_the_page_may_be_followed() -> None:
    headers = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert status(OPEN, headers, "/") == 200
    assert status(OPEN, headers, "/", "POST") == 403
    assert status(OPEN, {**headers, "sec-fetch-mode": "no-cors"}, "/") == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"authorization": "Bearer sesame"}, 200),
        ({"authorization": "bearer  sesame "}, 200),
        ({"authorization": "Bearer sesam"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic sesame"}, 401),
        ({"x-api-key": "sesame"}, 200),
        ({"x-api-key": "s\xe9same"}, 401),
    ],
)
def test_keys(headers: dict[str, str], expected: int) -> None:
    guard = Guard("127.0.0.1", "sesame")
    assert status(guard, {"host": "localhost", **headers}) == expected
    assert status(guard, {"host": "localhost", **headers}, "/") == 200
    assert status(guard, {"host": "localhost", **headers}, "/health") == 200


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.168.0.1", "box", ""]))  # noqa: S104  - not bound


async def test_over_http() -> None:
    async with interface(ScriptedEngine(), key="sesame") as client:
        refused = await client.get("/v1/models")
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json["error"]["code"] == "invalid_api_key"
        assert (await client.get("/v1/models", ("Authorization", "Bearer sesame"))).status == 200
        assert isinstance((await client.get("/api/tags")).json["error"], str)
    async with interface(ScriptedEngine()) as client:
        page = ("Origin", "http://evil.example")
        for path in ("/v1/models", "/api/tags", "/ring", "/metrics", "/"):
            reply = await client.get(path, page)
            assert reply.status == 403
            assert not [name for name in reply.headers if name.startswith("access-control")]
        assert (await client.request("OPTIONS", "/v1/models", headers=[page])).status == 403
        allowed = await client.get("/v1/models")
        assert not [name for name in allowed.headers if name.startswith("access-control")]
        for host in ("evil.example", "evil.example:80"):
            assert (await client.get("/ring", ("Host", host))).status == 403
        assert (
            (await client.get("/"))
            .headers["content-security-policy"]
            .startswith("default-src 'none'; script-src 'sha256-")
        )
