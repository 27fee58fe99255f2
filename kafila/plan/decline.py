"""Saying no usefully: who is too small, by how many bytes, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kafila.plan.admit import Overload, overloads
from kafila.plan.outcome import Allocation, Declined, Objective
from kafila.plan.problem import Problem, admits
from kafila.plan.words import counted, listed, size

_QUANTIZED = {8: 17, 4: 9}
"""Bits of a quantized checkpoint -> 32nds of the 16-bit size: groups of 64 weights each carry a 16-bit scale and bias,
so 8.5 and 4.5 bits a weight."""

_CONTEXT_STEP = 256
"""Contexts are proposed in whole multiples of this."""

_GB = 10**9


def decline(problem: Problem) -> Declined:
    """Why ``problem``, which :func:`admits` refuses, has no plan."""
    blocks = problem.manifest.blocks
    if len(problem.serving) > blocks:
        message = (
            f"{len(problem.members)} members cannot each hold a part of {problem.manifest.name}: it has "
            f"{counted(blocks, 'block')}"
        )
        return Declined(
            problem.members[_smallest(problem)].name, 0, message, (f"at most {blocks} members in the ring",)
        )
    counts = problem.settled()
    if counts is not None:
        return _overloaded(problem, overloads(counts, 0, problem.rooms, problem.needs))
    small = [place for place in problem.serving if problem.limits[place].plain < 1]
    if small:
        return _too_small_for_one(problem, min(small, key=lambda place: problem.rooms[place]))
    roomiest = max(problem.heads, key=lambda place: problem.rooms[place])
    if problem.limits[roomiest].head < 1:
        return _too_small_for_the_head(problem, roomiest)
    return _too_small_together(problem)


def _overloaded(problem: Problem, over: Sequence[Overload]) -> Declined:
    """A division that was settled beforehand does not fit: the worst is named, the others listed."""
    worst = over[0]
    name, room = problem.members[worst.place].name, problem.rooms[worst.place]
    need = problem.needs[worst.place].of(worst.blocks, is_head=worst.is_head)
    share = counted(worst.blocks, "block") + (" and the head" if worst.is_head else "")
    message = (
        f"{name} cannot hold its share of {_served(problem)}: {share} need {size(need)}, it has room for {size(room)}, "
        f"{size(worst.shortfall)} too little"
    )
    if len(over) > 1:
        message += f" (too small as well: {listed([problem.members[other.place].name for other in over[1:]])})"
    return _because(problem, worst.place, worst.shortfall, message)


def _too_small_for_one(problem: Problem, place: int) -> Declined:
    name, room, need = problem.members[place].name, problem.rooms[place], problem.needs[place].of(1, is_head=False)
    message = (
        f"{name} cannot hold even one block of {_served(problem)}: a block needs {size(need)}, it has room for "
        f"{size(room)}, {size(need - room)} too little"
    )
    return _because(problem, place, need - room, message)


def _too_small_for_the_head(problem: Problem, place: int) -> Declined:
    name, room, need = problem.members[place].name, problem.rooms[place], problem.needs[place].of(1, is_head=True)
    who = "the roomiest member" if len(problem.heads) > 1 else "which opened the session"
    message = (
        f"{name}, {who}, cannot hold the head of {_served(problem)}: with one block it needs {size(need)}, "
        f"there is room for {size(room)}, {size(need - room)} too little"
    )
    return _because(problem, place, need - room, message)


def _too_small_together(problem: Problem) -> Declined:
    limits, blocks = problem.limits, problem.manifest.blocks
    plain = sum(limit.plain for limit in limits)
    heads = [limits[place] for place in problem.heads if limits[place].head]
    most = max(plain - head.plain + head.head for head in heads)
    shortfall = (blocks - most) * min(need.per_block for need in problem.needs)
    least = _smallest(problem)
    message = (
        f"{_served(problem)} does not fit: with the head, {counted(len(limits), 'member')} can hold {most} of its "
        f"{counted(blocks, 'block')}, {size(shortfall)} too little; "
        f"{problem.members[least].name} has the least room, {size(problem.rooms[least])}"
    )
    return _because(problem, least, shortfall, message)


def _served(problem: Problem) -> str:
    return f"{problem.manifest.name} at {problem.workload.concurrency} x {problem.workload.context:,} tokens"


def _smallest(problem: Problem) -> int:
    return min(range(len(problem.members)), key=lambda place: problem.rooms[place])


def _because(problem: Problem, who: int, shortfall: int, message: str) -> Declined:
    """The refusal with every remedy that is enough on its own, tried by the rule that refused."""
    tried = (
        _another_rule(problem),
        _without(problem, who),
        _smaller_context(problem),
        _fewer_requests(problem),
        _one_more(problem),
        _quantized(problem),
    )
    remedies = tuple(remedy for remedy in tried if remedy is not None)
    return Declined(problem.members[who].name, shortfall, message, remedies)


def _another_rule(problem: Problem) -> str | None:
    rule = problem.rule
    own = replace(rule, allocation=Allocation.KAFILA, objective=Objective.BOTTLENECK, shares=None)
    if rule.allocation is not Allocation.KAFILA and admits(replace(problem, rule=own)):
        return "Kafila's own division, which fits"
    fastest = replace(own, objective=Objective.THROUGHPUT)
    if problem.objective is Objective.BOTTLENECK and admits(replace(problem, rule=fastest)):
        return "the throughput objective, which may leave members out of the ring"
    return None


def _without(problem: Problem, who: int) -> str | None:
    """The same ring with one member fewer; the anchor cannot be left out of the session it opened."""
    if who == 0 or problem.rule.shares is not None:
        return None
    rest = tuple(member for place, member in enumerate(problem.members) if place != who)
    return f"a ring without {problem.members[who].name}" if admits(replace(problem, members=rest)) else None


def _smaller_context(problem: Problem) -> str | None:
    def fits(steps: int) -> bool:
        return admits(replace(problem, workload=replace(problem.workload, context=steps * _CONTEXT_STEP)))

    asked = problem.workload.context
    most = _CONTEXT_STEP * _largest(fits, (asked - 1) // _CONTEXT_STEP)
    return f"a context of {most:,} tokens instead of {asked:,}" if most else None


def _fewer_requests(problem: Problem) -> str | None:
    def fits(requests: int) -> bool:
        return admits(replace(problem, workload=replace(problem.workload, concurrency=requests)))

    asked = problem.workload.concurrency
    most = _largest(fits, asked - 1)
    return f"{counted(most, 'concurrent request')} instead of {asked}" if most else None


def _one_more(problem: Problem) -> str | None:
    """One more member, in whole gigabytes of memory, up to one that could hold the model twice."""
    like = problem.members[0]

    def lacking(gigabytes: int) -> bool:
        more = replace(like, name="one more", memory_bytes=gigabytes * _GB, memory_is_exact=False)
        return not admits(replace(problem, members=(*problem.members, more)))

    most = 2 * problem.needs[0].total // _GB + 1
    too_small = _largest(lacking, most)
    return f"one more member with {too_small + 1:,} GB of memory" if too_small < most else None


def _quantized(problem: Problem) -> str | None:
    manifest = problem.manifest
    for bits, parts in _QUANTIZED.items():
        block_bytes, head_bytes = manifest.block_bytes * parts // 32, manifest.head_bytes * parts // 32
        smaller = replace(manifest, block_bytes=block_bytes, head_bytes=head_bytes)
        # What the members reported is of the weights as they are.
        members = tuple(replace(one, block_memory_bytes=None, head_memory_bytes=None) for one in problem.members)
        if admits(replace(problem, manifest=smaller, members=members)):
            return f"a checkpoint quantized to {bits} bits"
    return None


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that holds, 0 if 1 does not; once it fails ``holds`` must stay false."""
    if most < 1 or not holds(1):
        return 0
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
