"""``kafila-sim nat matrix``: that its tables show the cells as they are, and a cell that is not as predicted."""

from __future__ import annotations

from dataclasses import replace

from sims.nat import FilterScope
from sims.scenarios.grid import CLASSES, Cell, truth
from sims.scenarios.matrix import Matrix, run_row


def as_predicted() -> Matrix:
    cells = {
        scope: [
            Cell(row, column, outcome, outcome, 0.1, 0.2, 0.08 if outcome == "direct" else None)
            for row, columns in truth()[scope.value].items()
            for column, outcome in columns.items()
        ]
        for scope in FilterScope
    }
    return Matrix(cells)


def test_all_cells_as_predicted_and_the_papers_rule_wrong_twice() -> None:
    figures = as_predicted().figures()
    assert figures["cells"] == 2 * len(CLASSES) ** 2 == 162
    assert figures["cells_wrong"] == 0
    assert figures["table_iii_paper_rule_wrong"] == 2


def test_table_iii_has_the_papers_nine_rows() -> None:
    header, *rows = as_predicted().table_iii().splitlines()
    assert "paper rule" in header
    assert [
        row.split()[2:5] for row in rows if row.startswith(("ordinary     restrictive", "restrictive  ordinary"))
    ] == [["relay", "direct", "direct"]] * 2
    assert len(rows) == 9


def test_a_cell_that_is_not_as_predicted_is_counted_named_and_shown() -> None:
    matrix = as_predicted()
    cells = matrix.cells[FilterScope.MAPPING]
    cells[0] = replace(cells[0], achieved="none")
    assert matrix.figures()["cells_wrong"] == 1
    assert matrix.wrong[0].startswith("mapping: EIM/EIF to EIM/EIF predicted direct, achieved none")
    assert "direct!none" in matrix.grid(FilterScope.MAPPING)


def test_a_row_is_run() -> None:
    scope, cells = run_row((FilterScope.MAPPING.value, "EIM/APDF", 3))
    assert scope == "mapping"
    assert [cell.column for cell in cells] == list(CLASSES)
    assert all(cell.achieved == cell.predicted for cell in cells)
