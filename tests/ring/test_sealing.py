"""A sealed message opens once, for whom it was meant, in its session, unaltered; anything else breaks the seal."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import SealBroken
from kafila.ring import sealing
from kafila.ring.invite import SessionCode
from kafila.ring.sealing import REPLAY_WINDOW, SEAL_OVERHEAD_BYTES, Opener, Sealer, SessionKeys, derive_keys
from kafila.types import NodeId

KEYS = SessionKeys("AB3DE", bytes(range(32)), bytes(32))
ALICE, BOB, CAROL = (NodeId(name.ljust(8).encode()) for name in ("alice", "bob", "carol"))


def sealer(sender: NodeId = ALICE, seed: int = 0, keys: SessionKeys = KEYS) -> Sealer:
    return Sealer(keys, sender, random.Random(seed).randbytes)


def test_keys_are_a_function_of_the_whole_code_and_differ() -> None:
    code = SessionCode("AB3DE", "0" * 15)
    keys = derive_keys(code)
    others = [derive_keys(SessionCode("AB3DF", "0" * 15)), derive_keys(SessionCode("AB3DE", "0" * 14 + "1"))]
    assert derive_keys(SessionCode("AB3DE", "0" * 15)) == keys
    distinct = {key for each in [keys, *others] for key in (each.signalling, each.link)}
    assert len(distinct) == 6
    assert {len(key) for key in distinct} == {32}
    assert keys.signalling.hex() not in repr(keys)
    assert repr(keys.signalling) not in repr(keys)


@given(st.binary(max_size=2000), st.sampled_from([None, BOB]))
def test_what_is_sealed_opens_for_whom_it_was_meant(plaintext: bytes, to: NodeId | None) -> None:
    sealed = sealer().seal(plaintext, to)
    assert len(sealed) == len(plaintext) + SEAL_OVERHEAD_BYTES
    assert len(plaintext) < 4 or plaintext not in sealed
    assert Opener(KEYS, BOB).open(ALICE, sealed) == plaintext


def test_a_broadcast_opens_for_everybody_and_a_directed_message_for_one() -> None:
    alice = sealer()
    everybody, bob_only = alice.seal(b"all", None), alice.seal(b"bob", BOB)
    assert [Opener(KEYS, who).open(ALICE, everybody) for who in (BOB, CAROL)] == [b"all", b"all"]
    with pytest.raises(SealBroken, match="redirected"):
        Opener(KEYS, CAROL).open(ALICE, bob_only)


def test_the_sender_cannot_be_renamed_nor_a_message_reflected() -> None:
    sealed = sealer().seal(b"hello", None)
    with pytest.raises(SealBroken):
        Opener(KEYS, BOB).open(CAROL, sealed)
    with pytest.raises(SealBroken, match="sent back"):
        Opener(KEYS, ALICE).open(ALICE, sealed)


@pytest.mark.parametrize(
    "other",
    [
        SessionKeys("AB3DF", KEYS.signalling, KEYS.link),
        SessionKeys("AB3DE", bytes(32), KEYS.link),
    ],
)
def test_another_session_or_secret_opens_nothing(other: SessionKeys) -> None:
    opener = Opener(other, BOB)
    with pytest.raises(SealBroken):
        opener.open(ALICE, sealer().seal(b"hello", BOB))
    with pytest.raises(SealBroken):
        opener.open_greeting(ALICE, sealer().seal_greeting(b"hello"))
    assert opener.broken == 2


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_altered_byte_breaks_the_seal(at: int, flip: int) -> None:
    for seal, opens in (
        (sealer().seal(b"to bob", BOB), Opener(KEYS, BOB).open),
        (sealer().seal(b"to all", None), Opener(KEYS, BOB).open),
        (sealer().seal_greeting(b"welcome"), Opener(KEYS, BOB).open_greeting),
    ):
        altered = bytearray(seal)
        altered[at % len(altered)] ^= flip
        with pytest.raises(SealBroken):
            opens(ALICE, bytes(altered))


def test_every_truncation_and_extension_breaks_the_seal() -> None:
    opener = Opener(KEYS, BOB)
    sealed = sealer().seal(b"hello", BOB)
    for cut in range(len(sealed)):
        with pytest.raises(SealBroken):
            opener.open(ALICE, sealed[:cut])
    with pytest.raises(SealBroken):
        opener.open(ALICE, sealed + b"\0")
    assert opener.open(ALICE, sealed) == b"hello"


@given(st.binary(max_size=200), st.binary(min_size=0, max_size=10))
def test_arbitrary_bytes_never_open_and_take_up_no_room(noise: bytes, sender: bytes) -> None:
    opener = Opener(KEYS, BOB)
    for opens in (opener.open, opener.open_greeting):
        with pytest.raises(SealBroken):
            opens(NodeId(sender), noise)
    assert opener.broken == 2
    assert opener._windows == {}


def test_another_version_is_named() -> None:
    sealed = bytearray(sealer().seal(b"hello", BOB))
    sealed[0] = 9
    with pytest.raises(SealBroken, match=r"another version of Kafila \(9, this is 1\)"):
        Opener(KEYS, BOB).open(ALICE, bytes(sealed))


def test_purposes_do_not_stand_in_for_one_another() -> None:
    alice = sealer()
    with pytest.raises(SealBroken, match="greeting where a message"):
        Opener(KEYS, BOB).open(ALICE, alice.seal_greeting(b"welcome"))
    with pytest.raises(SealBroken, match="message where a greeting"):
        Opener(KEYS, BOB).open_greeting(ALICE, alice.seal(b"hello", None))


def test_a_greeting_opens_again_after_a_reconnection_and_names_its_host() -> None:
    opener = Opener(KEYS, BOB)
    greeting = sealer().seal_greeting(b"welcome")
    assert [opener.open_greeting(ALICE, greeting) for _ in range(2)] == [b"welcome"] * 2
    with pytest.raises(SealBroken):
        opener.open_greeting(CAROL, greeting)


@given(st.lists(st.integers(0, 2 * REPLAY_WINDOW), min_size=1, max_size=200))
def test_the_replay_window_is_that_of_a_plain_model(order: list[int]) -> None:
    alice, opener = sealer(), Opener(KEYS, BOB)
    sealed = [alice.seal(number.to_bytes(2, "big"), BOB) for number in range(2 * REPLAY_WINDOW + 1)]
    seen: set[int] = set()
    for number in order:
        fresh = number not in seen and number > max(seen, default=-1) - REPLAY_WINDOW
        if fresh:
            assert opener.open(ALICE, sealed[number]) == number.to_bytes(2, "big")
            seen.add(number)
        else:
            with pytest.raises(SealBroken, match="seen before"):
                opener.open(ALICE, sealed[number])


def test_senders_and_starts_have_windows_of_their_own_and_old_starts_stay_remembered() -> None:
    opener = Opener(KEYS, CAROL)
    first, second, bob = sealer(seed=1), sealer(seed=2), sealer(BOB, seed=1)
    messages = [(ALICE, first.seal(b"a", None)), (ALICE, second.seal(b"b", None)), (BOB, bob.seal(b"c", None))]
    assert [opener.open(*message) for message in messages] == [b"a", b"b", b"c"]
    for message in messages:
        with pytest.raises(SealBroken):
            opener.open(*message)


def test_a_forgery_does_not_move_the_window() -> None:
    alice, opener = sealer(), Opener(KEYS, BOB)
    early = alice.seal(b"early", BOB)
    forged = bytearray(early)
    forged[18:26] = (2**40).to_bytes(8, "big")
    with pytest.raises(SealBroken):
        opener.open(ALICE, bytes(forged))
    assert opener.open(ALICE, early) == b"early"


def test_two_starts_with_the_same_sequence_share_no_key_stream() -> None:
    one, two = (sealer(seed=seed).seal(bytes(64), BOB)[-80:] for seed in (1, 2))
    assert all(one[at : at + 8] != two[at : at + 8] for at in range(72))


def test_more_starts_than_a_session_may_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_MAX_EPOCHS", 3)
    opener = Opener(KEYS, BOB)
    seeds = count()
    for _ in range(3):
        opener.open(ALICE, sealer(seed=next(seeds)).seal(b"x", BOB))
    with pytest.raises(SealBroken, match="more restarts"):
        opener.open(ALICE, sealer(seed=next(seeds)).seal(b"x", BOB))
