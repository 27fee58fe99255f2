"""The whole report from its results."""

from __future__ import annotations

from collections.abc import Sequence

from sims.report import ours, theirs
from sims.report.page import Page, Paragraph
from sims.report.work import Cell, Results
from sims.scenarios.grid import Cell as NatPair


def build(cells: Sequence[Cell], results: Results, pairs: Sequence[NatPair], tight_context: int | None) -> Page:
    """Every section, the paper's figures beside ours."""
    page = Page("The paper's fleets, run whole in virtual time")
    page.add(
        Paragraph(
            "Rangwala, Sinnott and Buyya, arXiv:2609.34045, reproduced without its machines. The deployed nodes, "
            "links, planner, scheduler and rendezvous run unmodified in a virtual network; a simulated device takes "
            "the time its bandwidth and arithmetic give. A figure is the median over sessions that draw anew, "
            "and a session's is the median over generations after the first. Equal seeds give equal figures within "
            "1%: keys are drawn afresh, and with them who is whose QUIC client."
        )
    )
    theirs.table_iii(page, pairs)
    theirs.table_iv(page, cells, results)
    theirs.fig_2(page, cells, results)
    theirs.cost_model(page, cells, results)
    ours.setup(page, cells, results)
    ours.throughput(page, cells, results)
    ours.batched(page, cells, results)
    ours.hops(page, cells, results)
    ours.ablations(page, cells, results)
    if tight_context is not None:
        ours.tight_model(page, results, tight_context)
    return page
