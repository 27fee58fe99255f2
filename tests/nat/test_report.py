"""Reports: the JSON round trip, refusal of what is no report, the paper's classes, the line for people."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.nat.report import (
    Allocator,
    Filtering,
    FilterScope,
    Mapping,
    NatReport,
    PortMappingProtocol,
    describe,
    from_json,
    nat_class,
    to_json,
)
from kafila.types import Address, NatClass

ports = st.integers(1, 65535)
reports = st.builds(
    NatReport,
    mapping=st.integers(1, 7).map(Mapping),
    filtering=st.integers(1, 7).map(Filtering),
    scope=st.integers(1, 3).map(FilterScope),
    allocator=st.sampled_from(Allocator),
    port_step=st.integers(-16, 16),
    hairpin=st.none() | st.booleans(),
    reflexive_v4=st.none() | st.builds(Address, st.ip_addresses(v=4).map(str), ports),
    reflexive_v6=st.none() | st.builds(Address, st.ip_addresses(v=6).map(str), ports),
    on_public_address=st.booleans(),
    port_mapping=st.none() | st.sampled_from(PortMappingProtocol),
    udp_blocked=st.booleans(),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(reports)
def test_json_round_trip(report: NatReport) -> None:
    assert from_json(json.loads(json.dumps(to_json(report)))) == report


@given(reports, st.sampled_from(sorted(to_json(NatReport()))), json_values)
def test_a_spoilt_field_is_refused_by_name_or_is_a_report(report: NatReport, field: str, value: object) -> None:
    spoilt = {**to_json(report), field: value}
    with nullcontext() if _is_readable(spoilt) else pytest.raises(ProtocolError, match=field):
        from_json(spoilt)


def _is_readable(value: object) -> bool:
    try:
        from_json(value)
    except ProtocolError:
        return False
    return True


@given(json_values)
def test_what_is_no_report_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        from_json(value)


def test_an_address_of_the_wrong_family_is_refused() -> None:
    with pytest.raises(ProtocolError, match="reflexive_v4"):
        from_json({**to_json(NatReport()), "reflexive_v4": ["2001:db8::1", 5]})


@pytest.mark.parametrize(
    ("mapping", "filtering", "expected"),
    [
        (Mapping.EIM, Filtering.EIF, NatClass.PERMISSIVE),
        (Mapping.EIM, Filtering.ADF, NatClass.ORDINARY),
        (Mapping.EIM, Filtering.APDF, NatClass.ORDINARY),
        (Mapping.EIM, Filtering.EIF | Filtering.ADF, NatClass.ORDINARY),
        (Mapping.ADM, Filtering.EIF, NatClass.RESTRICTIVE),
        (Mapping.APDM, Filtering.EIF, NatClass.RESTRICTIVE),
        (Mapping.EIM | Mapping.ADM, Filtering.APDF, NatClass.ORDINARY),
        (Mapping.EIM | Mapping.APDM, Filtering.APDF, NatClass.RESTRICTIVE),
        (Mapping.UNKNOWN, Filtering.UNKNOWN, NatClass.RESTRICTIVE),
    ],
)
def test_the_papers_classes(mapping: Mapping, filtering: Filtering, expected: NatClass) -> None:
    assert nat_class(NatReport(mapping=mapping, filtering=filtering)) is expected


def test_blocked_udp_is_restrictive_whatever_else() -> None:
    report = NatReport(mapping=Mapping.EIM, filtering=Filtering.EIF, udp_blocked=True)
    assert nat_class(report) is NatClass.RESTRICTIVE
    assert "UDP is blocked" in describe(report)


def test_the_line_for_people_says_what_is_open() -> None:
    report = NatReport(
        mapping=Mapping.EIM | Mapping.ADM,
        filtering=Filtering.APDF,
        allocator=Allocator.SEQUENTIAL,
        port_step=2,
        reflexive_v6=Address("2001:db8::1", 5),
        port_mapping=PortMappingProtocol.PCP,
    )
    assert describe(report) == (
        "ordinary NAT (mapping EIM or ADM, filtering APDF, ports sequential by 2, IPv6, pcp offered)"
    )
    assert describe(NatReport()) == "restrictive NAT (mapping unknown, filtering unknown)"


@given(reports)
def test_every_report_fits_a_line(report: NatReport) -> None:
    assert "\n" not in describe(report)
