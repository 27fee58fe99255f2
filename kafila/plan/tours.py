"""The cheapest cycle through all members, for symmetric integer weights and with member 0 first.

To 9 members every order is tried; to 16 Held and Karp's dynamic programme is exact; beyond that 2-opt and or-opt
improve a nearest-neighbour tour, and a 1-tree bound says how far from the cheapest the result can be at most. Among
equally cheap cycles the exact searches return the lexicographically smallest, so that an order never depends on
chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from operator import add
from typing import NamedTuple

Weights = Sequence[Sequence[int]]

EXHAUSTIVE_LIMIT = 9
"""8!/2 = 20,160 cycles: tens of milliseconds, and nothing to trust but the loop."""
EXACT_LIMIT = 16
"""Held-Karp at 16 is 2^15 subsets by 15 members: under a second. Every further member doubles that."""
_ASCENT_STEPS = 150
_PATIENCE = 6


class Tour(NamedTuple):
    """A cycle, member 0 first, and the most by which it can exceed the cheapest one."""

    order: tuple[int, ...]
    excess: int


def cheapest_cycle(weights: Weights) -> Tour:
    """The cheapest cycle through ``len(weights)`` members, by the method its size allows."""
    size = len(weights)
    if size <= 3:
        return Tour(tuple(range(size)), 0)
    if size <= EXHAUSTIVE_LIMIT:
        return Tour(exhaustive(weights), 0)
    if size <= EXACT_LIMIT:
        return Tour(held_karp(weights), 0)
    order = improved(weights)
    weight = cycle_weight(order, weights)
    return Tour(order, max(0, weight - lower_bound(weights, weight)))


def cycle_weight(order: Sequence[int], weights: Weights) -> int:
    """The sum round the cycle."""
    return sum(weights[a][b] for a, b in pairwise(order)) + weights[order[-1]][order[0]]


def exhaustive(weights: Weights) -> tuple[int, ...]:
    """The cheapest cycle by trying all of them, once for the two directions."""
    best: tuple[int, ...] = tuple(range(len(weights)))
    best_weight = cycle_weight(best, weights)
    first = weights[0]
    for rest in permutations(range(1, len(weights))):
        if rest[0] > rest[-1]:
            continue
        total = first[rest[0]] + first[rest[-1]]
        for a, b in pairwise(rest):
            total += weights[a][b]
        if total < best_weight:
            best, best_weight = (0, *rest), total
    return best


def held_karp(weights: Weights) -> tuple[int, ...]:
    """The cheapest cycle by dynamic programming over (visited subset, last member): O(2^m m^2).

    ``paths[subset][last]`` is the cheapest path from member 0 through ``subset`` (a bit mask over members 1..m-1)
    to ``last``. Weights are symmetric, so a path backwards from member 0 is the rest of a cycle.
    """
    count = len(weights) - 1
    never = 1 + sum(map(max, weights))
    paths = [[never] * count for _ in range(1 << count)]
    onward = [list(weights[member + 1][1:]) for member in range(count)]
    for member in range(count):
        paths[1 << member][member] = weights[0][member + 1]
    for subset in range(1, 1 << count):
        if subset & (subset - 1):
            row = paths[subset]
            for member in range(count):
                if subset >> member & 1:
                    row[member] = min(map(add, paths[subset ^ 1 << member], onward[member]))
    return _smallest_first(weights, paths, count)


def _smallest_first(weights: Weights, paths: list[list[int]], count: int) -> tuple[int, ...]:
    """Walk a cheapest cycle from member 0, the smallest possible member at every step."""
    subset = (1 << count) - 1
    left = min(map(add, paths[subset], weights[0][1:]))
    order = [0]
    while subset:
        step = next(
            member
            for member in range(count)
            if subset >> member & 1 and weights[order[-1]][member + 1] + paths[subset][member] == left
        )
        left -= weights[order[-1]][step + 1]
        subset ^= 1 << step
        order.append(step + 1)
    return tuple(order)


def improved(weights: Weights) -> tuple[int, ...]:
    """A nearest-neighbour tour improved by 2-opt and or-opt until neither finds anything."""
    order = _nearest_neighbour(weights)
    while _two_opt(order, weights) or _or_opt(order, weights):
        pass
    start = order.index(0)
    forward = (*order[start:], *order[:start])
    backward = (0, *reversed(forward[1:]))
    return min(forward, backward)


def _nearest_neighbour(weights: Weights) -> list[int]:
    order = [0]
    left = set(range(1, len(weights)))
    while left:
        step = min(left, key=lambda member: (weights[order[-1]][member], member))
        left.remove(step)
        order.append(step)
    return order


def _two_opt(order: list[int], weights: Weights) -> bool:
    """Reverse stretches while that is cheaper; whether anything changed."""
    size = len(order)
    changed = False
    for i in range(size - 1):
        for j in range(i + 1, size):
            before, a, b, after = order[i - 1], order[i], order[j], order[(j + 1) % size]
            if before == b or after == a:
                continue
            if weights[before][b] + weights[a][after] < weights[before][a] + weights[b][after]:
                order[i : j + 1] = order[i : j + 1][::-1]
                changed = True
    return changed


def _or_opt(order: list[int], weights: Weights) -> bool:
    """Move one member to where it is cheapest; whether a move was found."""
    for member in sorted(order):
        rest = [other for other in order if other != member]
        size = len(rest)

        def detour(place: int, rest: list[int] = rest, member: int = member) -> int:
            a, b = rest[place - 1], rest[place]
            return weights[a][member] + weights[member][b] - weights[a][b]

        now = order.index(member) % size
        place = min(range(size), key=lambda place: (detour(place), place))
        if detour(place) < detour(now):
            order[:] = [*rest[:place], member, *rest[place:]]
            return True
    return False


def lower_bound(weights: Weights, known: int) -> int:
    """A weight no cycle can be below: the best 1-tree over Held and Karp's node penalties; ``known`` is some cycle's.

    A cycle is a 1-tree (a tree on members 1.. and two edges at member 0) in which everybody has two edges, so the
    cheapest 1-tree is no dearer. A penalty for every edge at a member shifts all cycles by twice the penalties' sum,
    and that stays zero: degrees average two, so what some members gain others lose. Steps are Polyak's, halved
    whenever a few of them bring nothing.
    """
    penalties = [0] * len(weights)
    best = stale = halvings = 0
    for _ in range(_ASCENT_STEPS):
        total, degrees = _one_tree(weights, penalties)
        stale = 0 if total > best else stale + 1
        best = max(best, total)
        if stale == _PATIENCE:
            stale, halvings = 0, halvings + 1
        excess = sum((degree - 2) ** 2 for degree in degrees)
        if not excess or best >= known:
            break
        step = max(1, 2 * (known - total) // (excess << halvings))
        penalties = [penalty + step * (degree - 2) for penalty, degree in zip(penalties, degrees, strict=True)]
    return best


def _one_tree(weights: Weights, penalties: Sequence[int]) -> tuple[int, list[int]]:
    """The cheapest 1-tree under penalised weights, and every member's degree in it (Prim's algorithm)."""
    size = len(weights)
    degrees = [0] * size
    total = 0
    reach = {member: (weights[1][member] + penalties[1] + penalties[member], 1) for member in range(2, size)}
    while reach:
        member = min(reach, key=lambda candidate: (reach[candidate][0], candidate))
        cost, source = reach.pop(member)
        total += cost
        degrees[member] += 1
        degrees[source] += 1
        for other, (known, _) in reach.items():
            through = weights[member][other] + penalties[member] + penalties[other]
            if through < known:
                reach[other] = (through, member)
    spokes = sorted((weights[0][member] + penalties[0] + penalties[member], member) for member in range(1, size))
    for cost, member in spokes[:2]:
        total += cost
        degrees[member] += 1
        degrees[0] += 1
    return total, degrees
