"""Whatever happens to the network between two path machines, in whatever order."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.candidates import Candidate, CandidateKind, may_probe
from kafila.nat.path import PathState
from kafila.types import Address
from tests.nat.pair import Pair, Side, most_in_a_second

SIDES = st.sampled_from("ab")
JUNK = st.lists(
    st.builds(
        Candidate,
        st.builds(Address, st.ip_addresses().map(str), st.integers(0, 65535)),
        st.sampled_from(CandidateKind),
    ),
    max_size=50,
)
OPERATIONS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.0, 8.0)),
    st.tuples(st.just("block"), SIDES),
    st.tuples(st.just("open"), SIDES),
    st.tuples(st.just("mtu"), SIDES, st.sampled_from([600, 1100, 1250, 1472])),
    st.tuples(st.just("loss"), st.sampled_from([0.0, 0.05, 0.3])),
    st.tuples(st.just("relay"), st.booleans()),
    st.tuples(st.just("sending"), SIDES, st.booleans()),
    st.tuples(st.just("network changed"), SIDES),
    st.tuples(st.just("candidates"), SIDES, JUNK),
    st.tuples(st.just("rubbish"), SIDES, st.binary(max_size=120)),
    st.tuples(st.just("asleep"), SIDES, st.floats(0.0, 20.0)),
)
MATRIX = json.loads((Path(__file__).parent / "data" / "pair_matrix.json").read_text())["mapping"]
NATS = st.sampled_from([None] + [(a, b) for a in MATRIX for b in MATRIX[a] if MATRIX[a][b] in {"direct", "asymmetric"}])
"""Pairs that connect directly both ways; None: both on one LAN."""


def side_of(pair: Pair, name: str) -> Side:
    return pair.a if name == "a" else pair.b


def change_the_network(pair: Pair, operation: tuple[object, ...]) -> None:
    match operation:
        case ("wait", float(seconds)):
            pair.run(seconds)
        case ("block", str(name)):
            pair.blocked.add(name)
        case ("open", str(name)):
            pair.blocked.discard(name)
        case ("mtu", str(name), int(size)):
            pair.mtu_bytes[name] = size
        case ("loss", float(loss)):
            pair.loss = loss
        case ("relay", bool(up)):
            pair.relay_up = up


def change_a_member(pair: Pair, side: Side, operation: tuple[object, ...]) -> None:
    match operation:
        case ("sending", _, bool(sending)):
            if sending and not side.sending:
                pair.stream(side)
            side.sending = sending
        case ("network changed", _):
            side.paths.network_changed(pair.now)
        case ("candidates", _, list(junk)):
            side.paths.set_candidates([*junk, *pair.advertised(pair.other(side))], pair.now)
        case ("rubbish", _, bytes(data)):
            side.paths.receive(data, Address("203.0.113.50", 5555), pair.now)
        case ("asleep", _, float(seconds)):
            pair.started.discard(side.name)
            pair.run(seconds)
            pair.started.add(side.name)


def apply(pair: Pair, operation: tuple[object, ...]) -> None:
    change_the_network(pair, operation)
    if operation[1] in {"a", "b"}:
        change_a_member(pair, side_of(pair, str(operation[1])), operation)
    for side in pair.sides():
        pair.flush(side)


def check(pair: Pair) -> None:
    for side in pair.sides():
        routes = side.paths.routes(pair.now)
        assert 1 <= len(routes) <= 2
        assert len(set(routes)) == len(routes)
        chosen = side.paths.address
        if chosen is None:
            assert routes[0] is None, "without a proven direct path the relay carries everything"
        else:
            assert routes[0] == chosen
            path = side.paths._paths.get(chosen)
            assert path is not None
            assert path.state is PathState.USABLE
            assert path.mtu.confirmed_bytes >= side.paths.max_datagram_bytes >= 1200
        assert len(side.paths._paths) <= 32


@given(st.integers(0, 2**32), NATS, st.lists(OPERATIONS, max_size=12), st.floats(0.0, 0.02))
def test_any_history_ends_well(
    seed: int, nats: tuple[str, str] | None, history: list[tuple[object, ...]], jitter_s: float
) -> None:
    pair = Pair(seed, jitter_s=jitter_s)
    if nats is not None:
        pair.behind(pair.a, *nats[0].split("/"))
        pair.behind(pair.b, *nats[1].split("/"))
    pair.start()
    pair.run(0.5)
    for operation in history:
        apply(pair, operation)
        check(pair)

    pair.blocked, pair.loss, pair.relay_up = set(), 0.0, True
    pair.mtu_bytes = {"a": 1472, "b": 1472}
    assert pair.run(140.0, pair.both_direct), "two pauses of sixty seconds at most, and the rounds between"
    check(pair)

    for side in pair.sides():
        assert most_in_a_second([time for time, to, _ in side.probes if to is not None]) <= 200, "pings and acks"
        assert all(to is None or may_probe(to, same_machine=False) for _, to, _ in side.probes)
