"""A hostile rendezvous can refuse service and count bytes, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafila.errors import SealBroken
from kafila.ring.control import Signal
from kafila.ring.invite import SessionCode
from kafila.ring.rendezvous_client import Joined, Relayed, RendezvousClient
from kafila.ring.sealing import Opener, Sealer, SessionKeys, derive_keys
from kafila.types import NodeId
from tests.ring.hostile import HostileRendezvous, Mischief, found_in
from tests.ring.world import IDENTITIES, SERVER, Party, address_of, node

CODE = SessionCode("AB3DE", "0123456789ABCDE")
KEYS = derive_keys(CODE)
MEMBERS = 4


@dataclass
class Member:
    """A client that seals all it says, and keeps what it could open and who that was from."""

    client: RendezvousClient
    sealer: Sealer
    opener: Opener
    opened: list[tuple[NodeId, bytes]] = field(default_factory=list)
    welcomed: bytes | None = None

    def take(self, events: list[object]) -> None:
        for event in events:
            try:
                if isinstance(event, Joined):
                    self.welcomed = self.opener.open_greeting(event.host, event.greeting)
                elif isinstance(event, Signal):
                    self.opened.append((event.sender, self.opener.open(event.sender, event.sealed)))
            except SealBroken:
                continue  # counted by the opener


class Besieged:
    """Four members of one session whose rendezvous is hostile. All say who they are; then all talk."""

    def __init__(self, mischief: Mischief, seed: int) -> None:
        self.random = Random(seed)
        self.server = HostileRendezvous(IDENTITIES[7], self.random.randbytes, self.random, mischief)
        self.party = Party(server=self.server)
        self.sent: list[tuple[NodeId, NodeId | None, bytes]] = []
        self.members: list[Member] = []
        for number in range(MEMBERS):
            client = self.party.client(number)
            member = Member(client, Sealer(KEYS, node(client), self.random.randbytes), Opener(KEYS, node(client)))
            self.members.append(member)
            if number == 0:
                client.create(
                    CODE.locator, MEMBERS, member.sealer.seal_greeting(b"welcome to our house"), self.party.now
                )
            else:
                client.join(CODE.locator, self.party.now)
            self.party.run(1)
            self.hear()

    def say(self, sender: Member, to: Member | None, plaintext: bytes) -> None:
        addressee = node(to.client) if to else None
        self.sent.append((node(sender.client), addressee, plaintext))
        sender.client.signal(addressee, sender.sealer.seal(plaintext, addressee))

    def talk(self, rounds: int = 5) -> None:
        for number in range(rounds):
            for member, identity in zip(self.members, IDENTITIES, strict=False):
                others = [other for other in self.members if other is not member]
                self.say(member, None, b"my fingerprint is " + identity.fingerprint + b" round %d" % number)
                self.say(member, self.random.choice(others), b"between the two of us, round %d" % number)
            self.party.run(0.3)
            self.hear()

    def hear(self) -> None:
        for member in self.members:
            member.take(list(self.party.heard(member.client)))

    @property
    def noticed(self) -> int:
        return sum(member.opener.broken for member in self.members)

    def check(self) -> None:
        """Everything that anybody opened was said by whom it says, to whoever opened it, and counts once."""
        for member in self.members:
            me = node(member.client)
            meant = Counter((sender, text) for sender, to, text in self.sent if to in (me, None) and sender != me)
            assert not Counter(member.opened) - meant
            assert member.welcomed in (None, b"welcome to our house")

    def check_secrets(self) -> None:
        """Nothing that only members may know was anywhere in what the rendezvous saw."""
        secrets = [
            CODE.secret.encode(),
            KEYS.signalling,
            KEYS.link,
            b"welcome to our house",
            *(identity.fingerprint for identity in IDENTITIES[:MEMBERS]),
            *(text for _, _, text in self.sent),
        ]
        assert found_in(self.server.seen, secrets) == []
        assert found_in([CODE.locator.encode()], [CODE.locator.encode()])  # the search finds what is there


def test_an_honest_one_delivers_everything() -> None:
    besieged = Besieged(Mischief(), 0)
    besieged.talk()
    besieged.check()
    besieged.check_secrets()
    assert besieged.noticed == 0
    assert sum(len(member.opened) for member in besieged.members) == 5 * MEMBERS * (MEMBERS - 1 + 1)
    assert all(member.welcomed for member in besieged.members)


@pytest.mark.parametrize("what", ["alter", "replay", "redirect", "invent"])
@pytest.mark.parametrize("seed", range(3))
def test_tampering_is_noticed_every_time(what: str, seed: int) -> None:
    besieged = Besieged(Mischief(**{what: 0.5}), seed)
    besieged.talk()
    besieged.check()
    besieged.check_secrets()
    assert besieged.server.done[what] > 10
    assert besieged.noticed >= besieged.server.tampered > 10


def test_dropping_and_reordering_is_all_it_can_do() -> None:
    besieged = Besieged(Mischief(drop=0.3, reorder=0.5), 1)
    besieged.talk()
    besieged.check()
    assert besieged.server.done["reorder"] > 10
    assert besieged.noticed == 0


def test_there_is_no_fingerprint_to_swap() -> None:
    besieged = Besieged(Mischief(swap=1.0), 1)
    besieged.talk()
    besieged.check()
    assert besieged.server.done["swap"] > 50
    assert besieged.server.tampered == besieged.noticed == 0
    fingerprint = IDENTITIES[1].fingerprint
    told = {text for sender, text in besieged.members[2].opened if sender == node(besieged.members[1].client)}
    assert any(fingerprint in text for text in told)


@pytest.mark.parametrize("seed", range(3))
def test_a_false_greeting_welcomes_nobody(seed: int) -> None:
    besieged = Besieged(Mischief(greeting=1.0), seed)
    assert [member.welcomed for member in besieged.members] == [None] * MEMBERS
    assert besieged.noticed == MEMBERS


@settings(max_examples=max(settings().max_examples // 2, 5))
@given(
    st.builds(
        Mischief,
        *[st.sampled_from([0.0, 0.2, 1.0])] * 8,
    ),
    st.integers(0, 2**32),
)
def test_nothing_false_is_ever_believed(mischief: Mischief, seed: int) -> None:
    besieged = Besieged(mischief, seed)
    besieged.talk(2)
    besieged.check()
    besieged.check_secrets()


def test_it_bends_what_it_relays_too() -> None:
    """Relayed datagrams are the link's to protect: here only that the helper does to them what it says."""
    mischief = Mischief(alter=0.3, drop=0.1, replay=0.2, redirect=0.2, swap=0.2)
    besieged = Besieged(mischief, 3)
    anna, bert = besieged.members[1:3]
    datagrams = [b"\x40" + bytes([number]) * 50 for number in range(100)]
    for datagram in datagrams:
        transmit = anna.client.relay(node(bert.client), datagram, besieged.party.now)
        besieged.party.send(transmit.data, address_of(1), SERVER)
    besieged.party.run(1)
    came = [event.datagram for event in besieged.party.heard(bert.client) if isinstance(event, Relayed)]
    assert 20 < len([datagram for datagram in came if datagram in datagrams]) < 100
    assert [datagram for datagram in came if datagram not in datagrams]
    assert len(came) != len(set(came))


def test_two_sessions_of_one_rendezvous_cannot_be_crossed() -> None:
    theirs = SessionKeys("ZZZZZ", bytes(32), bytes(32))
    sealed = Sealer(theirs, node_of(1), Random(0).randbytes).seal(b"from another session", None)
    with pytest.raises(SealBroken):
        Opener(KEYS, node_of(2)).open(node_of(1), sealed)


def node_of(number: int) -> NodeId:
    return IDENTITIES[number].node_id
