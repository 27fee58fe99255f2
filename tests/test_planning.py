"""What the members' reports become for the planner."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kafila.members import reachable
from kafila.nat.candidates import Candidate, CandidateKind
from kafila.nat.predict import Reach, predict
from kafila.nat.report import Filtering, FilterScope, Mapping, NatReport, nat_class
from kafila.plan import Allocation, KnownEdge, Objective, Plan
from kafila.planning import Wishes, class_of, known_edges, make_plan
from kafila.ring.agreement import EDGES, KNOWN, PARTS, MemberInfo, ModelOffer
from kafila.types import Address, Capability, ModelManifest, NatClass, NodeId, PathKind
from tests.test_members import member

CORNERS = [
    NatReport(mapping=mapping, filtering=filtering, scope=FilterScope.MAPPING)
    for mapping, filtering in product(Mapping, Filtering)
]


def with_report(n: int, report: NatReport | None) -> MemberInfo:
    info = member(f"192.168.{n}.7", None).moved(reachable([], report, 0.02))
    return replace(info, node_id=NodeId(bytes([n] * 8)))


@pytest.mark.parametrize("report", CORNERS)
def test_a_members_class_is_its_reports(report: NatReport) -> None:
    assert class_of(with_report(1, report)) is nat_class(report)


def test_a_member_without_a_report_counts_as_ordinary() -> None:
    assert class_of(with_report(1, None)) is NatClass.ORDINARY
    assert class_of(replace(with_report(1, None), nat_report="nonsense")) is NatClass.ORDINARY


@pytest.mark.parametrize(("a", "b"), list(product(CORNERS, CORNERS)))
def test_an_edge_is_what_both_directions_can_have(a: NatReport, b: NatReport) -> None:
    first = replace(a, reflexive_v4=Address("11.0.0.1", 4000))
    second = replace(b, reflexive_v4=Address("11.0.0.2", 4000))
    edges = known_edges([with_report(1, first), with_report(2, second)])
    direct = predict(first, second) in {Reach.DIRECT, Reach.ASYMMETRIC}
    assert edges == {(0, 1): KnownEdge(PathKind.DIRECT if direct else PathKind.RELAYED)}


def test_what_reports_leave_open_is_left_to_the_classes() -> None:
    unknown = NatReport(reflexive_v4=Address("11.0.0.1", 4000))
    other = NatReport(reflexive_v4=Address("11.0.0.2", 4000))
    assert known_edges([with_report(1, unknown), with_report(2, other), with_report(3, None)]) == {}


def test_members_on_one_network_are_direct_whatever_their_nat() -> None:
    hopeless = NatReport(
        mapping=Mapping.APDM,
        filtering=Filtering.APDF,
        scope=FilterScope.MAPPING,
        reflexive_v4=Address("11.0.0.1", 4000),
    )
    edges = known_edges([with_report(n, hopeless) for n in range(3)])
    assert edges == {pair: KnownEdge(PathKind.DIRECT) for pair in [(0, 1), (0, 2), (1, 2)]}


@pytest.mark.parametrize(
    ("hairpin", "networks", "kind"),
    [
        ((False, False), ("10.1.0.7", "10.2.0.7"), PathKind.RELAYED),
        ((None, False), ("10.1.0.7", "10.2.0.7"), PathKind.RELAYED),
        ((True, True), ("10.1.0.7", "10.2.0.7"), PathKind.DIRECT),
        ((None, None), ("10.1.0.7", "10.2.0.7"), PathKind.DIRECT),
        ((False, False), ("10.1.0.7", "10.1.0.8"), PathKind.DIRECT),
        ((False, False), ("10.1.0.7", "10.1.0.7"), PathKind.RELAYED),
    ],
    ids=["no hairpin", "no hairpin seen by one", "hairpin", "not known", "one home", "two homes alike"],
)
def test_two_homes_behind_one_carrier_meet_where_it_hairpins(
    hairpin: tuple[bool | None, bool | None], networks: tuple[str, str], kind: PathKind
) -> None:
    seen = Address("11.0.0.1", 4000)
    infos = []
    for n in range(2):
        report = NatReport(
            mapping=Mapping.EIM,
            filtering=Filtering.EIF,
            scope=FilterScope.MAPPING,
            hairpin=hairpin[n],
            reflexive_v4=seen,
        )
        candidates = [
            Candidate(Address(networks[n], 4000), CandidateKind.HOST),
            Candidate(seen, CandidateKind.REFLEXIVE),
        ]
        info = with_report(n, report)
        infos.append(info.moved(reachable(candidates, report, 0.02)))
    assert known_edges(infos) == {(0, 1): KnownEdge(kind)}


def device(bandwidth: float, flops: float) -> Capability:
    return Capability("device", 10**9, bandwidth, 0.0, flops)


@pytest.mark.parametrize(("flops", "names"), [(1e15, ("m1",)), (1.1e9, ("m1", "m2"))])
def test_throughput_for_several_knows_that_answers_share_batches(flops: float, names: tuple[str, ...]) -> None:
    infos = [replace(with_report(n, None), name=f"m{n}", rendezvous_rtt_s=0.01) for n in (1, 2)]
    capabilities = [device(1e9, flops), device(0.5e9, flops)]
    manifest = ModelManifest("model", 10, 1_000_000, 500_000, 400_000, 10, 100, 4096)
    offer = ModelOffer(manifest, "folder", "{}", "bfloat16", 100, 4)
    plan = make_plan(list(zip(infos, capabilities, strict=True)), offer, Wishes(Objective.THROUGHPUT, users=4))
    assert isinstance(plan, Plan)
    # One device reads its weights once for all four where it computes fast enough; else two devices share the work.
    assert set(plan.names) == set(names)


OFFER = ModelOffer(
    ModelManifest("model", 10, 1_000_000, 500_000, 400_000, 10, 100, 4096), "folder", "{}", "bfloat16", 100, 4
)


def divided(wishes: Wishes, *knows: tuple[str, ...], offer: ModelOffer = OFFER) -> Plan:
    """A plan for members alike but for what they know."""
    infos = [
        replace(with_report(n, None), name=f"m{n}", rendezvous_rtt_s=0.01, knows=known)
        for n, known in enumerate(knows, 1)
    ]
    plan = make_plan([(info, device(1e9, 1e12)) for info in infos], offer, wishes)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("wishes", [Wishes(), Wishes(allocation=Allocation.UNIFORM), Wishes(shares=(3, 7))])
def test_the_last_member_scores_a_part_of_the_vocabulary_of_any_division(wishes: Wishes) -> None:
    plan = divided(wishes, KNOWN, KNOWN)
    whole = divided(replace(wishes, divide_head=False), KNOWN, KNOWN)
    assert (plan.scored_percent, whole.scored_percent) == (50, 0)
    assert plan.stages[-1].memory_used_bytes == whole.stages[-1].memory_used_bytes + 250_000
    assert (plan.counts, plan.alternatives) == (whole.counts, whole.alternatives)


@pytest.mark.parametrize("knows", [(KNOWN, (EDGES, PARTS)), ((), KNOWN), (KNOWN, (), KNOWN)])
def test_with_a_member_that_does_not_know_scores_the_head_scores_all(knows: tuple[tuple[str, ...], ...]) -> None:
    assert divided(Wishes(), *knows).scored_percent == 0


def test_a_vocabulary_of_a_few_rows_is_the_heads() -> None:
    shape = (
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, '
        '"intermediate_size": 8, "vocab_size": %d}'
    )
    found = [divided(Wishes(), KNOWN, KNOWN, offer=replace(OFFER, config=shape % rows)) for rows in (100, 320)]
    assert [plan.scored_percent for plan in found] == [0, 50]
