"""How a member introduces itself, and what others make of it when they link with it."""

from __future__ import annotations

import hashlib
import platform
import uuid
from collections.abc import Sequence
from pathlib import Path

from kafila.nat.candidates import Candidate, CandidateKind
from kafila.net import Network
from kafila.ring.agreement import MemberInfo
from kafila.ring.identity import Identity
from kafila.types import Address

MAX_ADDRESSES = 32
"""As many as a peer would look at (``nat.candidates.MAX_CANDIDATES``)."""
MAX_NAME_CHARS = 40


def machine_digest() -> bytes:
    """The same for every process of this machine since it booted, and for no other: who may meet over loopback.

    A digest, so that what members tell one another does not identify the computer elsewhere.
    """
    sources = [Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")]
    parts = [path.read_text() for path in sources if path.is_file()]
    parts += [platform.node(), str(uuid.getnode())]
    return hashlib.sha256("\n".join(["kafila machine", *parts]).encode()).digest()[:16]


def reachable_at(network: Network, port: int, reflexive: Sequence[Address]) -> tuple[Address, ...]:
    """Where a member might be reached: its interfaces at its one port, then as the rendezvous sees it."""
    hosts = [Address(address.host, port) for address in network.interface_addresses()]
    return tuple(dict.fromkeys([*hosts, *reflexive]))[:MAX_ADDRESSES]


def member_info(
    identity: Identity, name: str, addresses: tuple[Address, ...], machine: bytes, *, rendezvous_rtt_s: float | None
) -> MemberInfo:
    """This member, for the host."""
    shown = "".join(character for character in name if character.isprintable())[:MAX_NAME_CHARS]
    return MemberInfo(
        identity.node_id,
        shown or "member",
        identity.fingerprint,
        addresses,
        machine,
        rendezvous_rtt_s=rendezvous_rtt_s,
    )


def link_candidates(info: MemberInfo) -> list[Candidate]:
    """Where a member might be reached. Which of its addresses are its own interfaces does not matter to probing."""
    return [Candidate(address, CandidateKind.HOST) for address in info.addresses]
