"""Birthday probing: what it sends, and that it finds the way."""

from __future__ import annotations

import random

from kafila.nat.birthday import MAX_GUESSES, MAX_SOCKETS, Birthday, BirthdayRole
from kafila.types import Address

TARGET = Address("203.0.113.9", 5000)


def all_of(birthday: Birthday) -> list[tuple[Address, int]]:
    sent = list[tuple[Address, int]]()
    while (due_at := birthday.due_at()) is not None:
        sent.append(birthday.take(due_at))
    return sent


def test_opens_one_mapping_a_socket() -> None:
    sent = all_of(Birthday(BirthdayRole.OPEN_SOCKETS, TARGET, 500, 0.0, random.Random(1)))
    assert sent == [(TARGET, socket) for socket in range(1, MAX_SOCKETS + 1)]


def test_guesses_no_port_twice_and_no_system_port() -> None:
    sent = all_of(Birthday(BirthdayRole.GUESS_PORTS, TARGET, 0, 0.0, random.Random(1)))
    ports = [address.port for address, _ in sent]
    assert len(set(ports)) == len(ports) == MAX_GUESSES
    assert all(1024 <= port <= 65535 for port in ports)
    assert {address.host for address, _ in sent} == {TARGET.host}


def test_no_sockets_no_probes() -> None:
    assert all_of(Birthday(BirthdayRole.OPEN_SOCKETS, TARGET, 0, 0.0, random.Random(1))) == []
