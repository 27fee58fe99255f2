"""What a member says of itself and how others read it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.members import (
    MAX_ADDRESSES,
    MAX_NAME_CHARS,
    Sight,
    are_near,
    birthday_role,
    candidates_of,
    link_candidates,
    machine_digest,
    member_info,
    own_candidates,
    reachable,
    report_of,
)
from kafila.nat.birthday import BirthdayRole
from kafila.nat.candidates import Candidate, CandidateKind
from kafila.nat.report import Allocator, Filtering, FilterScope, Mapping, NatReport
from kafila.ring.agreement import MemberInfo
from kafila.ring.identity import make_identity
from kafila.types import Address

IDENTITY = make_identity()
PORT = 4000
LAN, LOOPBACK = Address("192.168.1.7", 0), Address("127.0.0.1", 0)
SEEN = Address("11.0.0.5", 40_000)
SEQUENTIAL = NatReport(mapping=Mapping.APDM, allocator=Allocator.SEQUENTIAL, port_step=2, reflexive_v4=SEEN)


def member(
    host: str, seen: str | None, *, machine: bytes = b"", kinds: tuple[CandidateKind, ...] = (CandidateKind.HOST,)
) -> MemberInfo:
    report = None if seen is None else NatReport(reflexive_v4=Address(seen, 40_000))
    candidates = [Candidate(Address(host, PORT + n), kind) for n, kind in enumerate(kinds)]
    return member_info(IDENTITY, "ada", machine or host.encode(), reachable(candidates, report, 0.02))


def test_a_machine_is_always_itself() -> None:
    assert machine_digest() == machine_digest()
    assert len(machine_digest()) == 16


def test_names_are_shown_without_what_moves_a_cursor() -> None:
    nowhere = reachable([], None, None)
    assert member_info(IDENTITY, "a\x1b[2Jd\na" * 20, b"m", nowhere).name == ("a[2Jda" * 20)[:MAX_NAME_CHARS]
    assert member_info(IDENTITY, "\n", b"m", nowhere).name == "member"


def test_every_way_to_a_member_is_told_with_its_kind_and_each_address_once() -> None:
    mapped = Address("11.0.0.5", PORT)
    sight = Sight(SEQUENTIAL, observed=SEEN, newest=Address("11.0.0.5", 40_100), mapped=mapped)
    candidates = own_candidates([LAN, LOOPBACK], PORT, sight)
    assert [(c.kind.value, c.address.port) for c in candidates] == [
        ("host", PORT),
        ("host", PORT),
        *(("predicted", 40_100 + 2 * ahead) for ahead in (1, 2, 3, 4)),
        ("mapped", PORT),
        ("reflexive", 40_000),
    ]
    same = Sight(observed=Address(LAN.host, PORT), mapped=Address(LAN.host, PORT))
    assert own_candidates([LAN, LOOPBACK], PORT, same) == own_candidates([LAN, LOOPBACK], PORT, Sight())
    many = [Address(f"10.{n}.0.2", 0) for n in range(200)]
    assert len(own_candidates(many, PORT, sight)) <= MAX_ADDRESSES


def test_what_is_told_is_read_the_same() -> None:
    candidates = own_candidates([LAN, LOOPBACK], PORT, Sight(observed=SEEN))
    info = member_info(IDENTITY, "ada", b"m", reachable(candidates, SEQUENTIAL, 0.02))
    assert candidates_of(info) == candidates
    assert report_of(info) == SEQUENTIAL
    assert info.rendezvous_rtt_s == 0.02


def test_kinds_of_other_versions_are_taken_for_interfaces() -> None:
    info = member("192.168.1.7", None, kinds=(CandidateKind.HOST, CandidateKind.REFLEXIVE))
    assert {c.kind for c in candidates_of(replace(info, kinds=()))} == {CandidateKind.HOST}
    assert [c.kind for c in candidates_of(replace(info, kinds=("carrier pigeon", "reflexive", "host")))] == [
        CandidateKind.HOST,
        CandidateKind.REFLEXIVE,
    ]


@given(st.text(max_size=60) | st.recursive(st.just("[]"), lambda inner: inner.map("[{}]".format), max_leaves=3))
def test_a_report_that_cannot_be_read_is_none(text: str) -> None:
    assert report_of(replace(member("192.168.1.7", None), nat_report=text)) is None


def test_a_report_nested_without_end_is_none() -> None:
    assert report_of(replace(member("192.168.1.7", None), nat_report="[" * 100_000)) is None


@pytest.mark.parametrize(
    ("a", "b", "near"),
    [
        (member("192.168.1.7", None, machine=b"one"), member("10.0.0.9", None, machine=b"one"), True),
        (member("192.168.1.7", "11.0.0.5"), member("192.168.2.9", "11.0.0.5"), True),
        (member("192.168.1.7", "11.0.0.5"), member("192.168.1.9", "11.0.0.6"), False),
        (member("192.168.1.7", None), member("192.168.1.9", None), True),
        (member("192.168.1.7", None), member("192.168.2.9", None), False),
        (member("192.168.1.7", "192.168.1.7"), member("192.168.1.9", "192.168.1.9"), True),
        (member("2a10::1", None), member("2a10::2", None), True),
        (member("2a10::1", None), member("2a10:0:0:1::2", None), False),
        (member("127.0.0.1", None), member("127.0.0.1", None, machine=b"two"), False),
        (member("no address", None), member("192.168.1.9", None), False),
    ],
)
def test_who_is_near_whom(a: MemberInfo, b: MemberInfo, near: bool) -> None:
    assert are_near(a, b) is near
    assert are_near(b, a) is near


def test_hopeless_addresses_are_left_out_only_where_they_would_spend_foretold_ports() -> None:
    me = member("192.168.1.7", "11.0.0.5")
    kinds = (CandidateKind.HOST, CandidateKind.REFLEXIVE)
    plain = member("192.168.2.9", "11.0.0.6", kinds=kinds)
    assert link_candidates(plain, me) == candidates_of(plain)
    sequential = replace(plain, kinds=("host", "predicted"), addresses=(plain.addresses[0], SEEN))
    assert link_candidates(sequential, me) == [Candidate(SEEN, CandidateKind.PREDICTED)]
    neighbour = replace(sequential, nat_report=me.nat_report)
    assert link_candidates(neighbour, me) == candidates_of(neighbour)
    vpn = replace(me, addresses=(*me.addresses, Address("192.168.2.1", PORT)))
    assert link_candidates(sequential, vpn) == candidates_of(sequential)


def test_each_side_has_its_part_in_birthday_probing() -> None:
    random = NatReport(
        mapping=Mapping.APDM,
        filtering=Filtering.APDF,
        scope=FilterScope.MAPPING,
        allocator=Allocator.RANDOM,
        reflexive_v4=Address("11.0.0.5", 40_000),
    )
    steady = replace(random, mapping=Mapping.EIM, reflexive_v4=Address("11.0.0.6", 40_000))
    one, other = (
        member_info(IDENTITY, "ada", bytes([n]), reachable([], report, None))
        for n, report in enumerate((random, steady))
    )
    assert birthday_role(other, one) is BirthdayRole.OPEN_SOCKETS
    assert birthday_role(one, other) is BirthdayRole.GUESS_PORTS
    assert birthday_role(one, one) is None
    assert birthday_role(other, other) is None
    assert birthday_role(replace(other, nat_report=""), one) is None
