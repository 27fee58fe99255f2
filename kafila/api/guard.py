"""Who may use a member's interface (pure).

The interface listens on loopback, where every program of this machine may speak, and so may every web page in its
browsers. A page must not use it, so a request is refused

- whose ``Host`` is no name of this machine: a page whose name was made to resolve to 127.0.0.1 (DNS rebinding) still
  says its own name;
- whose ``Origin`` is not the interface itself, and which a browser marks as another site's (Fetch Metadata,
  ``Sec-Fetch-Site``), except that anybody may link to the page.

No answer ever carries a CORS header. Where a key is set it has to come with every request but those for the page itself
and for ``/health``.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from kafila.api.refusals import Refused

_LOOPBACK_NAMES = {"localhost", "host.docker.internal"}
"""The second is how a container calls the machine it runs on; it is no name of the public DNS."""
_OPEN_PATHS = {"/", "/health"}
"""What a key is not asked for: the page, which then asks its reader for one, and whether the member is alive."""


@dataclass(frozen=True, slots=True)
class Guard:
    """``host`` is what the interface was bound to; ``key`` None: none is needed, which is only safe on loopback."""

    host: str
    key: str | None = None
    names: frozenset[str] = frozenset()
    """More names of this machine."""

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise Refused unless the request may be answered. Header names are in lower case."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            text = f"the Host header {host!r} is no name of this machine: use http://localhost or its address"
            raise Refused(403, text, code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host.lower()}", f"https://{host.lower()}"}:
            raise Refused(403, f"a page of {origin} may not use this interface", code="origin_not_allowed")
        if headers.get("sec-fetch-site", "none") not in {"same-origin", "none"} and not _is_link(method, path, headers):
            raise Refused(403, "a page of another site may not use this interface", code="origin_not_allowed")
        if self.key is not None and path not in _OPEN_PATHS and not _matches(self.key, headers):
            raise Refused(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )

    def _is_ours(self, host: str) -> bool:
        name = _host_name(host)
        if name in _LOOPBACK_NAMES or name in {self.host.lower(), *self.names}:
            return True
        try:
            address, bound = ip_address(name), ip_address(self.host)
        except ValueError:
            return False
        # An address in the place of a name cannot be rebound. Which ones are this machine's is known to its owner only.
        return address.is_loopback or bound.is_unspecified


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at ``host``."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    if host.startswith("["):
        inside, bracket, _ = host[1:].partition("]")
        return inside.lower() if bracket else ""
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _is_link(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether somebody followed a link to the page."""
    return method in {"GET", "HEAD"} and path == "/" and headers.get("sec-fetch-mode") == "navigate"


def _matches(key: str, headers: Mapping[str, str]) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")
    return hmac.compare_digest(given.strip().encode(), key.encode())
