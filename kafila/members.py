"""How a member introduces itself, and what others make of it when they link with it."""

from __future__ import annotations

import hashlib
import json
import platform
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path

from kafila.errors import ProtocolError
from kafila.nat.birthday import BirthdayRole
from kafila.nat.candidates import Candidate, CandidateKind, Scope, scope_of
from kafila.nat.interfaces import host_candidates
from kafila.nat.predict import Way, predicted_addresses, ways
from kafila.nat.report import Mapping, NatReport, from_json, to_json
from kafila.ring.agreement import KNOWN, MemberInfo, Reachable
from kafila.ring.identity import Identity
from kafila.types import Address

MAX_ADDRESSES = 32
"""As many as a peer would look at (``nat.candidates.MAX_CANDIDATES``)."""
MAX_NAME_CHARS = 40
_NEAR_BITS = {4: 24, 6: 64}
"""Members do not say how wide their networks are; homes and offices use these."""


def machine_digest() -> bytes:
    """The same for every process of this machine since it booted, and for no other: who may meet over loopback.

    A digest, so that what members tell one another does not identify the computer elsewhere.
    """
    sources = [Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")]
    parts = [path.read_text() for path in sources if path.is_file()]
    parts += [platform.node(), str(uuid.getnode())]
    return hashlib.sha256("\n".join(["kafila machine", *parts]).encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class Sight:
    """How a machine looks from outside; what is not known is ``None``."""

    report: NatReport | None = None
    observed: Address | None = None
    """Its one socket, as the rendezvous sees it."""
    newest: Address | None = None
    """The mapping its NAT made last, where the next one can be told from it."""
    mapped: Address | None = None
    """What its gateway says leads to that socket."""


def own_candidates(interfaces: Sequence[Address], port: int, sight: Sight) -> list[Candidate]:
    """Where a member with a socket on ``port`` might be reached, each address once."""
    found = [Candidate(address, CandidateKind.HOST) for address in host_candidates(interfaces, port)]
    if sight.report is not None and sight.newest is not None:
        predicted = predicted_addresses(sight.report, sight.newest)
        found += [Candidate(address, CandidateKind.PREDICTED) for address in predicted]
    if sight.mapped is not None:
        found.append(Candidate(sight.mapped, CandidateKind.MAPPED))
    if sight.observed is not None:
        found.append(Candidate(sight.observed, CandidateKind.REFLEXIVE))
    once: dict[Address, Candidate] = {}
    for candidate in found:
        once.setdefault(candidate.address, candidate)
    return list(once.values())[:MAX_ADDRESSES]


def reachable(candidates: Sequence[Candidate], report: NatReport | None, rtt_s: float | None) -> Reachable:
    """What a member tells the others of its network."""
    return Reachable(
        tuple(candidate.address for candidate in candidates),
        tuple(candidate.kind.value for candidate in candidates),
        "" if report is None else json.dumps(to_json(report), separators=(",", ":")),
        rtt_s,
    )


def member_info(identity: Identity, name: str, machine: bytes, where: Reachable) -> MemberInfo:
    """This member, for the host."""
    shown = "".join(character for character in name if character.isprintable())[:MAX_NAME_CHARS]
    info = MemberInfo(
        identity.node_id,
        shown or "member",
        identity.fingerprint,
        (),
        machine,
        early_key=identity.early.public,
        knows=KNOWN,
    )
    return info.moved(where)


def report_of(info: MemberInfo) -> NatReport | None:
    """What a member says of its NAT; ``None`` where it says nothing that can be read."""
    try:
        return from_json(json.loads(info.nat_report)) if info.nat_report else None
    except (ValueError, RecursionError, ProtocolError):
        return None


def candidates_of(info: MemberInfo) -> list[Candidate]:
    """A member's addresses with their kinds; a kind this version does not know is taken for an interface's."""
    known = {kind.value: kind for kind in CandidateKind}
    kinds = [known.get(kind, CandidateKind.HOST) for kind in info.kinds]
    kinds += [CandidateKind.HOST] * (len(info.addresses) - len(kinds))
    return [Candidate(address, kind) for address, kind in zip(info.addresses, kinds, strict=False)]


def link_candidates(peer: MemberInfo, me: MemberInfo) -> list[Candidate]:
    """Where to look for ``peer`` from here.

    A sequential NAT spends a port on every address that is tried, hopeless ones included, and then the predicted ports
    are no longer the next ones. So where a prediction is in play, private addresses of other networks are left out.
    """
    theirs = candidates_of(peer)
    if not any(candidate.kind is CandidateKind.PREDICTED for candidate in [*theirs, *candidates_of(me)]):
        return theirs
    if one_public_host(peer, me):
        return theirs
    own = _networks(me.addresses)
    return [c for c in theirs if scope_of(c.address) is Scope.WIDE or _network(c.address) in own]


def birthday_role(peer: MemberInfo, me: MemberInfo) -> BirthdayRole | None:
    """This member's part in birthday probing; ``None`` where there is no use in it."""
    own, other = report_of(me), report_of(peer)
    if own is None or other is None or Way.BIRTHDAY not in ways(own, other):
        return None
    return BirthdayRole.GUESS_PORTS if Mapping.EIM in own.mapping else BirthdayRole.OPEN_SOCKETS


def are_near(a: MemberInfo, b: MemberInfo) -> bool:
    """Whether two members are on one machine or, by all that is known, on one network.

    Behind different public addresses equal private networks mean nothing: half of all homes are 192.168.1.0/24. Behind
    one that does not hairpin different ones mean two subscribers of one carrier, who cannot meet there.
    """
    if a.machine == b.machine:
        return True
    share_network = _share_network(a, b)
    if one_public_host(a, b):
        return share_network or not (_cannot_hairpin(a) or _cannot_hairpin(b))
    return share_network and (_public_host(a) is None or _public_host(b) is None)


def _share_network(a: MemberInfo, b: MemberInfo) -> bool:
    """Whether interfaces of both are on equal networks. One address cannot be two machines' on one network: equal ones
    are of two homes alike, or of a bridge that every machine of a kind has."""
    ours, theirs = ({c.address for c in candidates_of(m) if c.kind is CandidateKind.HOST} for m in (a, b))
    hosts = {address.host for address in ours} & {address.host for address in theirs}
    mine, others = (_networks(each for each in side if each.host not in hosts) for side in (ours, theirs))
    return bool(mine & others)


def _cannot_hairpin(info: MemberInfo) -> bool:
    report = report_of(info)
    return report is not None and report.hairpin is False


def one_public_host(a: MemberInfo, b: MemberInfo) -> bool:
    """Whether both are seen at one public address."""
    return _public_host(a) is not None and _public_host(a) == _public_host(b)


def _public_host(info: MemberInfo) -> str | None:
    report = report_of(info)
    seen = None if report is None else report.reflexive_v4
    return seen.host if seen is not None and scope_of(seen) is Scope.WIDE else None


def _networks(addresses: Iterable[Address]) -> set[str]:
    return {network for address in addresses if (network := _network(address)) is not None}


def _network(address: Address) -> str | None:
    """The network an address is likely on; ``None`` for loopback, which every machine has, and for no address."""
    try:
        ip = ip_address(address.host)
    except ValueError:
        return None
    if ip.is_loopback:
        return None
    return str(ip_network(f"{ip}/{_NEAR_BITS[ip.version]}", strict=False))
