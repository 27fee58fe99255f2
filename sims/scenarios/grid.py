"""Every pair of NAT classes, in both filter scopes: what is predicted, and what the deployed engine then achieves.

Two members of each pair are registered at one rendezvous and link; all pairs of a row share the virtual network, in
which nothing but the rendezvous is common to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product

import trio

from kafila.nat.predict import predict
from sims.filtering import Filtering
from sims.nat import FilterScope, Mapping
from sims.scenarios.link import Link
from sims.scenarios.scenario import Outcome, Scenario, Target, expect
from sims.scenarios.world import RENDEZVOUS_RTT_S, World
from sims.topology import Nat, VirtualNetwork

CLASSES = {f"{m.name}/{f.name}": (m, f) for m, f in product(Mapping, Filtering)}
WATCH_S = 5.0
"""How long a pair has to become what it can be."""
DIRECT_MS = Target(300, 700)
"""Relay to direct where direct is predicted."""
FIRST_BYTE_RTTS = Target(2, 2)
"""In round trips to the rendezvous."""


@cache
def truth() -> dict[str, dict[str, dict[str, str]]]:
    """The brute-forced outcome by scope, row and column."""
    loaded = json.loads(files("sims").joinpath("data/pair_matrix.json").read_text())
    return {scope.value: loaded[scope.value] for scope in FilterScope}


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of classes, tried."""

    row: str
    column: str
    predicted: str
    achieved: str
    first_byte_s: float
    """Until the first application byte has arrived."""
    both_ways_s: float
    """Until one has arrived at either end."""
    direct_s: float | None
    """Until every direction that is direct was so; None where none is."""


def nat_of_class(net: VirtualNetwork, kind: str, scope: FilterScope) -> Nat:
    """A NAT of one of the nine classes, ports preserved where they are free."""
    mapping, filtering = CLASSES[kind]
    return net.nat(mapping=mapping, filtering=filtering, scope=scope)


def _predicted(link: Link) -> str:
    """What the deployed predictor makes of both members' surveys, before they have sent each other a packet."""
    ours, theirs = (me.reach.sight.report for me, _ in link.ends)
    return "no report" if ours is None or theirs is None else predict(ours, theirs).value


async def try_cells(net: VirtualNetwork, cells: Iterable[tuple[str, str]], scope: FilterScope) -> list[Cell]:
    """Link every pair of ``cells`` at once, and look after five seconds."""
    async with World(net).running() as world:
        links: list[tuple[str, str, Link]] = []
        for row, column in cells:
            one, other = (
                nat_of_class(net, kind, scope).machine(f"{side} of {row} {column}")
                for side, kind in (("a", row), ("b", column))
            )
            links.append((row, column, await world.pair(one, other)))
        predicted = {id(link): _predicted(link) for _, _, link in links}
        for _, _, link in links:
            link.open()
        firsts = [await link.up() for _, _, link in links]
        await trio.sleep(WATCH_S - max(map(max, firsts)))
        return [
            Cell(
                row,
                column,
                predicted[id(link)],
                link.reach(),
                min(first),
                max(first),
                _direct_s(link),
            )
            for (row, column, link), first in zip(links, firsts, strict=True)
        ]


def _direct_s(link: Link) -> float | None:
    return max((time_s for time_s in link.direct_after() if time_s is not None), default=None)


def _row(row: str, scope: FilterScope) -> Scenario:
    async def body(net: VirtualNetwork) -> Outcome:
        cells = await try_cells(net, ((row, column) for column in CLASSES), scope)
        for cell in cells:
            right = truth()[scope.value][row][cell.column]
            expect(cell.predicted == right, f"{row} to {cell.column}: predicted {cell.predicted}, truly {right}")
            expect(cell.achieved == right, f"{row} to {cell.column}: achieved {cell.achieved}, predicted {right}")
        direct = [cell for cell in cells if cell.achieved == "direct"]
        return Outcome(
            {
                "first_byte_rtts": [cell.first_byte_s / RENDEZVOUS_RTT_S for cell in cells],
                "direct_ms": [cell.direct_s * 1e3 for cell in direct if cell.direct_s is not None],
            }
        )

    return Scenario(
        f"grid-{scope.value}-{row.lower().replace('/', '-')}",
        f"{row} with each of the nine classes, filters kept per {scope.value}: as predicted, cell by cell",
        body,
        {"direct_ms": DIRECT_MS, "first_byte_rtts": FIRST_BYTE_RTTS},
    )


async def _relayed(net: VirtualNetwork) -> Outcome:
    """The pairs that nothing but the relay connects."""
    cells = await try_cells(
        net, (("EIM/APDF", "APDM/APDF"), ("ADM/ADF", "ADM/ADF"), ("APDM/APDF", "APDM/APDF")), FilterScope.MAPPING
    )
    expect(all(cell.achieved == "none" for cell in cells), "a pair that only the relay connects became direct")
    return Outcome(
        {
            "first_byte_rtts": [cell.first_byte_s / RENDEZVOUS_RTT_S for cell in cells],
            "both_ways_rtts": [cell.both_ways_s / RENDEZVOUS_RTT_S for cell in cells],
        }
    )


SCENARIOS = [
    *(_row(row, scope) for scope in FilterScope for row in CLASSES),
    Scenario(
        "first-byte-relayed",
        "the first application byte where only the relay connects a pair",
        _relayed,
        {"first_byte_rtts": FIRST_BYTE_RTTS, "both_ways_rtts": FIRST_BYTE_RTTS},
    ),
]
