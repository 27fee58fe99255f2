"""The predictor against the brute-forced truth, the paper's Table III, and the rules beyond mapping and filtering."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given

from kafila.nat.predict import Nat, Reach, Way, paper_rule, predict, predicted_addresses, punch, ways
from kafila.nat.report import (
    Allocator,
    Filtering,
    FilterScope,
    Mapping,
    NatReport,
    PortMappingProtocol,
    nat_class,
)
from kafila.types import Address, NatClass
from tests.nat.test_report import reports

MATRIX: dict[str, dict[str, dict[str, str]]] = json.loads(
    (Path(__file__).parent / "data" / "pair_matrix.json").read_text()
)
CELLS = [(scope, row, column) for scope, rows in MATRIX.items() for row in rows for column in rows[row]]
MIRROR = {Reach.FORWARD: Reach.BACKWARD, Reach.BACKWARD: Reach.FORWARD}
HERE, THERE = Address("198.51.100.1", 4000), Address("203.0.113.1", 5000)
HERE_V6, THERE_V6 = Address("2001:db8:1::1", 4000), Address("2001:db8:2::1", 5000)


def report_of(cell: str, scope: str = "mapping", **more: object) -> NatReport:
    mapping, filtering = cell.split("/")
    return NatReport(
        mapping=Mapping[mapping],
        filtering=Filtering[filtering],
        scope=FilterScope[scope.upper()],
        **more,  # type: ignore[arg-type]  # the tests name real fields
    )


def test_the_matrix_is_whole() -> None:
    assert len(CELLS) == 2 * 81


@pytest.mark.parametrize(("scope", "row", "column"), CELLS)
def test_every_cell_of_the_matrix(scope: str, row: str, column: str) -> None:
    a, b = report_of(row, scope, reflexive_v4=HERE), report_of(column, scope, reflexive_v4=THERE)
    assert predict(a, b).value == MATRIX[scope][row][column]


@given(reports, reports)
def test_turning_the_pair_round_turns_the_answer_round(a: NatReport, b: NatReport) -> None:
    forth, back = predict(a, b), predict(b, a)
    assert back is MIRROR.get(forth, forth)
    assert set(ways(a, b)) == set(ways(b, a))


@given(reports, reports)
def test_an_open_question_is_answered_only_when_it_does_not_matter(a: NatReport, b: NatReport) -> None:
    """Whatever is certain about an incomplete report stays true of each of its completions."""
    overall = predict(a, b)
    completions = {
        predict(complete_a, complete_b) for complete_a, complete_b in product(_completions(a), _completions(b))
    }
    assert overall is Reach.UNKNOWN or completions == {overall}


def _completions(report: NatReport) -> list[NatReport]:
    fields = {field: getattr(report, field) for field in NatReport.__dataclass_fields__}
    return [
        NatReport(**{**fields, "mapping": mapping, "filtering": filtering, "scope": scope})
        for mapping, filtering, scope in product(report.mapping, report.filtering, report.scope)
    ]


def test_nothing_known_is_unknown_and_nothing_out_is_none() -> None:
    assert predict(NatReport(), NatReport()) is Reach.UNKNOWN
    assert predict(NatReport(udp_blocked=True), report_of("EIM/EIF")) is Reach.NONE
    assert ways(NatReport(udp_blocked=True), report_of("EIM/EIF")) == ()


def test_a_permissive_member_settles_it_whatever_the_other_leaves_open() -> None:
    assert predict(report_of("EIM/EIF"), NatReport()) is Reach.DIRECT


# --- the paper --------------------------------------------------------------------------------------------------------

REPRESENTATIVE = {  # of each class, as the paper's Table III behaves
    NatClass.PERMISSIVE: "EIM/EIF",
    NatClass.ORDINARY: "EIM/ADF",
    NatClass.RESTRICTIVE: "APDM/APDF",
}
TABLE_III = {  # initiator, responder: rule predicts, traversal achieves (direct?)
    ("permissive", "permissive"): (True, True),
    ("permissive", "ordinary"): (True, True),
    ("permissive", "restrictive"): (True, True),
    ("ordinary", "permissive"): (True, True),
    ("ordinary", "ordinary"): (True, True),
    ("ordinary", "restrictive"): (False, True),
    ("restrictive", "permissive"): (True, True),
    ("restrictive", "ordinary"): (False, True),
    ("restrictive", "restrictive"): (False, False),
}


@pytest.mark.parametrize(("initiator", "responder"), list(product(NatClass, NatClass)))
def test_table_iii(initiator: NatClass, responder: NatClass) -> None:
    a, b = report_of(REPRESENTATIVE[initiator]), report_of(REPRESENTATIVE[responder])
    assert (nat_class(a), nat_class(b)) == (initiator, responder)
    predicted, achieved = TABLE_III[initiator.value, responder.value]
    assert paper_rule(initiator, responder) is predicted
    assert (predict(a, b) is Reach.DIRECT) is achieved


def test_the_papers_rule_mispredicts_two_of_nine_and_ours_none() -> None:
    pairs = list(product(NatClass, NatClass))
    truth = {pair: TABLE_III[pair[0].value, pair[1].value][1] for pair in pairs}
    ours = {
        pair: predict(report_of(REPRESENTATIVE[pair[0]]), report_of(REPRESENTATIVE[pair[1]])) is Reach.DIRECT
        for pair in pairs
    }
    assert sum(paper_rule(*pair) is not truth[pair] for pair in pairs) == 2
    assert ours == truth


# --- beyond mapping and filtering -------------------------------------------------------------------------------------


def test_two_stateful_ipv6_hosts_meet_whatever_their_ipv4() -> None:
    a = report_of("APDM/APDF", reflexive_v4=HERE, reflexive_v6=HERE_V6)
    b = report_of("APDM/APDF", reflexive_v4=THERE, reflexive_v6=THERE_V6)
    assert predict(a, b) is Reach.DIRECT
    assert ways(a, b)[0] is Way.IPV6


def test_no_common_family_is_none() -> None:
    a, b = report_of("EIM/EIF", reflexive_v6=HERE_V6), report_of("EIM/EIF", reflexive_v4=THERE)
    assert predict(a, b) is Reach.NONE
    assert ways(a, b) == ()


@pytest.mark.parametrize(
    ("hairpin", "expected", "means"),
    [
        (True, Reach.DIRECT, (Way.LAN, Way.HAIRPIN)),
        (None, Reach.UNKNOWN, (Way.LAN, Way.HAIRPIN)),
        (False, Reach.UNKNOWN, (Way.LAN,)),
    ],
)
def test_behind_one_address_the_lan_goes_first(hairpin: bool | None, expected: Reach, means: tuple[Way, ...]) -> None:
    a = report_of("EIM/APDF", reflexive_v4=HERE, hairpin=hairpin)
    b = report_of("EIM/APDF", reflexive_v4=HERE._replace(port=4001), hairpin=hairpin)
    assert predict(a, b) is expected
    assert ways(a, b) == means


def test_a_hairpin_obeys_the_nat_like_any_path() -> None:
    a = report_of("APDM/APDF", reflexive_v4=HERE, hairpin=True)
    assert predict(a, a) is Reach.UNKNOWN


def test_a_sequential_allocator_is_guessed_before_its_reflexive_port() -> None:
    a = report_of("APDM/EIF", allocator=Allocator.SEQUENTIAL, port_step=1, reflexive_v4=HERE)
    b = report_of("EIM/APDF", reflexive_v4=THERE)
    assert ways(a, b) == (Way.PREDICTED_PORT, Way.REFLEXIVE)


def test_the_next_ports_of_a_sequential_allocator() -> None:
    report = report_of("APDM/APDF", allocator=Allocator.SEQUENTIAL, port_step=2)
    assert predicted_addresses(report, HERE, count=2) == (HERE._replace(port=4002), HERE._replace(port=4004))
    assert predicted_addresses(report, HERE._replace(port=65533)) == (HERE._replace(port=65535),)
    assert predicted_addresses(report_of("EIM/APDF", allocator=Allocator.SEQUENTIAL, port_step=2), HERE) == ()
    assert predicted_addresses(report_of("APDM/APDF"), HERE) == ()


def test_a_random_allocator_on_one_side_is_met_by_birthday() -> None:
    moving = report_of("APDM/APDF", allocator=Allocator.RANDOM, reflexive_v4=HERE)
    steady = report_of("EIM/APDF", reflexive_v4=THERE)
    assert predict(moving, steady) is Reach.NONE
    assert ways(moving, steady) == (Way.BIRTHDAY,)
    assert ways(moving, report_of("APDM/APDF", allocator=Allocator.RANDOM, reflexive_v4=THERE)) == ()


def test_a_claimed_port_mapping_is_a_hope_not_a_prediction() -> None:
    a = report_of("APDM/APDF", reflexive_v4=HERE, port_mapping=PortMappingProtocol.PCP)
    b = report_of("APDM/APDF", reflexive_v4=THERE)
    assert predict(a, b) is Reach.NONE
    assert ways(a, b) == (Way.PORT_MAPPING,)


@pytest.mark.parametrize("scopes", list(product(FilterScope, FilterScope)))
def test_longer_play_changes_nothing(scopes: tuple[FilterScope, FilterScope]) -> None:
    for mapping_a, filtering_a, mapping_b, filtering_b in product(Mapping, Filtering, Mapping, Filtering):
        a, b = Nat(mapping_a, filtering_a, scopes[0]), Nat(mapping_b, filtering_b, scopes[1])
        assert punch(a, b, rounds=8) is punch(a, b)


def test_scopes_may_differ_between_the_two() -> None:
    per_mapping = Nat(Mapping.ADM, Filtering.ADF, FilterScope.MAPPING)
    per_endpoint = Nat(Mapping.ADM, Filtering.ADF, FilterScope.ENDPOINT)
    assert punch(per_mapping, per_mapping) is Reach.NONE
    assert punch(per_endpoint, per_endpoint) is Reach.DIRECT
    assert punch(per_mapping, per_endpoint) is Reach.DIRECT
