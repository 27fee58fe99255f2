"""What we add to the paper's tables: throughput as an objective, links that speak at once, the network hop by hop."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from kafila.plan import Allocation, Declined, ModelManifest, Workload, plan_session
from kafila.types import PathKind
from sims.fleet.papers import said
from sims.fleet.place import Net
from sims.fleet.trial import Summary
from sims.fleets import PAPER, Fleet, load_fleet
from sims.models import load_model
from sims.report.page import Heading, Page, Paragraph, Plot, Table
from sims.report.svg import Series, bars
from sims.report.theirs import NAMES, label
from sims.report.work import ABLATIONS, TIGHT_FLEET, TIGHT_MODEL, USERS, Cell, Results, tight

CONTEXTS = (4096, 40960)
"""Where a context that a uniform split cannot hold is looked for: our usual one, and the model's longest."""


def throughput(page: Page, cells: Sequence[Cell], results: Results) -> None:
    """Batching and the throughput objective over the paper's divisions."""
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        one, four = results.get(cell.ours(1)), results.get(cell.ours(USERS))
        if one is None or four is None:
            continue
        first, many = one.median("one_user"), four.median("all_users")
        leads = {}
        for allocation in (Allocation.UNIFORM, Allocation.MEMORY):
            base = results.get(cell.papers(allocation))
            if base is not None:
                leads[allocation] = (first / base.median("one_user"), many / base.median("all_users"))
                prefix = f"ours_{cell.fleet}_{cell.model}_over_{allocation.value}"
                page.figures |= {
                    f"{prefix}_one_user": leads[allocation][0],
                    f"{prefix}_four_users": leads[allocation][1],
                }
        words = [f"{a:.2f} / {b:.2f}" for a, b in leads.values()]
        rings = f"{len(one.outcomes[0].names)} / {len(four.outcomes[0].names)}"
        rates = (first, one.median("all_users"), four.median("all_users"))
        rows.append((cell.fleet, cell.model, rings, *(f"{rate:.1f}" for rate in rates), *words))
        page.figures |= {
            f"ours_{cell.fleet}_{cell.model}_one_user_tokens_per_s": first,
            f"ours_{cell.fleet}_{cell.model}_four_users_tokens_per_s": many,
            f"ours_{cell.fleet}_{cell.model}_four_users_planned_for_one_tokens_per_s": one.median("all_users"),
        }
    lead = said().lead
    page.add(
        Heading("Ours: the throughput objective, and requests computed together"),
        Table(
            (
                "fleet",
                "model",
                "members, planned for 1 / 4",
                "one user",
                "four, planned for 1",
                "four, planned for 4",
                "over uniform, 1 / 4 users",
                "over mem-prop., 1 / 4 users",
            ),
            rows,
        ),
        Paragraph(
            f"Tokens per second over the paper's network, against the baselines as the paper ran them. On the LAN the "
            f"paper leads by {lead['over_uniform']} and {lead['over_memory']} for one user and by "
            f"{lead['over_uniform_four_users']} for four. Where one device holds the whole model nothing beats it for "
            "one user; and since a batch of four reads the weights once, not for four either."
        ),
    )


def batched(page: Page, cells: Sequence[Cell], results: Results) -> None:
    """What batching alone gives each division."""
    for cell in (cell for cell in cells if cell.fleet == "lan"):
        rows = []
        for allocation, name in NAMES.items():
            with_it, without = results.get(cell.batched(allocation)), results.get(cell.papers(allocation))
            if with_it is not None and without is not None:
                rows.append((name, f"{without.median('all_users'):.1f}", f"{with_it.median('all_users'):.1f}"))
                page.figures[f"batched_{allocation.value}_four_users_tokens_per_s"] = with_it.median("all_users")
        page.add(
            Heading("Batching and the paper's divisions", 3),
            Table((f"{cell.fleet}, {cell.model}", "four users, one by one", "four users, together"), rows),
            Paragraph(
                "Our scheduler lets requests share a batch where that is faster, which helps the imbalanced most."
            ),
        )


def setup(page: Page, cells: Sequence[Cell], results: Results) -> None:
    """How long an edge takes until it carries data, and until it is direct."""
    theirs = said().setup_s
    papers = {
        "lan": f"{theirs['direct_lan_median']} s direct",
        "us-central": f"{theirs['direct_public_median']} s direct",
        "intercontinental": f"{theirs['direct_intercontinental']} s direct, {theirs['relay_median']} s relayed",
    }
    rows = []
    for fleet in dict.fromkeys(cell.fleet for cell in cells):
        for network in (Net.GEOGRAPHY, Net.PATHS):
            found = [one for cell in cells if cell.fleet == fleet if (one := results.get(cell.trial(network)))]
            edges = [edge for one in found for outcome in one.outcomes for edge in outcome.edges]
            linked = median(edge.linked_s for edge in edges)
            direct = [edge.direct_s for edge in edges if edge.direct_s is not None]
            relayed = sum(edge.kind is PathKind.RELAYED for edge in edges) / sum(len(one.outcomes) for one in found)
            later = f"{median(direct):.2f} s ({len(direct)} of {len(edges)})" if direct else "never"
            rows.append((fleet, network.value, papers[fleet], f"{relayed:.1f}", f"{linked:.2f} s", later))
            prefix = f"setup_{fleet}_{network.value}"
            page.figures |= {f"{prefix}_link_up_s": linked, f"{prefix}_relayed_edges": relayed}
            if direct:
                page.figures[f"{prefix}_direct_s"] = median(direct)
    page.add(
        Heading("Forming a session: relayed first, direct as soon as possible"),
        Table(("fleet", "network", "paper", "relayed edges", "carries data after", "direct after"), rows),
        Paragraph(
            "Medians from the plan on. geography: NATs through which exactly the paper's edges relay; paths: NATs of "
            "the members' classes, and whatever our engine finds. Every edge carries data through the relay first, so "
            "nobody waits for a path that does not exist: the paper's relayed edges took 20.8 s."
        ),
    )


def hops(page: Page, cells: Sequence[Cell], results: Results) -> None:
    """What a token spends on each edge."""
    rows: list[tuple[str, ...]] = []
    for cell in (cell for cell in cells if cell.model == "Qwen3-8B"):
        both = {network: results.get(cell.trial(network)) for network in (Net.GEOGRAPHY, Net.PATHS)}
        for network, found in both.items():
            if found is not None:
                rows += _hop_rows(cell, network, found)
    page.add(
        Heading("The network, hop by hop"),
        Paragraph(
            "A token's rows from one device to the next, one way, by distance instead of the paper's own term: great "
            "circles at two thirds of the speed of light, half as long again, and the rendezvous 79 to 115 ms away."
        ),
        Table(("fleet", "network", "edge", "path", "ms a token"), rows),
        _plot_rates(page, cells, results),
    )


def _hop_rows(cell: Cell, network: Net, found: Summary) -> list[tuple[str, ...]]:
    return [
        (cell.fleet, network.value, f"{edge.source} to {edge.target}", edge.kind.value, f"{edge.hop_s * 1e3:.1f}")
        for edge in found.outcomes[0].edges
    ]


def _plot_rates(page: Page, cells: Sequence[Cell], results: Results) -> Plot:
    names = {Net.GEOGRAPHY: "the paper's relays", Net.PATHS: "our paths"}
    series = [Series("paper's network term", [_rate(results.get(cell.papers(Allocation.KAFILA))) for cell in cells])]
    for network, name in names.items():
        found = [results.get(cell.trial(network)) for cell in cells]
        series.append(Series(name, [_rate(one) for one in found]))
        for cell, one in zip(cells, found, strict=True):
            if one is not None:
                prefix = f"{network.value}_{cell.fleet}_{cell.model}"
                page.figures |= {
                    f"{prefix}_tokens_per_s": one.median("one_user"),
                    f"{prefix}_network_ms": one.median("network_s") * 1e3,
                }
    groups = [label(cell) for cell in cells]
    svg = bars("Kafila's division over three networks", "tokens/s, one user", groups, series)
    return Plot("networks", svg, "One user's tokens per second by network.")


def _rate(found: Summary | None) -> float | None:
    return None if found is None else found.median("one_user")


def ablations(page: Page, cells: Sequence[Cell], results: Results) -> None:
    """What each rule of the planner is worth."""
    rows = []
    for cell in (cell for cell in cells if cell.model == "Qwen3-8B"):
        whole = results.get(cell.trial(Net.GEOGRAPHY))
        for name, changes in ABLATIONS.items():
            found = results.get(cell.trial(Net.GEOGRAPHY, **changes))
            if whole is None or found is None:
                rows.append((cell.fleet, name, "declined", ""))
                continue
            ratio = found.median("one_user") / whole.median("one_user")
            key = "_".join(changes)
            page.figures[f"ablation_{cell.fleet}_{key}_over_whole"] = ratio
            rows.append((cell.fleet, name, f"{found.median('one_user'):.2f}", f"{ratio:.3f}"))
    page.add(
        Heading("Ablations"),
        Table(("fleet", "without", "tokens/s", "over the whole planner"), rows),
        Paragraph(
            "Qwen3-8B, one user, the paper's relays. The paper found all three within run-to-run variance; the uniform "
            "and memory-proportional divisions, the ablation of the cost model, stand in Table IV."
        ),
    )


def tight_context() -> int | None:
    """The smallest context at which four requests of the tight model find no uniform split; None for never."""
    fleet, model = load_fleet(TIGHT_FLEET, PAPER), load_model(TIGHT_MODEL)
    low, high = CONTEXTS
    if not _uniform_declined(fleet, model, high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _uniform_declined(fleet, model, middle) else (middle + 1, high)
    return low


def _uniform_declined(fleet: Fleet, model: ModelManifest, context: int) -> bool:
    plan = plan_session(
        fleet.members,
        model,
        Workload(context, USERS),
        anchor=fleet.host,
        allocation=Allocation.UNIFORM,
        edges=fleet.edges,
    )
    return isinstance(plan, Declined)


def tight_model(page: Page, results: Results, context: int) -> None:
    """The model that no uniform split holds."""
    refusal = results.refusal(tight(context, Allocation.UNIFORM))
    ours = results.get(tight(context, Allocation.KAFILA))
    page.figures |= {
        "tight_context": context,
        "tight_uniform_declined": int(bool(refusal)),
        "tight_uniform_names_the_laptop": int("M3 Pro" in refusal),
        "tight_ours_serves": int(ours is not None),
    }
    page.add(
        Heading(f"{TIGHT_MODEL} on the {TIGHT_FLEET} fleet"),
        Paragraph(
            f"The paper finds no uniform split that fits. By its memory sizes one fits up to {USERS} requests of "
            f"{context - 1:,} tokens; at {context:,} the host says: {refusal or 'nothing'}. Kafila's division serves "
            f"there: {'counts ' + ', '.join(map(str, ours.outcomes[0].counts)) if ours else 'no'}."
        ),
    )
