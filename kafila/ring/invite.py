"""Session codes: what a host reads aloud and a member types.

    AB3DE-XXXX-XXXX-XXXX-XXXC            the default rendezvous
    AB3DE-XXXX-XXXX-XXXX-XXXC@host:port  another one; IPv6 literals stand in brackets

Five characters of locator, which the rendezvous learns; fifteen of secret, which it never does; one check character.
The alphabet is Crockford's base32: no I, L, O or U, so what looks like a 1 or a 0 is one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from kafila.errors import InvitationError, UsageError

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LOCATOR_CHARS = 5
"""25 bits: 33 million, so that live sessions seldom collide (the rendezvous refuses a locator in use)."""
SECRET_CHARS = 15
"""75 bits: out of reach of guessing even for the rendezvous, which holds sealed messages to test guesses on."""
_CODE_CHARS = LOCATOR_CHARS + SECRET_CHARS + 1

_VALUE = {character: value for value, character in enumerate(ALPHABET)}
_LOOKALIKES = str.maketrans("OIL", "011")

# GF(32) as polynomials modulo x^5 + x^2 + 1, which is primitive: the powers of x run through all 31 nonzero values.
_REDUCTION = 0b100101

_QUOTES_AND_CASES = "\"'`<>.,;"
"""What clings to a code pasted out of a sentence or a shell command."""
_IGNORED_CATEGORIES = frozenset({"Pd", "Pi", "Pf", "Zs", "Zl", "Zp", "Cc", "Cf"})
"""Unicode categories that carry no character of a code: dashes, typographic quotes, spaces, control and format."""
_IGNORED = frozenset("\"'`_\N{MINUS SIGN}")

_MAX_HOST_PORT_CHARS = 253 + len(":65535")
"""A DNS name has at most 253 characters (RFC 1035 section 2.3.4)."""
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*\.?\Z")


class HostPort(NamedTuple):
    """Where a rendezvous listens: a host name or IP literal, not yet resolved, and a UDP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str) -> HostPort:
    """``host:port`` or ``[v6]:port``. Raises UsageError that says what is wrong and how it should look."""
    text = text.strip()
    if len(text) > _MAX_HOST_PORT_CHARS:
        raise UsageError("an address of that length names no machine: write it as host:7443")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not rest.startswith(":"):
            raise UsageError(f"{text!r} is not an address: an IPv6 one looks like [2001:db8::1]:7443")
        return HostPort(_ipv6(host), _port(rest[1:], text))
    host, colon, port = text.rpartition(":")
    if not colon:
        raise UsageError(f"{text!r} names no port: write it as {text or 'host'}:7443")
    if ":" in host:
        raise UsageError(f"{text!r} needs brackets round its IPv6 address, as in [2001:db8::1]:7443")
    host = host.lower()
    if not _HOST_NAME.match(host):
        raise UsageError(f"{host!r} is neither a host name nor an IP address")
    return HostPort(host, _port(port, text))


def _ipv6(host: str) -> str:
    try:
        literal = ip_address(host)
    except ValueError:
        literal = None
    if not isinstance(literal, IPv6Address) or literal.scope_id is not None:
        raise UsageError(f"{host!r} is not an IPv6 address (link-local zones cannot be shared, leave them out)")
    return str(literal)


def _port(port: str, whole: str) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise UsageError(f"{whole!r} has no usable port: it is a number from 1 to 65535")
    return int(port)


@dataclass(frozen=True, slots=True)
class SessionCode:
    """One invitation. ``str()`` is the line to hand to a member; ``repr()`` keeps the secret to itself.

    ``locator`` and ``secret`` are in canonical form (upper case, no look-alikes, no dashes).
    """

    locator: str
    secret: str = field(repr=False)
    rendezvous: HostPort | None = None

    @classmethod
    def new(cls, randbytes: Callable[[int], bytes], rendezvous: HostPort | None = None) -> SessionCode:
        """A fresh code. ``randbytes(n)`` must be fit for keys: ``os.urandom`` outside tests."""
        # 32 divides 256, so the low five bits of a random byte are an unbiased character.
        drawn = "".join(ALPHABET[byte & 31] for byte in randbytes(LOCATOR_CHARS + SECRET_CHARS))
        return cls(drawn[:LOCATOR_CHARS], drawn[LOCATOR_CHARS:], rendezvous)

    def __str__(self) -> str:
        tail = self.secret + check_character(self.locator + self.secret)
        groups = "-".join(tail[at : at + 4] for at in range(0, len(tail), 4))
        return f"{self.locator}-{groups}" + (f"@{self.rendezvous}" if self.rendezvous else "")


def parse_code(text: str) -> SessionCode:
    """The code a person typed or pasted.

    Forgives case, O for 0, I and L for 1, dashes and spaces missing or in the wrong place, quotes around it. Raises
    InvitationError that says what is wrong (too short, too long, an impossible character, mistyped, a bad address) and
    what to do.
    """
    typed, at_sign, where = unicodedata.normalize("NFKC", text).partition("@")
    characters = _canonical(typed)
    for character in characters:
        if character not in _VALUE:
            raise InvitationError(
                f"{character!r} cannot appear in a session code: it has digits and letters without I, L, O and U"
            )
    if len(characters) != _CODE_CHARS:
        how = "short" if len(characters) < _CODE_CHARS else "long"
        raise InvitationError(
            f"that session code is too {how}: {len(characters)} characters where {_CODE_CHARS} belong; "
            "copy the whole line the host printed, and nothing else"
        )
    if check_character(characters[:-1]) != characters[-1]:
        raise InvitationError("that session code is mistyped: its check character does not match; compare it again")
    return SessionCode(characters[:LOCATOR_CHARS], characters[LOCATOR_CHARS:-1], _rendezvous(at_sign, where))


def _canonical(typed: str) -> str:
    kept = (
        character
        for character in typed.strip().strip(_QUOTES_AND_CASES)
        if character not in _IGNORED and unicodedata.category(character) not in _IGNORED_CATEGORIES
    )
    return "".join(kept).upper().translate(_LOOKALIKES)


def _rendezvous(at_sign: str, where: str) -> HostPort | None:
    if not at_sign:
        return None
    visible = "".join(c for c in where if c in "-_" or unicodedata.category(c) not in _IGNORED_CATEGORIES)
    try:
        return parse_host_port(visible.strip(_QUOTES_AND_CASES))
    except UsageError as error:
        raise InvitationError(f"the part of the session code after the @ is wrong: {error}") from error


def check_character(characters: str) -> str:
    """The character that makes a code add up: the sum over GF(32) of value times weight, weights being the powers of x.

    Weights are nonzero, so any one wrong character shows; they differ pairwise, so any two characters exchanged (not
    neighbours alone) show. The check character itself has weight 1, which no other has. ``characters`` are at most 30.
    """
    total = 0
    for character in characters:
        # Horner's rule from the left: the last character ends with weight x, the first with the highest power.
        total = _times_x(total ^ _VALUE[character])
    return ALPHABET[total]


def _times_x(value: int) -> int:
    doubled = value << 1
    return doubled ^ _REDUCTION if doubled & 32 else doubled
