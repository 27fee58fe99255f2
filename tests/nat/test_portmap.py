"""PCP and NAT-PMP: the codecs, and the machine against gateways that answer, refuse, lie and keep silent."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.nat import natpmp, pcp
from kafila.nat.portmap import (
    BUDGET_S,
    LIFETIME_S,
    SERVER_PORT,
    PortMapEvent,
    PortMapped,
    PortMapper,
    PortNotMapped,
    State,
    client_host_for,
    why_doubted,
)
from kafila.nat.report import PortMappingProtocol
from kafila.types import Address
from sims.portmap_server import Honesty, PortMapServer
from sims.topology import Nat, VirtualNetwork

PORT = 40000
EXTERNAL = Address("11.0.0.9", 45000)
NONCE = bytes(range(12))
HOSTS = st.ip_addresses().filter(lambda ip: ip.version == 4 or ip.ipv4_mapped is None).map(str)
"""PCP writes IPv4 as mapped IPv6 (RFC 6887 section 5), so that mapped address is not another."""


# --- codecs -----------------------------------------------------------------------------------------------------------


def pcp_response(
    result: int = 0, lifetime_s: int = 7200, nonce: bytes = NONCE, port: int = PORT, external: Address = EXTERNAL
) -> bytes:
    """A MAP response, made from the request by the differences of RFC 6887 sections 7.2 and 11.1."""
    request = pcp.map_request("0.0.0.0", nonce, port, external, lifetime_s)  # noqa: S104  - not bound
    return bytes((2, 0x81, 0, result)) + request[4:8] + (77).to_bytes(4, "big") + bytes(12) + request[24:]


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(min_size=12, max_size=12), HOSTS)
def test_pcp_round_trip(result: int, lifetime_s: int, nonce: bytes, host: str) -> None:
    data = pcp_response(result, lifetime_s, nonce, PORT, Address(host, 5))
    assert pcp.decode_response(data) == pcp.MapResponse(result, lifetime_s, 77, nonce, PORT, Address(host, 5))


def test_pcp_request_as_rfc_6887_lays_it_out() -> None:
    data = pcp.map_request("192.168.1.10", NONCE, 0x1234, Address("11.0.0.9", 0x5678), 7200)
    assert data.hex() == (
        "0201000000001c20"
        "00000000000000000000ffffc0a8010a"
        "000102030405060708090a0b"
        "11000000"
        "12345678"
        "00000000000000000000ffff0b000009"
    )


def test_natpmp_messages_as_rfc_6886_lays_them_out() -> None:
    assert natpmp.external_address_request().hex() == "0000"
    assert natpmp.map_request(0x1234, 0x5678, 7200).hex() == "000100001234567800001c20"
    assert natpmp.decode_response(bytes.fromhex("008000000000004d0b000009")) == natpmp.ExternalAddress(
        0, 77, "11.0.0.9"
    )
    assert natpmp.decode_response(bytes.fromhex("008100000000004d1234567800001c20")) == natpmp.Mapped(
        0, 77, 0x1234, 0x5678, 7200
    )
    assert natpmp.decode_response(bytes.fromhex("008100010000004d")) == natpmp.Mapped(1, 77, 0, 0, 0)


@pytest.mark.parametrize(
    ("decode", "whole"),
    [
        (pcp.decode_response, pcp_response()),
        (natpmp.decode_response, bytes.fromhex("008100000000004d1234567800001c20")),
        (natpmp.decode_response, bytes.fromhex("008000000000004d0b000009")),
    ],
)
def test_every_truncation_is_refused(decode: Callable[[bytes], object], whole: bytes) -> None:
    assert decode(whole) is not None
    assert [end for end in range(len(whole)) if decode(whole[:end]) is not None] == []


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_refused_quietly(data: bytes) -> None:
    for head in (b"", b"\x02\x81", b"\x00\x80", b"\x00\x81"):
        pcp.decode_response(head + data)
        natpmp.decode_response(head + data)


# --- the machine ------------------------------------------------------------------------------------------------------


class Home:
    """A machine behind a gateway of the virtual network, and the clock between them."""

    def __init__(self, server: PortMapServer | None) -> None:
        net = VirtualNetwork(seed=1)
        self.nat: Nat = net.nat("home")
        self.member = self.nat.machine("member")
        self.server = self.nat.service = server
        self.gateway = self.member.gateways()[0].host
        self.now = 0.0
        host = client_host_for(self.gateway, self.member.interface_addresses())
        self.mapper = PortMapper(self.gateway, host, PORT, self.now, Random(1).randbytes)
        self.asked = 0
        self.deaf = False

    def run(self, until: float) -> list[PortMapEvent]:
        """Let time pass; what the machine reports meanwhile."""
        events: list[PortMapEvent] = []
        while True:
            for data, to in self.mapper.datagrams_to_send(self.now):
                assert to == Address(self.gateway, SERVER_PORT)
                self.asked += 1
                self.answer(data)
            while (event := self.mapper.next_event()) is not None:
                events.append(event)
            timer = self.mapper.next_timer()
            if timer is None or timer > until:
                self.now = until
                return events
            assert timer >= self.now
            self.now = timer
            self.mapper.handle_timer(self.now)

    def answer(self, data: bytes) -> None:
        """Let the gateway answer a request, unless nothing reaches us."""
        source = Address(self.member.hosts()[0], 50000)
        reply = self.server.answer(data, source, self.nat, self.now) if self.server else None
        if reply is not None and not self.deaf:
            self.mapper.receive(reply, Address(self.gateway, SERVER_PORT), self.now)

    def leads_inside(self, external: Address) -> bool:
        return self.nat.table.inbound(EXTERNAL, external, self.now) == Address(self.member.hosts()[0], PORT)


@pytest.mark.parametrize(
    ("server", "protocol"),
    [
        (PortMapServer(), PortMappingProtocol.PCP),
        (PortMapServer(nat_pmp=False), PortMappingProtocol.PCP),
        (PortMapServer(pcp=False), PortMappingProtocol.NAT_PMP),
    ],
)
def test_a_gateway_opens_the_port(server: PortMapServer, protocol: PortMappingProtocol) -> None:
    home = Home(server)
    (event,) = home.run(BUDGET_S)
    assert isinstance(event, PortMapped)
    assert event.protocol is protocol
    assert home.leads_inside(event.external)
    assert home.asked <= 4


def test_a_mapping_is_renewed_without_a_word_and_given_back_at_the_end() -> None:
    home = Home(PortMapServer())
    (event,) = home.run(BUDGET_S)
    assert isinstance(event, PortMapped)
    assert home.run(10 * LIFETIME_S) == []
    assert home.leads_inside(event.external)
    assert home.asked <= 2 + 20
    home.mapper.close(home.now)
    home.run(home.now)
    assert home.mapper.state is State.CLOSED
    assert not home.leads_inside(event.external)
    assert home.mapper.next_timer() is None


@pytest.mark.parametrize("server", [None, PortMapServer(Honesty.SILENT)])
def test_silence_ends_within_the_budget(server: PortMapServer | None) -> None:
    home = Home(server)
    assert home.run(BUDGET_S) == [PortNotMapped("the gateway does not answer")]
    assert home.asked <= 6
    assert home.run(1e6) == []


@pytest.mark.parametrize("server", [PortMapServer(Honesty.REFUSES), PortMapServer(Honesty.REFUSES, pcp=False)])
def test_a_refusal_ends_at_once(server: PortMapServer) -> None:
    home = Home(server)
    (event,) = home.run(0.0)
    assert isinstance(event, PortNotMapped)
    assert "refuses" in event.reason


@pytest.mark.parametrize("honesty", [Honesty.NO_MAPPING, Honesty.WRONG_ADDRESS])
def test_a_lie_is_passed_on_as_the_claim_it_is(honesty: Honesty) -> None:
    home = Home(PortMapServer(honesty))
    (event,) = home.run(BUDGET_S)
    assert isinstance(event, PortMapped)  # nothing in the answer gives it away: only a probe will
    assert not home.leads_inside(event.external)


def test_a_gateway_that_dies_is_noticed_when_the_lifetime_is_over_and_heard_when_it_is_back() -> None:
    home = Home(PortMapServer())
    home.run(BUDGET_S)
    home.deaf = True
    assert home.run(2 * LIFETIME_S) == [PortNotMapped("the gateway does not answer")]
    assert home.mapper.state is State.NONE
    home.deaf = False
    home.answer(pcp.map_request(home.member.hosts()[0], Random(1).randbytes(12), PORT, None, LIFETIME_S))
    assert isinstance(home.mapper.next_event(), PortMapped)


def test_a_rebooted_gateway_with_a_new_address_is_asked_anew() -> None:
    home = Home(PortMapServer())
    (before,) = home.run(BUDGET_S)
    assert home.server is not None
    home.nat.renumber()
    home.server.reboot(home.now)
    home.mapper.refresh(home.now)
    (after,) = home.run(home.now)
    assert isinstance(before, PortMapped)
    assert isinstance(after, PortMapped)
    assert after.external.host != before.external.host
    assert home.leads_inside(after.external)


def test_a_refresh_that_goes_unheard_is_made_up_for_by_the_next_renewal() -> None:
    home = Home(PortMapServer())
    home.run(BUDGET_S)
    home.deaf = True
    home.mapper.refresh(home.now)
    home.run(home.now)
    home.deaf = False
    assert home.run(10 * LIFETIME_S) == []
    assert home.mapper.state is State.MAPPED


def test_behind_two_nats_the_claim_is_not_believed() -> None:
    home = Home(None)
    data = pcp_response(nonce=Random(1).randbytes(12), external=Address("100.64.3.4", 45000))
    home.mapper.receive(data, Address(home.gateway, SERVER_PORT), 0.0)
    (event,) = home.run(0.0)
    assert isinstance(event, PortNotMapped)
    assert "behind another NAT" in event.reason


@pytest.mark.parametrize(
    ("data", "source_port"),
    [
        (pcp_response(nonce=Random(1).randbytes(12)), SERVER_PORT + 1),
        (pcp_response(nonce=bytes(12)), SERVER_PORT),
        (pcp_response(nonce=Random(1).randbytes(12), port=PORT + 1), SERVER_PORT),
    ],
)
def test_an_answer_to_somebody_else_is_ignored(data: bytes, source_port: int) -> None:
    home = Home(None)
    home.mapper.receive(data, Address(home.gateway, source_port), 0.0)
    assert home.run(0.0) == []


def test_a_late_answer_is_still_taken() -> None:
    home = Home(None)
    home.run(5.0)
    home.mapper.receive(pcp_response(nonce=Random(1).randbytes(12)), Address(home.gateway, SERVER_PORT), 5.0)
    assert home.run(5.0) == [PortMapped(EXTERNAL, PortMappingProtocol.PCP)]


def test_a_lifetime_of_nothing_does_not_keep_us_busy() -> None:
    home = Home(None)
    data = pcp_response(nonce=Random(1).randbytes(12), lifetime_s=0)
    home.mapper.receive(data, Address(home.gateway, SERVER_PORT), 0.0)
    home.run(100.0)
    assert home.asked <= 5


@pytest.mark.parametrize(
    "external",
    [
        Address("0.0.0.0", 45000),  # noqa: S104  - claimed, not bound
        Address("127.0.0.1", 45000),
        Address("224.0.0.1", 45000),
        Address("169.254.1.1", 45000),
        Address("192.168.0.2", 45000),
        Address("10.1.2.3", 45000),
        Address("100.64.0.1", 45000),
        Address("100.127.255.254", 45000),
        Address("11.0.0.9", 0),
        Address("11.0.0.9", 53),
    ],
)
def test_claims_that_cannot_be_true(external: Address) -> None:
    assert why_doubted(external) is not None


@pytest.mark.parametrize("host", ["11.0.0.9", "100.63.255.255", "100.128.0.1", "2a10::5"])
def test_claims_that_can(host: str) -> None:
    assert why_doubted(Address(host, 45000)) is None


def test_our_address_on_the_gateways_network() -> None:
    interfaces = [Address(host, 0) for host in ("10.8.0.2", "2a10::5", "192.168.1.10", "127.0.0.1")]
    assert client_host_for("192.168.1.1", interfaces) == "192.168.1.10"
    assert client_host_for("10.8.0.1", interfaces) == "10.8.0.2"
    assert client_host_for("10.8.0.1", interfaces[1:2]) is None


def test_without_an_address_of_our_own_natpmp_is_asked_straight_away() -> None:
    mapper = PortMapper("192.168.1.1", None, PORT, 0.0, Random(1).randbytes)
    assert [data[0] for data, _ in mapper.datagrams_to_send(0.0)] == [natpmp.VERSION] * 2


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.binary(max_size=80), st.floats(0, 10)), max_size=12))
def test_whatever_comes_the_machine_stays_sane(steps: list[tuple[int, bytes, float]]) -> None:
    mapper = PortMapper("192.168.1.1", "192.168.1.10", PORT, 0.0, Random(1).randbytes)
    now = 0.0
    for kind, data, later in steps:
        now += later
        if kind == 0:
            mapper.receive(data, Address("192.168.1.1", SERVER_PORT), now)
        elif kind == 1:
            response = pcp_response(data[0] if data else 0, nonce=Random(1).randbytes(12))
            mapper.receive(response, Address("192.168.1.1", SERVER_PORT), now)
        else:
            mapper.handle_timer(now)
        assert len(mapper.datagrams_to_send(now)) <= 40
        timer = mapper.next_timer()
        assert timer is None or mapper.state in (State.ASKING_PCP, State.ASKING_PMP, State.MAPPED)
