"""A summary of sessions in words and in figures."""

from __future__ import annotations

from statistics import median

from sims.fleet.papers import said
from sims.fleet.place import Net
from sims.fleet.trial import Outcome, Summary, Trial
from sims.fleets import PAPER_FLEETS, Fleet
from sims.table_iv import paper_cells

_NETWORKS = {
    Net.OVERHEAD: "the paper's own network overhead",
    Net.GEOGRAPHY: "fibre distances, the paper's relays",
    Net.PATHS: "fibre distances, our path engine",
}


def figures(trial: Trial, fleet: Fleet, result: Summary) -> dict[str, float]:
    """Every number by name; medians over the sessions."""
    edges = [edge for outcome in result.outcomes for edge in outcome.edges]
    direct = result.setup_s(direct=True)
    found = {
        "sessions": len(result.outcomes),
        "members": len(fleet.members),
        "tokens_per_s_one_user": result.median("one_user"),
        "tokens_per_s_one_user_half_range": result.half_range("one_user"),
        "bottleneck_ms": result.median("bottleneck_s") * 1e3,
        "utilisation_percent": result.median("utilisation") * 100,
        "imbalance": result.median("imbalance"),
        "circuit_ms": result.median("circuit_s") * 1e3,
        "network_ms": result.median("network_s") * 1e3,
        "network_share": result.overhead,
        "first_token_ms": result.median("first_token_s") * 1e3,
        "formed_s": result.median("formed_s"),
        "virtual_s": result.median("virtual_s"),
        "real_s": result.median("real_s"),
    }
    if result.errors:
        found["cost_model_median_error"] = median(result.errors)
    if trial.users > 1:
        found["users"] = trial.users
        found["tokens_per_s_all_users"] = result.median("all_users")
        found["tokens_per_s_all_users_half_range"] = result.half_range("all_users")
        found["gain"] = result.gain
    if edges:
        found["hop_ms"] = median(edge.hop_s for edge in edges) * 1e3
        found["relayed_edges"] = sum(edge.kind.value == "relayed" for edge in edges) / len(result.outcomes)
        found["link_up_s"] = median(result.setup_s(direct=False))
    if direct:
        found["direct_s"] = median(direct)
    if trial.minutes:
        found["soak_tokens"] = result.median("soak_tokens")
        found["soak_tokens_per_s"] = result.median("soak_tokens") / (trial.minutes * 60)
    return found | _papers(trial, result)


def _papers(trial: Trial, result: Summary) -> dict[str, float]:
    """The paper's cell, and ours over it."""
    cell = paper_cells().get((trial.fleet.lower(), trial.model, trial.allocation))
    if cell is None or not cell.tokens_per_s:
        return {}
    found = {
        "paper_tokens_per_s": cell.tokens_per_s,
        "paper_bottleneck_ms": cell.bottleneck_ms,
        "paper_utilisation_percent": cell.utilisation_percent,
        "tokens_per_s_over_paper": result.median("one_user") / cell.tokens_per_s,
    }
    if trial.users == 4 and trial.fleet.lower() in PAPER_FLEETS:
        low, high = said().four_user_gain[trial.fleet.lower()][trial.allocation.value]
        found |= {"paper_gain_low": low, "paper_gain_high": high}
    return found


def describe(trial: Trial, fleet: Fleet, result: Summary) -> str:
    """The summary for a person."""
    count = len(result.outcomes)
    found = figures(trial, fleet, result)
    whose = "Kafila's" if trial.allocation.value == "kafila" else f"the {trial.allocation.value}"
    lines = [
        f"{trial.model} on {fleet.name}: {whose} division, {trial.objective.value} objective, "
        f"{count} session{'s' * (count != 1)} of the deployed code in virtual time",
        f"Network: {_NETWORKS[trial.network]}.",
        *_table(result.outcomes[0]),
        f"Slowest stage {found['bottleneck_ms']:.1f} ms, utilisation {found['utilisation_percent']:.0f}%, slowest over "
        f"fastest {found['imbalance']:.2f}; a token takes {found['circuit_ms']:.1f} ms, "
        f"{found['network_ms']:.1f} of them on the network ({found['network_share'] * 100:.0f}%).",
        f"One user: {found['tokens_per_s_one_user']:.1f} tokens/s "
        f"(\N{PLUS-MINUS SIGN}{found['tokens_per_s_one_user_half_range']:.1f}), first token after "
        f"{found['first_token_ms']:.0f} ms; {trial.prompt_tokens} tokens asked, {trial.answer_tokens} answered.",
    ]
    if trial.users > 1:
        lines.append(
            f"{trial.users} users: {found['tokens_per_s_all_users']:.1f} tokens/s together "
            f"(\N{PLUS-MINUS SIGN}{found['tokens_per_s_all_users_half_range']:.1f}), {found['gain']:.2f} times one."
        )
    if "paper_tokens_per_s" in found:
        lines.append(
            f"The paper: {found['paper_tokens_per_s']:.1f} tokens/s for one user, slowest stage "
            f"{found['paper_bottleneck_ms']:.1f} ms, utilisation {found['paper_utilisation_percent']:.0f}%."
        )
    return "\n".join([*lines, *_forming(found, trial)])


def _forming(found: dict[str, float], trial: Trial) -> list[str]:
    lines = []
    if "link_up_s" in found:
        later = f", directly after {found['direct_s']:.2f} s" if "direct_s" in found else ", directly never"
        lines.append(
            f"An edge carries data {found['link_up_s']:.2f} s after the plan{later} (medians); everybody served after "
            f"{found['formed_s']:.1f} s, weights read from a local disk."
        )
    if trial.minutes:
        lines.append(f"In {trial.minutes:g} minutes more: {found['soak_tokens']:,.0f} tokens.")
    lines.append(f"{found['virtual_s']:.0f} virtual seconds a session took {found['real_s']:.0f} real ones.")
    return lines


def _table(outcome: Outcome) -> list[str]:
    """The first session's ring."""
    rows = [("member", "blocks", "stage ms (predicted)", "edge to the next")]
    for place, name in enumerate(outcome.names):
        predicted = outcome.predicted_s[place]
        guess = "?" if predicted is None else f"{predicted * 1e3:.1f}"
        edge = outcome.edges[place] if outcome.edges else None
        way = "" if edge is None else f"{edge.kind.value} {edge.hop_s * 1e3:.1f} ms"
        rows.append(
            (
                f"{name} (head)" if place == 0 else name,
                str(outcome.counts[place]),
                f"{outcome.stage_s[place] * 1e3:.1f} ({guess})",
                way,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
