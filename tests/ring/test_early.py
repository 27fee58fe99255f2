"""A link's first words: taken once, in order, from the one peer alone, and never against what QUIC then says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.ring.early import MAX_DATAGRAM_BYTES, MAX_STREAM_BYTES, MAX_STREAM_DATAGRAMS, EarlyKey, EarlyWords, Party
from kafila.ring.identity import Identity
from kafila.ring.quic import Closed, Established, Message, QuicConnection, Stream
from kafila.wire import Kind, classify
from tests.ring.wire import ALPN, CLIENT, IDENTITIES, SERVER, START_S, Wire

LINK_KEY = bytes(range(32))
CONTROL, BULK = Stream.CONTROL, Stream.BULK


@dataclass
class Node:
    """A fingerprint and a key, without the certificate."""

    fingerprint: bytes
    key: EarlyKey = field(default_factory=EarlyKey)

    @property
    def party(self) -> Party:
        return Party(self.fingerprint, self.key.public)

    def towards(self, peer: Node, *, epoch: int = 1, link_key: bytes = LINK_KEY) -> EarlyWords:
        return EarlyWords(self.key, self.fingerprint, peer.party, link_key, epoch)


def nodes(count: int = 2) -> list[Node]:
    return [Node(bytes([n]) * 32) for n in range(1, count + 1)]


def said(words: EarlyWords, *messages: bytes, stream: Stream = CONTROL) -> list[bytes]:
    for message in messages:
        words.say(stream, message)
    return words.datagrams_to_send()


def heard(words: EarlyWords, *datagrams: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for datagram in datagrams:
        if (fresh := words.receive(datagram)) is not None:
            found[fresh[0]] = found.get(fresh[0], b"") + fresh[1]
    return found


def test_what_is_said_is_heard_on_its_stream() -> None:
    a, b = nodes()
    speaker, listener = a.towards(b), b.towards(a)
    datagrams = [*said(speaker, b"first ", b"words"), *said(speaker, b"tensor", stream=BULK)]
    assert [classify(datagram) for datagram in datagrams] == [Kind.EARLY] * 2
    assert heard(listener, *datagrams) == {CONTROL: b"first words", BULK: b"tensor"}
    assert not speaker.datagrams_to_send()


@given(st.randoms(use_true_random=False), st.integers(0, 2 * MAX_STREAM_BYTES))
def test_any_order_and_any_doubling_gives_the_stream_its_beginning(random: Random, size: int) -> None:
    a, b = nodes()
    data = bytes(n % 251 for n in range(size))
    datagrams = said(a.towards(b), data) * 2
    random.shuffle(datagrams)
    assert heard(b.towards(a), *datagrams).get(CONTROL, b"") == data[:MAX_STREAM_BYTES]


def test_no_more_is_said_early_than_an_initial_window() -> None:
    a, b = nodes()
    speaker = a.towards(b)
    datagrams = []
    for _ in range(40):
        datagrams += said(speaker, b"little")
    assert len(datagrams) == MAX_STREAM_DATAGRAMS
    full = said(speaker, bytes(10 * MAX_STREAM_BYTES), stream=BULK)
    assert [len(datagram) for datagram in full] == [MAX_DATAGRAM_BYTES] * MAX_STREAM_DATAGRAMS


@pytest.mark.parametrize("missing", range(3))
def test_what_follows_a_gap_waits(missing: int) -> None:
    a, b = nodes()
    speaker, listener = a.towards(b), b.towards(a)
    datagrams = [said(speaker, text)[0] for text in (b"one", b"two", b"six")]
    late = datagrams.pop(missing)
    before = heard(listener, *datagrams).get(CONTROL, b"")
    assert before == b"onetwosix"[: 3 * missing]
    assert before + heard(listener, late).get(CONTROL, b"") == b"onetwosix"


# Who may speak


def test_nobody_else_can_speak_or_listen() -> None:
    a, b, member = nodes(3)
    listener = b.towards(a)
    # Another member knows the link key and every public key; it lacks a private one of the two.
    impostor = EarlyWords(member.key, a.fingerprint, b.party, LINK_KEY, 1)
    assert not heard(listener, *said(impostor, b"I am a"))
    assert not heard(member.towards(a), *said(a.towards(b), b"for b alone"))
    assert not heard(a.towards(b), *said(a.towards(b), b"an echo"))


def test_another_session_or_epoch_hears_nothing() -> None:
    a, b = nodes()
    datagrams = said(a.towards(b), b"words")
    assert not heard(b.towards(a, link_key=bytes(32)), *datagrams)
    assert not heard(b.towards(a, epoch=2), *datagrams)
    assert heard(b.towards(a), *datagrams)


def test_words_of_an_earlier_link_are_not_heard_again() -> None:
    a, b = nodes()
    earlier = said(a.towards(b), b"erase it")
    assert heard(b.towards(a), *earlier)
    again = b.towards(a)
    assert not heard(again, *earlier)
    assert heard(again, *said(a.towards(b), b"no")) == {CONTROL: b"no"}
    assert not heard(again, *earlier)


def test_two_openings_are_not_mixed_in_one_link() -> None:
    a, b = nodes()
    first, second, listener = a.towards(b), a.towards(b), b.towards(a)
    assert heard(listener, *said(first, b"one")) == {CONTROL: b"one"}
    second.say(CONTROL, b"xxx")
    second.datagrams_to_send()
    assert not heard(listener, *said(second, b"two"))


@pytest.mark.parametrize("public", [b"", bytes(31), bytes(32), b"\1" + bytes(31)], ids=["none", "short", "zero", "one"])
def test_a_key_that_is_none_is_refused(public: bytes) -> None:
    a, b = nodes()
    with pytest.raises(ProtocolError, match="announced a key that is none"):
        EarlyWords(a.key, a.fingerprint, Party(b.fingerprint, public), LINK_KEY, 1)


def test_truncated_altered_and_oversized_datagrams_say_nothing() -> None:
    a, b = nodes()
    listener = b.towards(a)
    (datagram,) = said(a.towards(b), b"words")
    for size in range(len(datagram)):
        assert listener.receive(datagram[:size]) is None
    for at in range(len(datagram)):
        assert listener.receive(datagram[:at] + bytes((datagram[at] ^ 1,)) + datagram[at + 1 :]) is None
    assert listener.receive(datagram + bytes(2000)) is None
    assert heard(listener, datagram) == {CONTROL: b"words"}


@given(st.binary(max_size=1300))
def test_arbitrary_bytes_say_nothing(data: bytes) -> None:
    a, b = nodes()
    assert b.towards(a).receive(b"\x82" + a.fingerprint[:8] + data) is None


@pytest.mark.parametrize(("stream", "offset"), [(2, 0), (255, 0), (0, MAX_STREAM_BYTES), (0, 2**32 - 1)])
def test_a_peer_cannot_make_us_hold_more_than_the_beginning_of_two_streams(stream: int, offset: int) -> None:
    a, b = nodes()
    listener = b.towards(a)
    liar = a.towards(b)
    header = b"\x82" + a.fingerprint[:8] + bytes(3) + b"\x07" + bytes(4)
    plain = bytes((stream,)) + offset.to_bytes(4, "big") + b"more"
    sealed = header + liar._out.encrypt(header[9:].rjust(12, b"\0"), plain, header)
    assert listener.receive(sealed) is None


# With QUIC


def early_identities() -> tuple[Identity, Identity]:
    """The wire's two, with keys that have opened nothing yet."""
    client, server = (replace(identity, early=EarlyKey()) for identity in IDENTITIES)
    return client, server


def words_of(me: Identity, peer: Identity) -> EarlyWords:
    return EarlyWords(me.early, me.fingerprint, Party(peer.fingerprint, peer.early.public), LINK_KEY, 1)


def wire_with_early_words(client: Identity, server: Identity, early_of_server: EarlyWords | None = None) -> Wire:
    """``early_of_server``: what the server listens with, where it was told another key than the client's."""
    return Wire(
        (
            QuicConnection.client(client, server.fingerprint, START_S, alpn=ALPN, early=words_of(client, server)),
            QuicConnection.server(
                server, client.fingerprint, START_S, alpn=ALPN, early=early_of_server or words_of(server, client)
            ),
        )
    )


def carry_early(wire: Wire) -> None:
    """Everything that flies once across, early words by their own door as the mesh gives them."""
    for number, end in enumerate(wire.ends):
        batch, wire.flying[number][:] = list(wire.flying[number]), []
        for datagram in batch:
            if classify(datagram) is Kind.EARLY:
                end.receive_early(datagram)
            else:
                end.receive([datagram], wire.now)
    wire.flush()


def settle(wire: Wire) -> None:
    wire.flush()
    for _ in range(40):
        wire.wait(0.01)
        carry_early(wire)


def test_both_are_heard_after_one_trip_and_nothing_comes_twice() -> None:
    wire = wire_with_early_words(*early_identities())
    for number, end in enumerate(wire.ends):
        end.send(CONTROL, b"hello from %d" % number)
        end.send(BULK, bytes(3 * MAX_STREAM_BYTES))
    wire.flush()
    carry_early(wire)
    assert wire.messages(SERVER) == [Message(CONTROL, b"hello from 0")]
    assert wire.messages(CLIENT) == [Message(CONTROL, b"hello from 1")]
    wire.ends[CLIENT].send(CONTROL, b"and more")
    settle(wire)
    wire.ends[CLIENT].send(CONTROL, b"and after")
    settle(wire)
    assert [m.data for m in wire.messages(SERVER) if m.stream is CONTROL] == [
        b"hello from 0",
        b"and more",
        b"and after",
    ]
    assert [len(m.data) for m in wire.messages(SERVER) if m.stream is BULK] == [3 * MAX_STREAM_BYTES]
    assert sum(isinstance(event, Established) for event in wire.events[SERVER]) == 1


def test_without_a_single_early_datagram_arriving_nothing_is_lost() -> None:
    wire = wire_with_early_words(*early_identities())
    wire.ends[CLIENT].send(CONTROL, b"hello")
    wire.flush()
    wire.flying[SERVER][:] = [datagram for datagram in wire.flying[SERVER] if classify(datagram) is not Kind.EARLY]
    settle(wire)
    assert wire.messages(SERVER) == [Message(CONTROL, b"hello")]


def test_words_that_the_peer_did_not_say_end_the_link() -> None:
    client, server = early_identities()
    forger = replace(client, early=EarlyKey())
    wire = wire_with_early_words(client, server, early_of_server=words_of(server, forger))
    words = words_of(forger, server)
    words.say(CONTROL, b"\0\0\0\5lies!")
    wire.ends[CLIENT].send(CONTROL, b"truth")
    wire.flying[SERVER].extend(words.datagrams_to_send())
    settle(wire)
    assert wire.messages(SERVER) == [Message(CONTROL, b"lies!")]
    assert wire.closed(SERVER) == Closed("the peer's first words were not its own", by_peer=False)


def test_an_oversized_announcement_ends_the_link_before_the_handshake() -> None:
    wire = wire_with_early_words(*early_identities())
    wire.ends[CLIENT]._early.say(CONTROL, b"\xff" * 8)  # type: ignore[union-attr]  # it was given
    wire.flush()
    carry_early(wire)
    closed = wire.closed(SERVER)
    assert closed is not None
    assert "announced a message of" in closed.reason
