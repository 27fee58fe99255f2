"""What fits in memory, to the byte."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kafila.plan import Workload
from kafila.plan.admit import Need, heads_that_fit, limits_of, need_of, overloads, room_of
from kafila.plan.cost import Limits
from tests.plan.oracles import MODEL, divisions, member

needs = st.builds(
    Need, blocks=st.integers(1, 7), per_block=st.integers(1, 40), head=st.integers(0, 60), workspace=st.integers(0, 30)
)


def test_a_block_brings_the_cache_of_every_request() -> None:
    need = need_of(MODEL, Workload(context=1000, concurrency=3))
    assert need.per_block == MODEL.block_bytes + 1000 * 3 * MODEL.kv_bytes_per_token_per_block
    assert need.head == MODEL.head_bytes
    assert need.of(4, is_head=True) == 4 * need.per_block + need.head
    assert need.total == need.of(MODEL.blocks, is_head=True)


def test_a_members_own_sizes_go_before_the_manifests() -> None:
    workload = Workload(context=1000, concurrency=3)
    padding = replace(member(), block_memory_bytes=3 * MODEL.block_bytes, head_memory_bytes=7, workspace_bytes=11)
    plain, padded = need_of(MODEL, workload, member()), need_of(MODEL, workload, padding)
    assert plain == need_of(MODEL, workload)
    assert padded == (MODEL.blocks, plain.per_block + 2 * MODEL.block_bytes, 7, 11)
    assert padded.of(0, is_head=False) == 11


def test_headroom_is_kept_unless_the_owner_said_how_much() -> None:
    assert room_of(member(memory_bytes=1000), 0.05) == 950
    assert room_of(member(memory_bytes=1000), 0) == 1000
    assert room_of(replace(member(memory_bytes=1000), memory_is_exact=True), 0.05) == 1000
    assert room_of(member(memory_bytes=-5), 0.05) == 0


@given(st.integers(0, 400), needs)
def test_limits_are_the_most_that_fits(room: int, need: Need) -> None:
    limits = limits_of(room, need)
    for limit, is_head in ((limits.plain, False), (limits.head, True)):
        assert limit == max(
            (count for count in range(1, need.blocks + 1) if need.of(count, is_head=is_head) <= room), default=0
        )


def test_a_model_of_no_size_fits_anywhere() -> None:
    assert limits_of(0, Need(blocks=4, per_block=0, head=0)) == (4, 4)
    assert limits_of(0, Need(blocks=4, per_block=0, head=1)) == (4, 0)
    assert limits_of(0, Need(blocks=4, per_block=0, head=0, workspace=1)) == (0, 0)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=4), needs, st.data())
def test_overloads_are_those_who_lack_room_worst_first(rooms: list[int], need: Need, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=len(rooms), max_size=len(rooms)))
    over = overloads(counts, 0, rooms, [need] * len(rooms))
    lacking = {
        place: need.of(count, is_head=place == 0) - room
        for place, (count, room) in enumerate(zip(counts, rooms, strict=True))
    }
    assert {one.place: one.shortfall for one in over} == {place: by for place, by in lacking.items() if by > 0}
    assert [one.shortfall for one in over] == sorted((one.shortfall for one in over), reverse=True)


def test_a_member_filled_to_the_byte_is_not_overloaded() -> None:
    need = Need(blocks=4, per_block=10, head=5)
    assert overloads([2, 2], 0, [25, 20], [need, need]) == []
    assert [one.shortfall for one in overloads([2, 2], 0, [24, 19], [need, need])] == [1, 1]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
    needs,
    st.sampled_from(["all", "anchor", "none"]),
)
def test_a_head_fits_exactly_where_some_division_does(raw: list[tuple[int, int]], need: Need, who: str) -> None:
    limits = [Limits(plain, min(plain, head)) for plain, head in raw]
    serving = {"all": range(len(limits)), "anchor": [0], "none": []}[who]

    def fits(counts: tuple[int, ...], head: int) -> bool:
        return counts[head] > 0 and all(
            (count or place not in serving) and count <= (limit.head if place == head else limit.plain)
            for place, (count, limit) in enumerate(zip(counts, limits, strict=True))
        )

    # Parts may be empty: cut a chain with one extra block in every part and take that block away again.
    spread = [tuple(part - 1 for part in parts) for parts in divisions(need.blocks + len(limits), len(limits))]
    expected = [head for head in range(len(limits)) if any(fits(counts, head) for counts in spread)]
    assert heads_that_fit(limits, need.blocks, serving) == expected
