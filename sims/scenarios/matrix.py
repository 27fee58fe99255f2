"""``kafila-sim nat matrix``: the paper's Table III for the deployed engine, and the 81 cells in both filter scopes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from kafila.nat.predict import paper_rule
from kafila.types import NatClass
from sims.clock import run_virtual
from sims.nat import FilterScope
from sims.scenarios.grid import CLASSES, Cell, truth, try_cells
from sims.topology import VirtualNetwork

REPRESENTATIVE = {
    NatClass.PERMISSIVE: "EIM/EIF",
    NatClass.ORDINARY: "EIM/ADF",
    NatClass.RESTRICTIVE: "APDM/APDF",
}
"""Of each of the paper's classes the NAT that behaves as its Table III shows (Section VII-A)."""

PAPER_FIRST_BYTE_S = {True: 1.3, False: 20.8}
"""Section VII-A: an edge's set-up, direct and relayed."""

_SHORT = {"direct": "direct", "asymmetric": "asymm", "forward": "forw", "backward": "backw", "none": "none"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """All cells of both scopes."""

    cells: dict[FilterScope, list[Cell]]

    @property
    def wrong(self) -> list[str]:
        """Cells whose prediction or outcome is not the brute-forced truth."""
        return [
            f"{scope.value}: {cell.row} to {cell.column} predicted {cell.predicted}, achieved {cell.achieved}, "
            f"truly {truth()[scope.value][cell.row][cell.column]}"
            for scope, cells in self.cells.items()
            for cell in cells
            if not cell.predicted == cell.achieved == truth()[scope.value][cell.row][cell.column]
        ]

    def figures(self) -> dict[str, float]:
        """The matrix in numbers."""
        everything = [cell for cells in self.cells.values() for cell in cells]
        direct = [cell for cell in everything if cell.direct_s is not None]
        return {
            "cells": len(everything),
            "cells_wrong": len(self.wrong),
            "cells_direct_both_ways": sum(cell.achieved == "direct" for cell in everything),
            "first_byte_slowest_s": max(cell.first_byte_s for cell in everything),
            "direct_slowest_s": max((cell.direct_s or 0.0 for cell in direct), default=0.0),
            "table_iii_paper_rule_wrong": sum(
                paper_rule(one, other) is not (self._cell(one, other).achieved == "direct")
                for one, other in product(NatClass, NatClass)
            ),
        }

    def _cell(self, one: NatClass, other: NatClass) -> Cell:
        row, column = REPRESENTATIVE[one], REPRESENTATIVE[other]
        cells = self.cells[FilterScope.MAPPING]
        return next(cell for cell in cells if (cell.row, cell.column) == (row, column))

    def table_iii(self) -> str:
        """The paper's nine class pairs."""
        layout = "{:<12} {:<12} {:<11} {:<9} {:<9} {:>14} {:>12}"
        lines = [
            layout.format(
                "initiator", "responder", "paper rule", "predicted", "achieved", "first byte (s)", "direct (s)"
            )
        ]
        for one, other in product(NatClass, NatClass):
            cell = self._cell(one, other)
            lines.append(
                layout.format(
                    one.value,
                    other.value,
                    "direct" if paper_rule(one, other) else "relay",
                    _word(cell.predicted),
                    _word(cell.achieved),
                    f"{cell.first_byte_s:.3f}",
                    "-" if cell.direct_s is None else f"{cell.direct_s:.3f}",
                )
            )
        return "\n".join(lines)

    def grid(self, scope: FilterScope) -> str:
        """81 cells; one that is not as predicted shows both."""
        lines = ["{:<10}".format("") + "".join(f"{column:>10}" for column in CLASSES)]
        for row in CLASSES:
            found = {cell.column: cell for cell in self.cells[scope] if cell.row == row}
            lines.append(f"{row:<10}" + "".join(f"{_show(found[column]):>10}" for column in CLASSES))
        return "\n".join(lines)


def _word(reach: str) -> str:
    return "relay" if reach == "none" else reach


def _show(cell: Cell) -> str:
    if cell.predicted == cell.achieved:
        return _SHORT[cell.achieved]
    return f"{_SHORT.get(cell.predicted, '?')}!{_SHORT[cell.achieved]}"


def run_row(job: tuple[str, str, int]) -> tuple[str, list[Cell]]:
    """One row of one scope: (scope, row, seed). Not to be called inside Trio."""
    scope, row, seed = job
    return scope, run_virtual(_row, FilterScope(scope), row, seed, seed=seed)


async def _row(scope: FilterScope, row: str, seed: int) -> list[Cell]:
    return await try_cells(VirtualNetwork(seed), ((row, column) for column in CLASSES), scope)
