"""UPnP: what is read from a gateway nobody vouches for, and the machine against one that helps, errs and lies."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.portmap import PortMapEvent, PortMapped, PortNotMapped
from kafila.nat.report import PortMappingProtocol
from kafila.nat.upnp import BUDGET_S, LEASE_S, State, UpnpMapper
from kafila.nat.upnp_messages import (
    MAX_RESPONSE_BYTES,
    SSDP_PORT,
    HttpResponse,
    Service,
    action_request,
    description_request,
    find_service,
    location_of,
    parse_response,
    parse_xml,
    search_requests,
)
from kafila.types import Address
from tests.nat.fake_igd import DESCRIPTION, GATEWAY, WAN_IP, FakeIgd, http

PORT = 40000
CLIENT = "192.168.1.10"
SSDP = Address(GATEWAY, SSDP_PORT)
LOCATION = f"http://{GATEWAY}:5000/root.xml"


class Home:
    """The machine, a gateway, and the clock between them."""

    def __init__(self, igd: FakeIgd) -> None:
        self.igd = igd
        self.now = 0.0
        self.mapper = UpnpMapper(GATEWAY, CLIENT, PORT, 0.0, Random(1).randbytes)
        self.exchanges = 0
        self.is_cut = False

    def run(self, until: float) -> list[PortMapEvent]:
        """Let time pass; what the machine reports meanwhile."""
        events: list[PortMapEvent] = []
        while True:
            for data, _ in self.mapper.datagrams_to_send(self.now):
                if (reply := self.igd.search(data)) is not None:
                    self.mapper.receive(reply, SSDP, self.now)
            while (request := self.mapper.request_to_make()) is not None:
                assert request.to == Address(GATEWAY, 5000)
                self.exchanges += 1
                self.mapper.response_received(None if self.is_cut else self.igd.serve(request.data), self.now)
            while (event := self.mapper.next_event()) is not None:
                events.append(event)
            timer = self.mapper.next_timer()
            if timer is None or timer > until:
                self.now = until
                return events
            assert timer >= self.now
            self.now = timer
            self.mapper.handle_timer(self.now)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_gateway_opens_the_port(chunked: bool) -> None:
    home = Home(FakeIgd(chunked=chunked))
    assert home.run(0.0) == [PortMapped(Address("11.0.0.9", PORT), PortMappingProtocol.UPNP)]
    mapping = home.igd.mappings[PORT]
    assert (mapping["NewInternalClient"], mapping["NewInternalPort"]) == (CLIENT, str(PORT))
    assert (mapping["NewProtocol"], mapping["NewLeaseDuration"]) == ("UDP", str(LEASE_S))
    assert home.exchanges == 3


def test_a_lease_is_renewed_without_a_word_and_given_back_at_the_end() -> None:
    home = Home(FakeIgd())
    home.run(0.0)
    assert home.run(10.0 * LEASE_S) == []
    assert 3 + 2 * 19 <= home.exchanges <= 3 + 2 * 21
    home.mapper.close()
    home.run(home.now)
    assert home.igd.mappings == {}
    assert home.mapper.state is State.CLOSED


def test_a_port_that_is_taken_is_exchanged_for_another() -> None:
    home = Home(FakeIgd(taken_ports={PORT}))
    (event,) = home.run(0.0)
    assert isinstance(event, PortMapped)
    assert event.external.port in home.igd.mappings
    assert event.external.port != PORT


def test_a_gateway_whose_ports_are_all_taken_is_not_asked_for_ever() -> None:
    home = Home(FakeIgd(taken_ports=set(range(65536))))
    assert home.run(0.0) == [PortNotMapped("the gateway refuses (UPnP error 718)")]
    assert home.exchanges <= 6


def test_a_gateway_without_leases_gets_a_mapping_without_end_that_is_still_given_back() -> None:
    home = Home(FakeIgd(only_permanent=True))
    (event,) = home.run(0.0)
    assert isinstance(event, PortMapped)
    assert home.igd.mappings[PORT]["NewLeaseDuration"] == "0"
    home.mapper.close()
    home.run(0.0)
    assert home.igd.mappings == {}


def test_no_gateway_is_known_within_the_budget_and_a_late_one_is_heard() -> None:
    home = Home(FakeIgd(is_silent=True))
    assert home.run(BUDGET_S) == [PortNotMapped("no gateway answers to UPnP")]
    assert home.run(100.0) == []
    reply = FakeIgd().search(b"M-SEARCH")
    assert reply is not None
    home.mapper.receive(reply, SSDP, 100.0)
    assert isinstance(home.run(100.0)[0], PortMapped)


@pytest.mark.parametrize(
    ("igd", "words"),
    [
        (FakeIgd(refuses=True), "does not tell its address"),
        (FakeIgd(external_host="192.168.5.5"), "behind another NAT"),
        (FakeIgd(external_host="0.0.0.0"), "cannot be"),  # noqa: S104  - claimed, not bound
        (FakeIgd(external_host="nonsense"), "does not know its own address"),
        (FakeIgd(kind="urn:schemas-upnp-org:service:Something:1"), "describes no port mapping"),
        (FakeIgd(control="http://192.168.1.99:5000/ctl"), "not its own"),
        (FakeIgd(control="https://192.168.1.1:5000/ctl"), "not its own"),
        (FakeIgd(control="/ctl\r\nX: y"), "not its own"),
    ],
)
def test_what_a_gateway_gets_wrong_is_said(igd: FakeIgd, words: str) -> None:
    (event,) = Home(igd).run(0.0)
    assert isinstance(event, PortNotMapped)
    assert words in event.reason


@pytest.mark.parametrize(
    ("location", "source"),
    [
        ("http://192.168.1.99:5000/root.xml", SSDP),
        ("https://192.168.1.1/root.xml", SSDP),
        ("file:///etc/passwd", SSDP),
        ("http://192.168.1.1:99999/", SSDP),
        (LOCATION, Address("192.168.1.99", SSDP_PORT)),
    ],
)
def test_nobody_but_the_gateway_sends_us_anywhere(location: str, source: Address) -> None:
    home = Home(FakeIgd(is_silent=True))
    reply = FakeIgd(location=location).search(b"M-SEARCH")
    assert reply is not None
    home.mapper.receive(reply, source, 0.0)
    home.run(0.0)
    assert home.exchanges == 0


def test_a_failed_renewal_is_tried_again_while_the_lease_lasts() -> None:
    home = Home(FakeIgd())
    home.run(0.0)
    home.is_cut = True
    assert home.run(0.9 * LEASE_S) == []
    home.is_cut = False
    assert home.run(3.0 * LEASE_S) == []
    home.is_cut = True
    (event,) = home.run(6.0 * LEASE_S)
    assert isinstance(event, PortNotMapped)


def test_closing_before_anything_was_mapped_asks_nothing() -> None:
    home = Home(FakeIgd())
    home.mapper.close()
    home.run(10.0)
    assert (home.exchanges, home.mapper.state) == (0, State.CLOSED)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_searches_go_to_the_gateway_and_to_the_group() -> None:
    assert {to.host for _, to in search_requests(GATEWAY)} == {GATEWAY, "239.255.255.250"}
    assert all(data.endswith(b"\r\n\r\n") and b'MAN: "ssdp:discover"' in data for data, _ in search_requests(GATEWAY))


def test_the_better_service_is_preferred_and_urls_are_resolved() -> None:
    description = (
        "<root><URLBase>http://192.168.1.1:80/base/</URLBase>"
        f"<service><serviceType>{WAN_IP}</serviceType><controlURL>one</controlURL></service>"
        f"<service><serviceType>{WAN_IP[:-1]}2</serviceType><controlURL>two</controlURL></service></root>"
    )
    assert find_service(description.encode(), LOCATION) == Service(f"{WAN_IP[:-1]}2", "http://192.168.1.1:80/base/two")


def test_arguments_are_escaped() -> None:
    request = action_request(Service(WAN_IP, LOCATION), GATEWAY, "Act", {"A": "<&>"})
    assert request is not None
    assert b"<A>&lt;&amp;&gt;</A>" in request.data


@pytest.mark.parametrize(
    "document",
    [
        b'<!DOCTYPE a [<!ENTITY x "xxxxxxxx">]><a>&x;</a>',
        b'<!DOCTYPE a SYSTEM "http://192.168.1.1/x.dtd"><a/>',
        b"<a>" * 40 + b"</a>" * 40,
        b"<a>" + b"<b/>" * 5000 + b"</a>",
        b"<a>&undefined;</a>",
        b"<a><b></a></b>",
        b'<?xml version="1.0" encoding="klingon"?><a/>',
        b"",
        b"plain",
    ],
)
def test_dangerous_and_broken_xml_is_refused(document: bytes) -> None:
    assert parse_xml(document) is None


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_arbitrary_bytes_are_refused_quietly(data: bytes) -> None:
    parse_xml(data)
    find_service(data, LOCATION)
    location_of(b"HTTP/1.1 200 OK\r\nLOCATION: " + data + b"\r\n\r\n", GATEWAY)
    description_request(data.decode("latin-1"), GATEWAY)
    for head in (b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200\r\ntransfer-encoding: chunked\r\n\r\n"):
        for is_all in (False, True):
            parse_response(head + data, is_all=is_all)


@given(st.text(max_size=400), st.booleans())
def test_http_round_trip_and_every_truncation(body: str, chunked: bool) -> None:
    body = body.encode("ascii", "replace").decode()
    data = http("200 OK", body, chunked=chunked)
    assert parse_response(data, is_all=False) == HttpResponse(200, body.encode())
    # A last line end after the last chunk may be missing; all else is needed.
    for end in range(len(data) - 3):
        assert parse_response(data[:end], is_all=False) is None
        assert parse_response(data[:end], is_all=True) == HttpResponse(0, b"")


def test_a_response_without_a_length_ends_with_the_connection() -> None:
    data = b"HTTP/1.0 200 OK\r\n\r\nbody"
    assert parse_response(data, is_all=False) is None
    assert parse_response(data, is_all=True) == HttpResponse(200, b"body")


def test_an_endless_response_is_cut_off() -> None:
    assert parse_response(b"x" * (MAX_RESPONSE_BYTES + 1), is_all=False) == HttpResponse(0, b"")
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * MAX_RESPONSE_BYTES
    assert parse_response(endless, is_all=False) == HttpResponse(0, b"")


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=60), st.floats(0, 4000)), max_size=12))
def test_whatever_comes_the_machine_stays_sane(steps: list[tuple[int, bytes, float]]) -> None:
    mapper = UpnpMapper(GATEWAY, CLIENT, PORT, 0.0, Random(1).randbytes)
    igd, now = FakeIgd(), 0.0
    for kind, data, later in steps:
        now += later
        match kind:
            case 0:
                mapper.receive(igd.search(b"M-SEARCH") or b"", SSDP, now)
            case 1:
                mapper.handle_timer(now)
            case 2:
                request = mapper.request_to_make()
                mapper.response_received(igd.serve(request.data) if request and len(data) % 2 else data, now)
            case _:
                mapper.receive(data, SSDP, now)
        mapper.datagrams_to_send(now)
        timer = mapper.next_timer()
        assert timer is None or mapper.state in (State.SEARCHING, State.MAPPED)


def test_the_description_used_here_is_one() -> None:
    assert parse_xml(DESCRIPTION.format(kind=WAN_IP, control="/c").encode()) is not None
