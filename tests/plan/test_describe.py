"""What a person is shown."""

from __future__ import annotations

from kafila.plan import KnownEdge, Member, Plan, Workload, describe, plan_session, remark
from kafila.types import NatClass, PathKind
from tests.plan.oracles import MODEL, member


def planned(members: list[Member], **options: object) -> Plan:
    outcome = plan_session(members, MODEL, Workload(1024, 2), anchor=0, **options)  # type: ignore[arg-type]  # options are plan_session's own
    assert isinstance(outcome, Plan)
    return outcome


FAST_AND_SLOW = [member("tower", bandwidth=1e10, rtt_s=0.01), member("laptop", bandwidth=1e9, rtt_s=0.03)]


def test_the_table_says_who_holds_what_and_what_it_yields() -> None:
    text = describe(planned(FAST_AND_SLOW, edges={(0, 1): KnownEdge(PathKind.RELAYED, 0.04)}))
    tower = next(line for line in text.splitlines() if line.startswith("tower (head)"))
    assert "0-6 (7)" in tower
    assert "9 MB / 95 MB" in tower
    assert "relayed 20.0 ms" in tower
    assert "estimate" not in tower
    assert "Predicted 23.9 tokens/s for one user, 47.8 tokens/s for 2 users." in text


def test_an_edge_that_nobody_measured_is_called_an_estimate() -> None:
    assert "(estimate)" in describe(planned(FAST_AND_SLOW))


def test_a_ring_of_one_has_no_edge() -> None:
    text = describe(planned([member("only")]))
    assert "only (head)" in text
    assert "direct" not in text


def test_both_objectives_say_in_one_line_that_the_fullest_ring_is_not_the_fastest() -> None:
    for objective in ("bottleneck", "throughput"):
        said = remark(planned(FAST_AND_SLOW, objective=objective, users=1))
        assert said is not None
        assert "the fullest ring is not the fastest" in said.lower()
        assert "\n" not in said


def test_baselines_hear_of_the_fastest_ring_too() -> None:
    said = remark(planned(FAST_AND_SLOW, allocation="uniform"))
    assert said is not None
    assert "throughput objective" in said


def test_where_nothing_is_faster_it_says_so() -> None:
    for objective in ("bottleneck", "throughput"):
        said = remark(planned([member("only")], objective=objective))
        assert said is not None
        assert "much faster" in said or "about as much" in said


def test_members_left_out_are_named() -> None:
    assert "Not in the ring: laptop." in describe(planned(FAST_AND_SLOW, objective="throughput", users=1))


def test_where_the_full_ring_does_not_fit_it_says_so() -> None:
    said = remark(planned([member("a"), member("tiny", memory_bytes=1)], objective="throughput"))
    assert said == "A ring of all members, the bottleneck objective, does not fit."


def test_missing_measurements_are_said_and_not_guessed() -> None:
    by_memory = describe(planned([member("a", bandwidth=None), member("b")]))
    assert "in proportion to memory" in by_memory
    assert "?" in by_memory
    by_flops = describe(planned([member("a", bandwidth=None, flops=1e12), member("b", flops=1e12)]))
    assert "arithmetic throughput" in by_flops
    unordered = describe(planned([member("a", rtt_s=None, nat=NatClass.RESTRICTIVE), member("b")]))
    assert "fewest relayed edges" in unordered
    assert "relayed ?" in unordered
    assert "tokens/s" not in unordered
    assert remark(planned([member("a", bandwidth=None)])) is None


def test_the_uncertainty_of_a_large_ring_is_said() -> None:
    plan = planned([member("a")])
    shown = describe(Plan.from_json(plan.to_json().replace('"order_excess_s":0.0', '"order_excess_s":0.0042')))
    assert "at most 4.2 ms" in shown
