"""The path machine of a peer, in pairs, through the situations that users of such software complain about."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.birthday import BirthdayRole
from kafila.nat.candidates import Candidate, CandidateKind
from kafila.nat.events import (
    KeepaliveShortened,
    PathChanged,
    PathLost,
    PathNarrowed,
    PathSilent,
    PathTooNarrow,
    PunchFailed,
)
from kafila.nat.messages import MIN_MESSAGE_BYTES, Ping, Sealer
from kafila.nat.paths import PeerPaths
from kafila.types import Address, NodeId, PathKind
from tests.nat.pair import LINK_KEY, Pair, Side, most_in_a_second

MATRIX = json.loads((Path(__file__).parent / "data" / "pair_matrix.json").read_text())
CELLS = [(scope, a, b) for scope in MATRIX for a in MATRIX[scope] for b in MATRIX[scope][a]]


def direct_pair(seed: int = 0, **more: float) -> Pair:
    """Both on one LAN, both sending, both direct, MTU found."""
    pair = Pair(seed, **more)  # type: ignore[arg-type]  # all of them are numbers
    pair.start()
    pair.stream(pair.a)
    pair.stream(pair.b)
    assert pair.run(3.0, pair.both_direct)
    pair.run(2.0)
    return pair


def kinds(side: Side) -> list[type]:
    return [type(event) for event in side.events]


# -- relay first, direct as soon as possible


def test_relayed_from_the_very_start() -> None:
    paths = PeerPaths(NodeId(b"a" * 8), NodeId(b"b" * 8), LINK_KEY, [], 0.0, random.Random(1))
    assert paths.routes(0.0) == (None,)
    assert paths.kind is PathKind.RELAYED
    assert paths.max_datagram_bytes == 1200
    assert paths.rtt_s is None


def test_direct_within_two_round_trips_and_both_are_used_in_between() -> None:
    pair = Pair()
    pair.start()
    assert pair.run(1.0, lambda: bool(pair.started) and len(pair.a.paths.routes(pair.now)) == 2)
    assert pair.a.paths.routes(pair.now) == (None, pair.b.address)
    assert pair.run(1.0, pair.both_direct)
    assert pair.now == pytest.approx(1000.0 + 2 * 0.04)
    assert pair.a.paths.routes(pair.now) == (pair.b.address,)
    assert pair.a.paths.rtt_s == pytest.approx(0.04)
    assert pair.a.lines[0] == ("path changed from relayed to direct 192.168.1.3:4242, 40.0 ms, 1200-byte datagrams")


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 1.0, 3.9, 30.0])
def test_whoever_is_late(delay_s: float) -> None:
    pair = Pair()
    pair.behind(pair.a, "EIM", "APDF")
    pair.behind(pair.b, "EIM", "APDF")
    pair.start(0.0, delay_s)
    assert pair.run(delay_s + 0.7, pair.both_direct)


def test_nothing_is_lost_or_late_when_a_direct_path_takes_over() -> None:
    pair = Pair(jitter_s=0.01)
    pair.blocked = {"a", "b"}
    pair.start()
    pair.stream(pair.a, 0.005)
    pair.run(2.0)
    assert pair.a.data_direct == 0
    pair.blocked = set()
    assert pair.run(10.0, pair.both_direct)
    pair.run(1.0)
    pair.a.sending = False
    pair.run(1.0)
    numbers = [number for number, _, _ in pair.b.arrivals]
    assert sorted(numbers) == list(range(len(numbers))), "every one arrived"
    assert len(numbers) > 500
    slowest = pair.relay_latency_s + pair.jitter_s
    assert all(arrived - sent <= slowest + 1e-6 for _, sent, arrived in pair.b.arrivals)


def test_loopback_is_used_when_the_caller_vouches_for_it() -> None:
    pair = Pair(latency_s=0.00005, mtu_bytes=65507)
    pair.a.extra = (Address("127.0.0.1", 4242),)
    pair.b.extra = (Address("127.0.0.1", 4343),)
    pair.a.from_extra = pair.b.from_extra = True
    pair.start(same_machine=True)
    pair.run(1.0)
    assert pair.a.paths.address == Address("127.0.0.1", 4343)
    assert pair.b.paths.address == Address("127.0.0.1", 4242)
    assert pair.a.paths.max_datagram_bytes == 16336


def test_loopback_is_not_probed_otherwise() -> None:
    pair = Pair()
    pair.a.extra = (Address("127.0.0.1", 4242),)
    pair.start()
    pair.run(30.0)
    assert Address("127.0.0.1", 4242) not in {to for _, to, _ in pair.b.probes}
    assert pair.both_direct()


def test_a_nearer_path_takes_over_and_both_are_used_for_a_round_trip() -> None:
    pair = Pair()
    wide = Address("203.0.113.77", 4242)
    pair.b.extra = (wide,)
    pair.start(told=[Candidate(wide, CandidateKind.REFLEXIVE)])
    pair.stream(pair.a)
    pair.run(0.01)
    pair.filters.append(lambda name, _, to: name == "b" and to == pair.a.address)
    assert pair.run(5.0, lambda: pair.a.paths.address == wide)
    pair.a.paths.set_candidates(pair.advertised(pair.b), pair.now)
    assert pair.run(1.0, lambda: pair.a.paths.routes(pair.now) == (pair.b.address, wide))
    assert pair.run(0.1, lambda: pair.a.paths.routes(pair.now) == (pair.b.address,))


# -- NATs


@pytest.mark.parametrize(("scope", "a", "b"), CELLS)
def test_achieves_what_the_matrix_says(scope: str, a: str, b: str) -> None:
    pair = Pair(1)
    pair.behind(pair.a, *a.split("/"), scope=scope)
    pair.behind(pair.b, *b.split("/"), scope=scope)
    pair.start(0.0, 0.03)
    pair.run(5.0)
    achieved = tuple(side.paths.kind is PathKind.DIRECT for side in pair.sides())
    expected = {
        "direct": (True, True),
        "asymmetric": (True, True),
        "forward": (True, False),
        "backward": (False, True),
        "none": (False, False),
    }[MATRIX[scope][a][b]]
    assert achieved == expected


@pytest.mark.parametrize("filtering", ["EIF", "ADF"])
def test_answers_to_new_sources_do_not_breed_newer_ones(filtering: str) -> None:
    """Each packet to a new source leaves a NAT with per-destination mappings by a newer one."""
    pair = Pair(1)
    pair.behind(pair.a, "APDM", "EIF")
    pair.behind(pair.b, "APDM", filtering)
    pair.start()
    pair.stream(pair.a)
    pair.stream(pair.b)
    pair.run(60.0)
    assert pair.both_direct()
    for side in pair.sides():
        assert len({to for _, to, _ in side.probes}) <= 12
        late = [time for time, _, _ in side.probes if time > pair.now - 30]
        assert len(late) / 30 < 20


def test_one_way_direct_carries_what_it_can() -> None:
    pair = Pair(1)
    pair.behind(pair.a, "EIM", "APDF")
    pair.behind(pair.b, "APDM", "EIF")
    pair.start()
    pair.stream(pair.a)
    pair.stream(pair.b)
    pair.run(60.0)
    assert (pair.a.paths.kind, pair.b.paths.kind) == (PathKind.DIRECT, PathKind.RELAYED)
    assert pair.a.data_direct > 5 * pair.a.data_relayed
    assert PathSilent not in kinds(pair.a)


def test_a_nat_that_forgets_soon_is_learned() -> None:
    pair = Pair(1)
    pair.behind(pair.a, "EIM", "APDF", timeout_s=8.0, keeps_ports=True)
    pair.behind(pair.b, "EIM", "APDF", timeout_s=8.0, keeps_ports=True)
    pair.start()
    pair.run(120.0)
    assert KeepaliveShortened in kinds(pair.a) + kinds(pair.b)
    falls = sum(kinds(side).count(PathLost) + kinds(side).count(PathSilent) for side in pair.sides())
    pair.run(600.0)
    assert pair.both_direct()
    assert sum(kinds(side).count(PathLost) + kinds(side).count(PathSilent) for side in pair.sides()) == falls


def test_a_usual_nat_is_kept_open_while_idle() -> None:
    pair = Pair(1)
    pair.behind(pair.a, "EIM", "APDF", timeout_s=30.0)
    pair.behind(pair.b, "EIM", "APDF", timeout_s=30.0)
    pair.start()
    pair.run(600.0)
    assert pair.both_direct()
    assert kinds(pair.a).count(PathChanged) == 1
    busy = [time for time, _, _ in pair.a.probes if time > 1010.0]
    assert len(busy) < 600 / 12 * 4 + 10, "two keepalives and two acks each time"


def test_a_mapping_that_moves_is_followed() -> None:
    """A's NAT reboots: new port, while B's old address for it is dead. A's pings come from the new port."""
    pair = Pair(1)
    pair.behind(pair.a, "EIM", "APDF")
    pair.behind(pair.b, "EIM", "ADF")
    pair.start()
    pair.stream(pair.a)
    pair.stream(pair.b)
    pair.run(5.0)
    assert pair.a.nat is not None
    pair.a.nat.forget()
    moved = pair.now
    assert pair.run(5.0, lambda: pair.b.paths.address == Address("203.0.113.1", 40001))
    pair.run(2.0)
    assert pair.both_direct()
    assert pair.longest_gap_s(pair.a, moved) < 1.0
    assert pair.longest_gap_s(pair.b, moved) < 1.0


def test_birthday_probing_finds_what_punching_cannot() -> None:
    found = 0
    for seed in range(4):
        pair = Pair(seed)
        pair.behind(pair.a, "APDM", "APDF", random_ports=random.Random(seed))
        pair.behind(pair.b, "EIM", "APDF")
        pair.start()
        pair.run(4.5)
        assert pair.a.paths.kind is PathKind.RELAYED
        assert pair.a.paths.begin_birthday(BirthdayRole.OPEN_SOCKETS, pair.now, sockets=128)
        assert pair.b.paths.begin_birthday(BirthdayRole.GUESS_PORTS, pair.now)
        assert not pair.a.paths.begin_birthday(BirthdayRole.OPEN_SOCKETS, pair.now), "once an epoch"
        found += pair.run(16.0, pair.both_direct)
        if pair.both_direct():
            to = pair.a.paths.address
            assert to is not None
            assert pair.a.paths.socket_for(to) > 0
        for side in pair.sides():
            assert most_in_a_second([time for time, _, _ in side.probes]) <= 200
    assert found >= 2, "seven of eight attempts should succeed"


# -- paths that die


@given(
    st.integers(0, 2**32),
    st.sampled_from([("a",), ("b",), ("a", "b")]),
    st.floats(0.0, 3.0),
    st.floats(0.0, 25.0),
    st.floats(0.002, 0.04),
)
def test_silent_death_and_return(
    seed: int, dead: tuple[str, ...], after_s: float, for_s: float, latency_s: float
) -> None:
    pair = direct_pair(seed, latency_s=latency_s, jitter_s=latency_s / 4)
    pair.run(after_s)
    died = pair.now
    pair.blocked = set(dead)
    pair.run(for_s + 2.0)
    for side in pair.sides():
        assert pair.longest_gap_s(side, died) < 1.0
    pair.blocked = set()
    assert pair.run(10.0, pair.both_direct), "direct again within ten seconds"


def test_a_dead_direction_does_not_disturb_the_other() -> None:
    pair = direct_pair()
    pair.blocked = {"a"}
    pair.run(10.0)
    assert (pair.a.paths.kind, pair.b.paths.kind) == (PathKind.RELAYED, PathKind.DIRECT)
    assert PathSilent not in kinds(pair.b)
    assert [PathSilent, PathChanged, PathLost] == kinds(pair.a)[-3:]


@pytest.mark.parametrize("dead", ["a", "b"])
def test_one_sided_traffic_finds_either_direction_dead(dead: str) -> None:
    """B only ever acknowledges; that its acknowledgements are lost must be B's concern, too."""
    pair = Pair()
    pair.start()
    pair.stream(pair.a)
    pair.run(20.0)
    pair.blocked = {dead}
    pair.run(1.0)
    side = pair.a if dead == "a" else pair.b
    assert side.paths.kind is PathKind.RELAYED
    assert pair.other(side).paths.kind is PathKind.DIRECT
    pair.blocked = set()
    assert pair.run(10.0, pair.both_direct)


def test_traffic_after_a_pause_finds_out_at_once() -> None:
    pair = Pair()
    pair.start()
    pair.run(20.0)
    pair.blocked = {"a", "b"}
    pair.run(1.0)
    assert pair.both_direct(), "nobody knows yet"
    began = pair.now
    pair.stream(pair.a)
    pair.run(2.0)
    assert pair.longest_gap_s(pair.b, began) < 1.0


def test_spares_are_not_trusted_when_the_path_in_use_dies() -> None:
    """All addresses of one peer lead through the same cable."""
    pair = Pair()
    pair.b.extra = tuple(Address(f"192.168.2.{n}", 4242) for n in (3, 4, 5, 6))
    pair.start()
    pair.stream(pair.a)
    pair.run(5.0)
    died = pair.now
    pair.blocked = {"a"}
    pair.run(20.0)
    assert pair.longest_gap_s(pair.b, died) < 1.0
    assert pair.a.paths.kind is PathKind.RELAYED
    pair.blocked = set()
    assert pair.run(10.0, pair.both_direct)


def test_a_spare_that_works_takes_over_within_a_second() -> None:
    pair = Pair()
    pair.b.extra = (Address("203.0.113.77", 4242),)
    pair.start()
    pair.stream(pair.a)
    pair.run(5.0)
    assert pair.a.paths.address == pair.b.address
    died = pair.now
    pair.filters.append(lambda _, __, to: to == pair.b.address)
    pair.run(2.0)
    assert pair.a.paths.address == Address("203.0.113.77", 4242)
    assert pair.longest_gap_s(pair.b, died) < 1.0
    pair.filters.clear()
    assert pair.run(10.0, lambda: pair.a.paths.address == pair.b.address), "the nearer one is taken up again"


def test_death_while_idle_costs_nothing_but_is_noticed() -> None:
    pair = Pair()
    pair.start()
    pair.run(20.0)
    pair.blocked = {"a", "b"}
    pair.run(25.0)
    assert not pair.both_direct()
    pair.blocked = set()
    assert pair.run(10.0, pair.both_direct)


def test_a_path_that_exists_only_later_is_found() -> None:
    pair = Pair()
    pair.blocked = {"a", "b"}
    pair.start()
    pair.run(200.0)
    assert kinds(pair.a).count(PunchFailed) == 3, "said three times, not for ever"
    pair.blocked = set()
    assert pair.run(65.0, pair.both_direct)


def test_the_peer_s_round_is_joined() -> None:
    """Between rounds a filter closes again: the peer's probes alone would not get in."""
    pair = Pair(1)
    pair.behind(pair.a, "EIM", "APDF", timeout_s=10.0, keeps_ports=True)
    pair.behind(pair.b, "EIM", "APDF", timeout_s=10.0, keeps_ports=True)
    pair.blocked = {"a", "b"}
    pair.start()
    pair.run(115.0)
    assert len([time for time, to, _ in pair.a.probes if to is not None and time > pair.now - 10.0]) == 0
    pair.blocked = set()
    pair.b.paths.network_changed(pair.now)
    assert pair.run(1.0, pair.both_direct)


def test_the_relay_may_go_while_the_direct_path_works() -> None:
    pair = direct_pair()
    pair.relay_up = False
    since = pair.now
    pair.run(60.0)
    assert pair.both_direct()
    assert pair.longest_gap_s(pair.b, since) < 0.1


def test_five_percent_loss_is_no_reason_to_leave_a_path() -> None:
    pair = Pair(3, loss=0.05, jitter_s=0.02)
    pair.start()
    pair.stream(pair.a)
    pair.stream(pair.b)
    pair.run(120.0)
    assert pair.both_direct()
    for side in pair.sides():
        assert kinds(side).count(PathChanged) <= 3
        assert side.paths.max_datagram_bytes == 1472


def test_reordering_is_no_reason_either() -> None:
    pair = Pair(4, latency_s=0.005, jitter_s=0.2)
    pair.start()
    pair.stream(pair.a)
    pair.stream(pair.b)
    pair.run(60.0)
    assert pair.both_direct()
    assert kinds(pair.a).count(PathChanged) <= 3


def test_ten_minutes_asleep() -> None:
    """Nothing happens for ten minutes on A's side, and its NAT forgot everything but keeps its ports."""
    pair = Pair(1)
    pair.behind(pair.a, "EIM", "APDF", timeout_s=30.0, keeps_ports=True)
    pair.behind(pair.b, "EIM", "APDF", timeout_s=30.0)
    pair.start()
    pair.stream(pair.b)
    pair.run(5.0)
    pair.started.discard("a")
    pair.run(600.0)
    pair.started.add("a")
    pair.flush(pair.a)
    woke = pair.now
    assert pair.run(10.0, pair.both_direct)
    assert pair.longest_gap_s(pair.a, woke) < 1.0


# -- paths that carry less than they seem to


def test_mtu_of_each_direction_by_itself() -> None:
    pair = Pair()
    pair.mtu_bytes = {"a": 1280 - 28, "b": 1472}
    pair.start()
    pair.run(2.0)
    assert pair.a.paths.max_datagram_bytes == 1232
    assert pair.b.paths.max_datagram_bytes == 1472


def test_too_narrow_for_quic_stays_on_the_relay() -> None:
    pair = Pair(mtu_bytes=1124 - 28)
    pair.start()
    pair.stream(pair.a)
    pair.run(60.0)
    assert pair.a.paths.kind is PathKind.RELAYED
    assert kinds(pair.a).count(PathTooNarrow) == 1
    assert pair.longest_gap_s(pair.b, 1001.0) < 0.1


@given(st.integers(1200, 1471), st.integers(0, 2**32))
def test_a_black_hole_is_left_within_a_second(fits: int, seed: int) -> None:
    pair = direct_pair(seed)
    pair.mtu_bytes["a"] = fits
    since = pair.now
    pair.run(3.0)
    assert pair.a.paths.kind is PathKind.DIRECT
    assert pair.a.paths.max_datagram_bytes <= fits
    assert pair.longest_gap_s(pair.b, since) < 1.1
    assert PathNarrowed in kinds(pair.a)
    assert PathTooNarrow not in kinds(pair.a)


def test_narrow_at_the_end_of_a_round_is_not_the_end() -> None:
    pair = Pair(mtu_bytes=1000)
    pair.blocked = {"a", "b"}
    pair.start()
    pair.run(3.3)
    pair.blocked = set()
    pair.run(6.0)
    assert PathTooNarrow in kinds(pair.a)
    pair.mtu_bytes = {"a": 1472, "b": 1472}
    assert pair.run(30.0, pair.both_direct)


def test_jumbo_datagrams_on_a_lan() -> None:
    pair = direct_pair(mtu_bytes=9000 - 28)
    assert pair.a.paths.max_datagram_bytes == 8952


def test_pings_pass_but_data_is_dropped() -> None:
    pair = Pair()
    pair.start()
    pair.stream(pair.a)
    pair.run(5.0)
    pair.filters.append(lambda name, data, _: name == "a" and bool(data[0] & 0x40))
    since = pair.now
    pair.run(200.0)
    assert pair.longest_gap_s(pair.b, since) < 1.1
    assert kinds(pair.a).count(PathSilent) <= 8, "left alone for longer each time"
    pair.filters.clear()
    assert pair.run(70.0, pair.both_direct)


# -- epochs


def test_roaming_to_another_network() -> None:
    pair = direct_pair()
    left = pair.now
    pair.b.address = Address("192.168.1.77", 4242)
    pair.b.paths.network_changed(pair.now)
    pair.flush(pair.b)
    pair.at(0.12, lambda: pair.a.paths.set_candidates(pair.advertised(pair.b), pair.now))
    assert pair.run(1.0, lambda: pair.a.paths.address == pair.b.address and pair.both_direct())
    assert pair.longest_gap_s(pair.a, left) < 0.2
    assert pair.longest_gap_s(pair.b, left) < 0.8


def test_a_new_epoch_measures_anew() -> None:
    pair = direct_pair()
    assert pair.run(1.0, lambda: pair.a.probes[-1][0] == pair.now), "a ping is under way"
    pair.latency_s, pair.relay_latency_s = 0.1, 0.2
    pair.a.paths.network_changed(pair.now)
    assert pair.a.paths.kind is PathKind.RELAYED
    assert pair.run(2.0, pair.both_direct)
    assert pair.a.paths.rtt_s == pytest.approx(0.2)


def test_a_new_epoch_forgets_how_often_it_failed() -> None:
    pair = Pair()
    pair.blocked = {"a", "b"}
    pair.start()
    pair.run(150.0)
    pair.blocked = set()
    pair.a.paths.network_changed(pair.now)
    assert pair.run(0.5, pair.both_direct)


# -- hostile


def test_victims_named_as_candidates_get_little() -> None:
    victims = [
        Candidate(Address(f"203.0.113.{n}", port), CandidateKind.HOST) for n in range(9, 200) for port in (53, 7777)
    ]
    pair = Pair()
    pair.start(told=victims)
    pair.run(300.0)
    to_victims = [(time, to) for time, to, _ in pair.a.probes if to is not None]
    assert len({to for _, to in to_victims}) <= 32
    assert most_in_a_second([time for time, _ in to_victims]) <= 100
    assert all(to.port >= 1024 for _, to in to_victims)
    for victim in {to for _, to in to_victims}:
        assert len([1 for _, to in to_victims if to == victim]) < 120


@given(st.binary(max_size=200), st.booleans())
def test_rubbish_is_dropped_without_a_word(data: bytes, looks_right: bool) -> None:
    paths = PeerPaths(NodeId(b"a" * 8), NodeId(b"b" * 8), LINK_KEY, [], 0.0, random.Random(1))
    paths.probes_to_send(0.0)
    paths.receive(b"\x81" + b"b" * 8 + data if looks_right else data, Address("203.0.113.7", 4242), 0.01)
    assert paths.probes_to_send(0.01) == []
    assert not paths.owns(Address("203.0.113.7", 4242))


@given(st.integers(MIN_MESSAGE_BYTES, 1500), st.booleans(), st.booleans())
def test_one_request_one_answer_to_its_source_no_larger(size: int, active: bool, punching: bool) -> None:
    me, peer, source = NodeId(b"a" * 8), NodeId(b"b" * 8), Address("203.0.113.7", 4242)
    paths = PeerPaths(me, peer, LINK_KEY, [], 0.0, random.Random(1))
    paths.probes_to_send(0.0)
    paths.network_changed(0.0)
    sealer = Sealer(LINK_KEY, peer, me, random.Random(2).randbytes)
    data = sealer.seal(Ping(7, None, active, punching, size))
    paths.receive(data, source, 5.0)
    answers = [probe for probe in paths._exchange.take() if probe.to == source]
    assert sum(len(probe.data) for probe in answers) <= size
    paths.probes_to_send(5.0)
    for _ in range(3):
        paths.receive(data, Address("203.0.113.66", 4242), 6.0)
    replayed = [probe for probe in paths.probes_to_send(6.0) if probe.to == Address("203.0.113.66", 4242)]
    assert replayed == [], "a replay moves nothing"
    assert not paths.owns(Address("203.0.113.66", 4242))
