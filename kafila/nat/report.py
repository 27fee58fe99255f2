"""What a member knows of its own NAT, as it tells the others: frozen values and their JSON.

Behaviours are *sets of what is still possible* (``Flag``): one member is a fact, several are a question left open, all
of them is ``UNKNOWN``. So a rendezvous with one address can say "endpoint-independent or address-dependent, not
port-dependent", and the predictor reasons over exactly what was left open.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from enum import Enum, Flag
from ipaddress import ip_address
from typing import TypeVar

from kafila.errors import ProtocolError
from kafila.types import Address, NatClass


class Mapping(Flag):
    """On what an external port depends (RFC 4787 section 4.1)."""

    EIM = 1
    """Endpoint-independent: one external port for all destinations."""
    ADM = 2
    """Address-dependent: one for each destination host."""
    APDM = 4
    """Address- and port-dependent: one for each destination host and port."""
    UNKNOWN = 7


class Filtering(Flag):
    """Whom an external port lets in (RFC 4787 section 5)."""

    EIF = 1
    """Endpoint-independent: anybody."""
    ADF = 2
    """Address-dependent: hosts that were sent to."""
    APDF = 4
    """Address- and port-dependent: the very addresses that were sent to."""
    UNKNOWN = 7


class FilterScope(Flag):
    """Where "was sent to" is remembered; it matters only where one local port has several mappings."""

    MAPPING = 1
    """By each mapping apart: only what was sent through this external port counts."""
    ENDPOINT = 2
    """By the local port: what was sent through any of its external ports counts."""
    UNKNOWN = 3


class Allocator(Enum):
    """How the NAT picks the external port of a new mapping (RFC 4787 section 4.2)."""

    PRESERVING = "preserving"
    """The local port, where it is free."""
    SEQUENTIAL = "sequential"
    """The last one plus a step."""
    RANDOM = "random"
    UNKNOWN = "unknown"


class PortMappingProtocol(Enum):
    """By which protocol the gateway claims to open ports."""

    PCP = "pcp"
    NAT_PMP = "nat-pmp"
    UPNP = "upnp"


@dataclass(frozen=True, slots=True, kw_only=True)
class NatReport:
    """The result of classifying a member once in a network epoch.

    Behaviours are those of IPv4, or of IPv6 where the member has no IPv4. ``reflexive_v6`` stands only where IPv6 goes
    out under one address to all, which makes it fit for punching whatever the firewall on the way.
    """

    mapping: Mapping = Mapping.UNKNOWN
    filtering: Filtering = Filtering.UNKNOWN
    scope: FilterScope = FilterScope.UNKNOWN
    allocator: Allocator = Allocator.UNKNOWN
    port_step: int = 0
    """For a sequential allocator: the next port less the last."""
    hairpin: bool | None = None
    """Whether the NAT lets two of its own hosts meet at its public address; ``None``: not known."""
    reflexive_v4: Address | None = None
    """A probe's address as servers saw it; the host is the member's public one, the port that of a probing socket."""
    reflexive_v6: Address | None = None
    on_public_address: bool = False
    """Whether that host is one of the member's own interfaces: no NAT at all (a firewall perhaps)."""
    port_mapping: PortMappingProtocol | None = None
    udp_blocked: bool = False
    """No server answered over UDP."""


def nat_class(report: NatReport) -> NatClass:
    """The paper's class (Section V-B), for people and for the first pass of ring ordering.

    Where the report leaves things open, the class errs in the safe direction, with one exception: a mapping that is
    known not to depend on the port is taken for endpoint-independent. A rendezvous with one address cannot say more,
    and calling nearly every home restrictive for want of a second address would tell people nothing.
    """
    if report.udp_blocked or Mapping.APDM in report.mapping or Mapping.EIM not in report.mapping:
        return NatClass.RESTRICTIVE
    if report.mapping is Mapping.EIM and report.filtering is Filtering.EIF:
        return NatClass.PERMISSIVE
    return NatClass.ORDINARY


def describe(report: NatReport) -> str:
    """The report in one line for a person."""
    if report.udp_blocked:
        return "UDP is blocked here: every link will need another way out"
    place = "public address" if report.on_public_address else f"{nat_class(report).value} NAT"
    facts = [f"mapping {_words(report.mapping)}", f"filtering {_words(report.filtering)}"]
    if report.allocator is Allocator.SEQUENTIAL:
        facts.append(f"ports sequential by {report.port_step}")
    elif report.allocator is not Allocator.UNKNOWN:
        facts.append(f"ports {report.allocator.value}")
    if report.reflexive_v6:
        facts.append("IPv6")
    if report.port_mapping:
        facts.append(f"{report.port_mapping.value} offered")
    return f"{place} ({', '.join(facts)})"


def to_json(report: NatReport) -> dict[str, object]:
    """``report`` as JSON values; :func:`from_json` is its inverse."""
    return {
        "mapping": _names(report.mapping),
        "filtering": _names(report.filtering),
        "scope": _names(report.scope),
        "allocator": report.allocator.value,
        "port_step": report.port_step,
        "hairpin": report.hairpin,
        "reflexive_v4": _address_to_json(report.reflexive_v4),
        "reflexive_v6": _address_to_json(report.reflexive_v6),
        "on_public_address": report.on_public_address,
        "port_mapping": report.port_mapping.value if report.port_mapping else None,
        "udp_blocked": report.udp_blocked,
    }


def from_json(value: object) -> NatReport:
    """The report a member sent. Raises ProtocolError naming the field that is wrong; unknown fields are ignored."""
    if not isinstance(value, dict):
        raise ProtocolError("a NAT report is not a JSON object; the member runs another version or lies")
    port_mapping = value.get("port_mapping")
    return NatReport(
        mapping=_flag(value, "mapping", Mapping),
        filtering=_flag(value, "filtering", Filtering),
        scope=_flag(value, "scope", FilterScope),
        allocator=_one_of(value, "allocator", Allocator),
        port_step=_port_step(value),
        hairpin=None if value.get("hairpin") is None else _bool(value, "hairpin"),
        reflexive_v4=_address_from_json(value, "reflexive_v4", version=4),
        reflexive_v6=_address_from_json(value, "reflexive_v6", version=6),
        on_public_address=_bool(value, "on_public_address"),
        port_mapping=None if port_mapping is None else _one_of(value, "port_mapping", PortMappingProtocol),
        udp_blocked=_bool(value, "udp_blocked"),
    )


_FlagT = TypeVar("_FlagT", bound=Flag)
_EnumT = TypeVar("_EnumT", bound=Enum)
_Fields = MappingType[str, object]


def _names(behaviour: Flag) -> list[str]:
    return [str(member.name) for member in behaviour]


def _words(behaviour: Flag) -> str:
    names = _names(behaviour)
    return names[0] if len(names) == 1 else "unknown" if len(names) == len(type(behaviour)) else " or ".join(names)


def _wrong(field: str) -> ProtocolError:
    return ProtocolError(f"a NAT report's {field!r} is missing or wrong; the member runs another version or lies")


def _flag(value: _Fields, field: str, kind: type[_FlagT]) -> _FlagT:
    names = value.get(field)
    members = {str(member.name): member for member in kind}
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name in members for name in names):
        raise _wrong(field)
    behaviour = members[names[0]]
    for name in names[1:]:
        behaviour |= members[name]
    return behaviour


def _one_of(value: _Fields, field: str, kind: type[_EnumT]) -> _EnumT:
    try:
        return kind(value.get(field))
    except ValueError:
        raise _wrong(field) from None


def _bool(value: _Fields, field: str) -> bool:
    found = value.get(field)
    if not isinstance(found, bool):
        raise _wrong(field)
    return found


def _port_step(value: _Fields) -> int:
    found = value.get("port_step")
    if not isinstance(found, int) or isinstance(found, bool) or not -0xFFFF <= found <= 0xFFFF:
        raise _wrong("port_step")
    return found


def _address_to_json(address: Address | None) -> list[object] | None:
    return None if address is None else [address.host, address.port]


def _address_from_json(value: _Fields, field: str, *, version: int) -> Address | None:
    match value.get(field):
        case None:
            return None
        case [str(host), int(port)] if 0 < port <= 0xFFFF and _is_literal(host, version):
            return Address(host, port)
    raise _wrong(field)


def _is_literal(host: str, version: int) -> bool:
    try:
        return ip_address(host).version == version
    except ValueError:
        return False
