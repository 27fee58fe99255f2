"""Probing and classifying together, against every NAT there is, in virtual time."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.classify import classify, combine
from kafila.nat.observations import Mapped, Observations
from kafila.nat.probe import MAX_SERVERS, SOCKETS, ProbePlan
from kafila.nat.report import Allocator, Filtering, FilterScope, Mapping, NatReport
from kafila.nat.stun import (
    Attribute,
    ErrorCode,
    MessageClass,
    StunMessage,
    decode,
    encode,
)
from kafila.nat.stun_server import StunServer
from kafila.types import Address
from tests.nat.fake_world import INSIDE, LOCAL_PORTS, ONE_WAY_S, OUTSIDE, FakeNat, FakeWorld

PORTS = (3478, 3479)
TWO_HOSTS = StunServer(("203.0.113.1", "203.0.113.2"), PORTS, bytes(16))
ONE_HOST = StunServer(("203.0.113.1",), PORTS, bytes(16))
ELSEWHERE = StunServer(("192.0.2.50",), (3478,), bytes(16))
RENDEZVOUS, STRANGER = Address("203.0.113.1", 3478), Address("192.0.2.50", 3478)
RTT_S = 2 * ONE_WAY_S

NATS = [
    (mapping, filtering, scope, allocator)
    for mapping, filtering, scope, allocator in product(
        Mapping, Filtering, FilterScope, [Allocator.PRESERVING, Allocator.SEQUENTIAL, Allocator.RANDOM]
    )
]


@pytest.mark.parametrize(("mapping", "filtering", "scope", "allocator"), NATS)
@pytest.mark.parametrize("hairpin", [False, True])
def test_two_hosts_tell_everything(
    mapping: Mapping, filtering: Filtering, scope: FilterScope, allocator: Allocator, hairpin: bool
) -> None:
    nat = FakeNat(mapping, filtering, scope, allocator, step=3, hairpin=hairpin)
    world = FakeWorld(nat, [TWO_HOSTS])
    report = classify(world.run([RENDEZVOUS]))
    assert (report.mapping, report.filtering, report.allocator) == (mapping, filtering, allocator)
    assert report.port_step == (3 if allocator is Allocator.SEQUENTIAL else 0)
    # One mapping to an endpoint, or a filter that asks nothing: there the scope has no meaning and is not claimed.
    meaningful = mapping is not Mapping.EIM and filtering is not Filtering.EIF
    assert report.scope == (scope if meaningful else FilterScope.UNKNOWN)
    assert report.hairpin in ((True, None) if hairpin else (False, None))
    if mapping is Mapping.EIM or filtering is Filtering.EIF:
        assert report.hairpin is hairpin
    assert report.reflexive_v4 is not None
    assert report.reflexive_v4.host == OUTSIDE
    assert not report.on_public_address
    assert not report.udp_blocked
    assert world.took_s < 10 * RTT_S


@pytest.mark.parametrize(("mapping", "filtering", "scope", "allocator"), NATS)
def test_one_host_leaves_open_what_it_cannot_tell(
    mapping: Mapping, filtering: Filtering, scope: FilterScope, allocator: Allocator
) -> None:
    world = FakeWorld(FakeNat(mapping, filtering, scope, allocator), [ONE_HOST])
    report = classify(world.run([RENDEZVOUS]))
    port_dependent = mapping is Mapping.APDM
    assert report.mapping == (Mapping.APDM if port_dependent else Mapping.EIM | Mapping.ADM)
    assert report.filtering == (Filtering.APDF if filtering is Filtering.APDF else Filtering.EIF | Filtering.ADF)
    tells_scope = port_dependent and filtering is Filtering.APDF
    assert report.scope == (scope if tells_scope else FilterScope.UNKNOWN)
    assert report.allocator is allocator


@pytest.mark.parametrize("mapping", list(Mapping))
def test_a_stranger_settles_mapping_but_not_filtering(mapping: Mapping) -> None:
    world = FakeWorld(FakeNat(mapping, Filtering.ADF), [ONE_HOST, ELSEWHERE])
    report = classify(world.run([RENDEZVOUS, STRANGER]))
    assert report.mapping is mapping
    assert report.filtering == Filtering.EIF | Filtering.ADF


@pytest.mark.parametrize(("mapping", "filtering"), list(product(Mapping, Filtering)))
def test_a_stranger_with_two_hosts_tests_for_a_rendezvous_with_one(mapping: Mapping, filtering: Filtering) -> None:
    two_hosts_elsewhere = StunServer(("192.0.2.50", "192.0.2.51"), PORTS, bytes(16))
    world = FakeWorld(FakeNat(mapping, filtering), [ONE_HOST, two_hosts_elsewhere])
    report = classify(world.run([RENDEZVOUS, STRANGER]))
    assert (report.mapping, report.filtering) == (mapping, filtering)


def test_a_server_with_one_socket_tells_the_allocator_only() -> None:
    world = FakeWorld(FakeNat(), [StunServer(("203.0.113.1",), (3478,), bytes(16))])
    report = classify(world.run([RENDEZVOUS]))
    assert (report.mapping, report.filtering) == (Mapping.UNKNOWN, Filtering.UNKNOWN)
    assert report.allocator is Allocator.PRESERVING


@pytest.mark.parametrize(("open_firewall", "filtering"), [(True, Filtering.EIF), (False, Filtering.APDF)])
def test_a_public_host_has_no_nat_but_perhaps_a_firewall(open_firewall: bool, filtering: Filtering) -> None:
    report = classify(FakeWorld(None, [TWO_HOSTS], open_firewall=open_firewall).run([RENDEZVOUS]))
    assert report.on_public_address
    assert (report.mapping, report.filtering) == (Mapping.EIM, filtering)
    assert report.allocator is Allocator.PRESERVING
    assert report.hairpin is None


def test_no_answer_is_blocked_udp_in_about_a_second() -> None:
    world = FakeWorld(FakeNat(), [])
    report = classify(world.run([RENDEZVOUS, STRANGER]))
    assert report == NatReport(udp_blocked=True)
    assert world.took_s <= 1.0
    assert world.packets <= 3 * (SOCKETS + 1)


def test_no_servers_is_finished_at_once() -> None:
    plan = ProbePlan([], LOCAL_PORTS, [INSIDE], 0.0, Random(1).randbytes)
    assert plan.finished
    assert plan.datagrams_to_send(0.0) == []


def test_the_number_of_probes_has_a_bound_whatever_the_network_does() -> None:
    """With one rendezvous: five first requests, three more addresses, three changes, two hairpins, each three times."""
    for loss, seed in product((0.0, 0.3, 0.6, 0.9), range(5)):
        nat = FakeNat(Mapping.APDM, Filtering.APDF)
        world = FakeWorld(nat, [TWO_HOSTS], loss=loss, random=Random(seed))
        world.run([RENDEZVOUS])
        assert world.packets <= 3 * (SOCKETS + 3 + 3 + 2)
        assert world.took_s <= 3.0


def test_the_fresh_socket_asks_one_address_only() -> None:
    world = FakeWorld(FakeNat(Mapping.APDM, Filtering.ADF), [TWO_HOSTS])
    world.run([RENDEZVOUS])
    assert {to for _, socket, to in world.sent if socket == 1} == {RENDEZVOUS}


@pytest.mark.parametrize("seed", range(10))
def test_five_per_cent_loss_does_not_change_what_is_found(seed: int) -> None:
    nat = FakeNat(Mapping.ADM, Filtering.ADF, FilterScope.ENDPOINT, Allocator.SEQUENTIAL)
    report = classify(FakeWorld(nat, [TWO_HOSTS], loss=0.05, random=Random(seed)).run([RENDEZVOUS]))
    assert (report.mapping, report.filtering) == (Mapping.ADM, Filtering.ADF)
    assert (report.scope, report.allocator) == (FilterScope.ENDPOINT, Allocator.SEQUENTIAL)


@given(st.sampled_from(list(Mapping)), st.sampled_from(list(Filtering)), st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
def test_heavy_loss_never_breaks_the_machine(mapping: Mapping, filtering: Filtering, loss: float, seed: int) -> None:
    world = FakeWorld(FakeNat(mapping, filtering), [TWO_HOSTS, ELSEWHERE], loss=loss, random=Random(seed))
    classify(world.run([RENDEZVOUS, STRANGER]))
    assert world.took_s <= 3.0


# --- servers that are not ours ----------------------------------------------------------------------------------------


def _first_requests(plan: ProbePlan) -> list[tuple[int, StunMessage]]:
    sent = [(transmit.socket, decode(transmit.data)) for transmit in plan.datagrams_to_send(0.0)]
    return [(socket, message) for socket, message in sent if message is not None]


def _plan() -> ProbePlan:
    return ProbePlan([RENDEZVOUS], LOCAL_PORTS, [INSIDE], 0.0, Random(1).randbytes)


def _respond(plan: ProbePlan, opposite: Address, now: float = 0.02) -> None:
    for socket, request in _first_requests(plan):
        response = StunMessage(
            MessageClass.SUCCESS,
            request.transaction_id,
            xor_mapped_address=Address(OUTSIDE, LOCAL_PORTS[socket]),
            other_address=opposite,
        )
        plan.receive(socket, encode(response), RENDEZVOUS, now)


@pytest.mark.parametrize("error", [None, ErrorCode(420, "Unknown Attribute"), ErrorCode(438, "")])
def test_a_server_that_ignores_or_refuses_the_change_leaves_filtering_open(error: ErrorCode | None) -> None:
    """Many public servers answer a CHANGE-REQUEST from the address asked. That is no sign of an open filter."""
    plan = _plan()
    _respond(plan, Address("203.0.113.2", 3479))
    now, changes_asked = 0.02, 0
    while not plan.finished:
        for transmit in plan.datagrams_to_send(now):
            request = decode(transmit.data)
            assert request is not None
            if request.change is not None:
                changes_asked += 1
                reply = StunMessage(
                    MessageClass.ERROR if error else MessageClass.SUCCESS,
                    request.transaction_id,
                    xor_mapped_address=Address(OUTSIDE, LOCAL_PORTS[transmit.socket]),
                    error=error,
                    nonce=b"another",
                )
                plan.receive(transmit.socket, encode(reply), RENDEZVOUS, now)
        now += 0.01
        plan.handle_timer(now)
    assert changes_asked == (2 * 3 if error and error.code == 438 else 2)
    seen = plan.observations()
    assert (seen.other_host_got_in, seen.other_port_got_in) == (None, None)
    assert classify(seen).filtering is Filtering.UNKNOWN


@pytest.mark.parametrize(
    "opposite",
    [
        Address("224.0.0.1", 3479),
        Address("127.0.0.1", 3479),
        Address("203.0.113.2", 53),
        Address("203.0.113.2", 3478),
        Address("2001:db8::1", 3479),
    ],
)
def test_an_other_address_that_nobody_should_be_probed_at_is_not(opposite: Address) -> None:
    plan = _plan()
    _respond(plan, opposite)
    assert {transmit.to.host for transmit in plan.datagrams_to_send(0.03)} <= {OUTSIDE}


def test_an_unspecified_other_host_is_the_one_that_was_asked() -> None:
    """So a rendezvous that does not know its public address still offers its second port."""
    plan = _plan()
    _respond(plan, Address("0.0.0.0", 3479))  # noqa: S104  - advertised, not bound
    assert {to for socket, _, to in plan.datagrams_to_send(0.03) if socket == 0} == {RENDEZVOUS._replace(port=3479)}


def test_filtering_is_not_tested_through_a_host_that_the_fresh_socket_has_sent_to() -> None:
    plan = ProbePlan([RENDEZVOUS, STRANGER], LOCAL_PORTS, [INSIDE], 0.0, Random(1).randbytes)
    for transmit in plan.datagrams_to_send(0.0):
        request = decode(transmit.data)
        assert request is not None
        response = StunMessage(
            MessageClass.SUCCESS,
            request.transaction_id,
            xor_mapped_address=Address(OUTSIDE, LOCAL_PORTS[transmit.socket]),
            other_address=RENDEZVOUS._replace(port=3479) if transmit.to == STRANGER else None,
        )
        plan.receive(transmit.socket, encode(response), transmit.to, 0.02)
    assert [to for socket, _, to in plan.datagrams_to_send(0.02) if socket == 1] == []


def test_an_answer_from_a_stranger_or_to_another_socket_counts_for_nothing() -> None:
    plan = _plan()
    (socket, request), *_ = _first_requests(plan)
    forged = StunMessage(MessageClass.SUCCESS, request.transaction_id, xor_mapped_address=Address("203.0.113.99", 9))
    plan.receive(socket, encode(forged), STRANGER, 0.01)
    plan.receive(socket + 1, encode(forged), RENDEZVOUS, 0.01)
    assert plan.observations().mapped == ()


@given(st.integers(0, SOCKETS - 1), st.binary(max_size=60), st.sampled_from([RENDEZVOUS, STRANGER]))
def test_arbitrary_datagrams_are_ignored(socket: int, data: bytes, source: Address) -> None:
    plan = _plan()
    plan.datagrams_to_send(0.0)
    plan.receive(socket, data, source, 0.01)
    assert plan.observations().mapped == ()


def test_more_servers_than_the_bound_are_not_asked() -> None:
    servers = [Address(f"192.0.2.{number}", 3478) for number in range(1, 20)]
    plan = ProbePlan(servers, LOCAL_PORTS, [INSIDE], 0.0, Random(1).randbytes)
    assert len({transmit.to for transmit in plan.datagrams_to_send(0.0)}) == MAX_SERVERS


def test_requests_use_nothing_a_public_server_must_refuse() -> None:
    plan = _plan()
    for transmit in plan.datagrams_to_send(0.0):
        at, kinds = 20, set()
        while at < len(transmit.data):
            kinds.add(int.from_bytes(transmit.data[at : at + 2], "big"))
            length = int.from_bytes(transmit.data[at + 2 : at + 4], "big")
            at += 4 + length + -length % 4
        assert kinds == {Attribute.SOFTWARE, Attribute.FINGERPRINT}


# --- conclusions ------------------------------------------------------------------------------------------------------


def _ports_seen(*ports: int) -> Observations:
    mapped = tuple(Mapped(socket, RENDEZVOUS, Address(OUTSIDE, port)) for socket, port in enumerate(ports))
    return Observations(LOCAL_PORTS, frozenset({INSIDE}), mapped)


@pytest.mark.parametrize(
    ("ports", "allocator", "step"),
    [
        ((40000, 40001, 40002, 40003, 40004), Allocator.SEQUENTIAL, 1),
        ((40000, 40001, 40004, 40005, 40006), Allocator.SEQUENTIAL, 1),
        ((40000, 40002, 40004, 40008, 40010), Allocator.SEQUENTIAL, 2),
        ((40004, 40003, 40002, 40001, 40000), Allocator.SEQUENTIAL, -1),
        ((65534, 65535, 1024, 1025, 1026), Allocator.SEQUENTIAL, 1),
        ((40000, 40001, 40002), Allocator.SEQUENTIAL, 1),
        ((40000, 51234, 1025, 33333, 60001), Allocator.RANDOM, 0),
        ((40000, 40001, 33333, 33334, 1025), Allocator.RANDOM, 0),
        ((50001, 51007, 52011, 40000, 54009), Allocator.PRESERVING, 0),
        ((40000, 40001), Allocator.UNKNOWN, 0),
    ],
)
def test_allocators(ports: tuple[int, ...], allocator: Allocator, step: int) -> None:
    report = classify(_ports_seen(*ports))
    assert (report.allocator, report.port_step) == (allocator, step)


@given(st.integers(0, 2**32 - 1))
def test_a_random_allocator_is_not_taken_for_a_sequence(seed: int) -> None:
    ports = Random(seed).sample(range(1024, 65536), 5)
    assert classify(_ports_seen(*ports)).allocator is not Allocator.SEQUENTIAL


def test_a_mapping_that_contradicts_itself_is_taken_for_the_worst() -> None:
    views = (
        Mapped(0, RENDEZVOUS, Address(OUTSIDE, 1)),
        Mapped(0, STRANGER, Address(OUTSIDE, 1)),
        Mapped(0, RENDEZVOUS._replace(port=3479), Address(OUTSIDE, 2)),
    )
    assert classify(Observations(LOCAL_PORTS, frozenset(), views)).mapping is Mapping.APDM


def test_ipv6_is_reported_only_where_it_goes_out_under_one_address() -> None:
    host, other = Address("2001:db8::1", 3478), Address("2001:db8::2", 3478)
    mine = Address("2001:db8:1::1", LOCAL_PORTS[0])
    steady = (Mapped(0, host, mine), Mapped(0, other, mine))
    moving = (Mapped(0, host, mine), Mapped(0, other, mine._replace(port=9)))
    own = frozenset({mine.host})
    assert classify(Observations(LOCAL_PORTS, own, steady)).reflexive_v6 == mine
    assert classify(Observations(LOCAL_PORTS, frozenset(), moving)).reflexive_v6 is None


def test_two_families_make_one_report() -> None:
    v4 = NatReport(mapping=Mapping.APDM, reflexive_v4=Address(OUTSIDE, 5))
    v6 = NatReport(mapping=Mapping.EIM, reflexive_v6=Address("2001:db8:1::1", 5))
    blocked = NatReport(udp_blocked=True)
    both = combine(v4, v6)
    assert (both.mapping, both.reflexive_v4, both.reflexive_v6) == (Mapping.APDM, v4.reflexive_v4, v6.reflexive_v6)
    assert combine(blocked, v6) == v6
    assert combine(v4, blocked) == v4
    assert combine(v4, None) == v4
    assert combine(None, v6) == v6
    assert combine(None, None) == blocked
    assert combine(blocked, blocked) == blocked
