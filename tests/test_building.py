"""What a plan means at each member: its duty, and its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafila.building import Build, make_build
from kafila.mesh import Mesh
from kafila.plan import Plan
from kafila.planning import Wishes, in_ring, make_plan
from kafila.ring.agreement import EDGES, KNOWN, PARTS, SCORES, Assign, MemberInfo, ModelOffer
from kafila.sharing import Sharing
from kafila.trace import Silence
from kafila.types import Capability, ModelManifest, NodeId
from tests.test_members import member

CONFIG = (
    '{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 6, '
    '"intermediate_size": 8, "vocab_size": 320}'
)
MANIFEST = ModelManifest("model", 6, 1_000_000, 500_000, 400_000, 10, 100, 4096)
OFFER = ModelOffer(MANIFEST, "folder", CONFIG, "bfloat16", 100, 4)


def infos(count: int) -> list[MemberInfo]:
    return [
        replace(member("192.168.1.7", None), node_id=NodeId(bytes([n + 1] * 8)), name=f"m{n}", knows=KNOWN)
        for n in range(count)
    ]


def assignment(members: list[MemberInfo]) -> Assign:
    capability = Capability("device", 10**9, 1e9, 0.0, 1e12)
    known = [(info, capability) for info in members]
    plan = make_plan(known, OFFER, Wishes())
    assert isinstance(plan, Plan)
    return Assign(1, plan.to_json(), tuple(in_ring(plan, known)))


def built(me: MemberInfo, assign: Assign, mesh: Mesh, sharing: Sharing) -> Build:
    return make_build(
        me,
        OFFER,
        assign,
        mesh,
        Silence(),
        sharing,
        poke=lambda: None,
        on_broken=lambda text: None,
        on_coming=lambda coming: None,
    )


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> tuple[Mesh, Sharing]:
    """Nothing here is spoken to before links are opened."""
    return object.__new__(Mesh), object.__new__(Sharing)


def percents(members: list[MemberInfo], assign: Assign, around: tuple[Mesh, Sharing]) -> list[tuple[int, int]]:
    """By ring position: of the place, and of the duty."""
    found = []
    for info in assign.ring:
        build = built(info, assign, *around)
        assert build.duty is not None
        found.append((build.serving._place.scored_percent, build.duty.scored_percent))
    return found


@pytest.mark.parametrize(("count", "duties"), [(1, [0]), (2, [50, 50]), (3, [50, 0, 50])])
def test_head_and_last_member_hold_what_the_plan_divides(
    count: int, duties: list[int], around: tuple[Mesh, Sharing]
) -> None:
    members = infos(count)
    percent = 50 if count > 1 else 0
    assert percents(members, assignment(members), around) == [(percent, duty) for duty in duties]


@pytest.mark.parametrize("old", [0, 1, 2])
def test_where_a_member_does_not_know_scores_nothing_is_divided(old: int, around: tuple[Mesh, Sharing]) -> None:
    members = infos(3)
    whole = assignment(members)
    ring = list(whole.ring)
    ring[old] = replace(ring[old], knows=(EDGES, PARTS))
    assert percents(members, replace(whole, ring=tuple(ring)), around) == [(0, 0)] * 3


def cuts(assign: Assign, around: tuple[Mesh, Sharing]) -> set[bool]:
    """What the members make of it, whether only last rows come back."""
    return {built(info, assign, *around).serving._place.last_rows for info in assign.ring}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_only_last_rows_come_back_where_all_know_that(count: int, around: tuple[Mesh, Sharing]) -> None:
    whole = assignment(infos(count))
    assert cuts(whole, around) == {True}
    for old in range(count):
        ring = list(whole.ring)
        ring[old] = replace(ring[old], knows=(EDGES, PARTS, SCORES))
        assert cuts(replace(whole, ring=tuple(ring)), around) == {False}


def test_what_a_plan_leaves_of_a_members_room_may_be_used_for_prompts(around: tuple[Mesh, Sharing]) -> None:
    members = infos(3)
    assign = assignment(members)
    plan = Plan.from_json(assign.plan)
    for info, stage in zip(assign.ring, plan.stages, strict=True):
        duty = built(info, assign, *around).duty
        assert duty is not None
        assert duty.spare_bytes == stage.memory_room_bytes - stage.memory_used_bytes > 0
    full = tuple(replace(stage, memory_used_bytes=stage.memory_room_bytes + 1) for stage in plan.stages)
    crammed = replace(assign, plan=replace(plan, stages=full).to_json())
    duty = built(assign.ring[1], crammed, *around).duty
    assert duty is not None
    assert duty.spare_bytes == 0


def test_a_guest_has_no_duty(around: tuple[Mesh, Sharing]) -> None:
    members = infos(2)
    guest = replace(members[0], node_id=NodeId(b"a guest!"), name="guest")
    assert built(guest, assignment(members), *around).duty is None


def test_the_place_knows_the_vocabulary_where_the_configuration_says_it(around: tuple[Mesh, Sharing]) -> None:
    members = infos(2)
    assert built(members[0], assignment(members), *around).serving._place.vocab == 320
