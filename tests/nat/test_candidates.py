"""What may be probed, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.candidates import (
    MAX_CANDIDATES,
    Candidate,
    CandidateKind,
    Scope,
    canonical,
    choose_candidates,
    may_probe,
    scope_of,
)
from kafila.types import Address

ADDRESSES = st.builds(Address, st.ip_addresses().map(str), st.integers(-1, 70000))
CANDIDATES = st.builds(Candidate, ADDRESSES, st.sampled_from(CandidateKind))


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",  # noqa: S104  - nothing is bound
        "0.1.2.3",
        "127.0.0.1",
        "127.5.5.5",
        "::1",
        "::ffff:127.0.0.1",
        "224.0.0.251",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "192.168.1.255",
        "10.0.0.255",
        "169.254.10.10",
        "fe80::1",
        "fe80::1%eth0",
        "ff02::fb",
        "::",
        "::ffff:224.0.0.1",
        "rendezvous.example",
        "",
    ],
)
def test_never_probed(host: str) -> None:
    assert not may_probe(Address(host, 4242), same_machine=False)


@pytest.mark.parametrize("host", ["192.168.1.7", "203.0.113.9", "100.64.1.1", "2001:db8::7", "fd00::7", "8.8.8.255"])
def test_probed(host: str) -> None:
    assert may_probe(Address(host, 4242), same_machine=False)


@pytest.mark.parametrize("port", [-1, 0, 1, 53, 443, 1023, 65536])
def test_no_system_ports(port: int) -> None:
    assert not may_probe(Address("203.0.113.9", port), same_machine=True)


def test_loopback_only_on_the_same_machine() -> None:
    assert may_probe(Address("127.0.0.1", 4242), same_machine=True)
    assert may_probe(Address("::1", 4242), same_machine=True)


def test_nearer_first_then_predicted_before_reflexive() -> None:
    given_order = [
        Candidate(Address("203.0.113.9", 5000), CandidateKind.REFLEXIVE),
        Candidate(Address("203.0.113.9", 5001), CandidateKind.PREDICTED),
        Candidate(Address("192.168.1.7", 4242), CandidateKind.HOST),
        Candidate(Address("127.0.0.1", 4242), CandidateKind.HOST),
    ]
    assert choose_candidates(given_order, same_machine=True) == given_order[::-1]


def test_one_spelling() -> None:
    mapped = Address("::ffff:192.168.1.7", 4242)
    assert canonical(mapped) == Address("192.168.1.7", 4242)
    twice = [Candidate(a, CandidateKind.HOST) for a in (mapped, Address("192.168.1.7", 4242))]
    assert len(choose_candidates(twice, same_machine=False)) == 1


def test_scopes() -> None:
    assert scope_of(Address("127.0.0.1", 1)) is Scope.LOOPBACK
    assert scope_of(Address("10.1.2.3", 1)) is Scope.LAN
    assert scope_of(Address("fd00::1", 1)) is Scope.LAN
    assert scope_of(Address("100.64.0.1", 1)) is Scope.WIDE
    assert scope_of(Address("2001:db8::1", 1)) is Scope.WIDE


@given(st.lists(CANDIDATES, max_size=80), st.booleans())
def test_whatever_is_advertised(advertised: list[Candidate], same_machine: bool) -> None:
    chosen = choose_candidates(advertised, same_machine=same_machine)
    assert len(chosen) <= MAX_CANDIDATES
    assert len({candidate.address for candidate in chosen}) == len(chosen)
    for candidate in chosen:
        host, port = candidate.address
        ip = IPv4Address(host) if "." in host else IPv6Address(host)
        assert 1024 <= port <= 65535
        assert not ip.is_multicast
        assert not ip.is_unspecified
        assert not ip.is_link_local
        assert same_machine or not ip.is_loopback
    scopes = [scope_of(candidate.address) for candidate in chosen]
    assert scopes == sorted(scopes)


def test_an_endless_list_is_not_read_to_its_end() -> None:
    def endless() -> Iterator[Candidate]:
        number = 0
        while True:
            yield Candidate(Address(f"10.0.{number % 256}.{number // 256 % 250}", 4242), CandidateKind.HOST)
            number += 1

    assert len(choose_candidates(endless(), same_machine=False)) == MAX_CANDIDATES
