"""``kafila-sim plan``: what a fleet would make of a model, without a machine of it at hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NoReturn

import click

from kafila.errors import UsageError
from kafila.plan import (
    Allocation,
    Declined,
    Member,
    ModelManifest,
    Objective,
    Plan,
    Prediction,
    Workload,
    describe,
    plan_session,
)
from sims import table_iv
from sims.fleets import PAPER, PAPER_FLEETS, Fleet, load_fleet
from sims.models import PAPER_MODELS, load_model


@click.command(
    epilog=f"FLEET is one of {', '.join(PAPER_FLEETS)}, or a TOML or JSON file (sims/fleets.py has the format). "
    f"MODEL is one of {', '.join(PAPER_MODELS)}, or a config.json, or a folder with one."
)
@click.argument("fleet")
@click.argument("model", required=False)
@click.option("--allocation", type=click.Choice(["kafila", "uniform", "memory"]), default="kafila", show_default=True)
@click.option("--objective", type=click.Choice(["bottleneck", "throughput"]), default="bottleneck", show_default=True)
@click.option("--context", type=int, default=4096, show_default=True, help="Tokens reserved for each request.")
@click.option("--concurrency", type=int, default=4, show_default=True, help="Requests that cache is reserved for.")
@click.option("--users", type=int, help="People served at once, for the prediction.  [default: the concurrency]")
@click.option("--shares", help="Exact block counts in the order of the fleet's members: 10,5,15.")
@click.option("--host", help="Who opens the session, instead of the fleet's own host.")
@click.option("--host-must-serve", is_flag=True, help="Keep the host in the ring under the throughput objective.")
@click.option("--memory", "memories", multiple=True, metavar="NAME=GB", help="What a member may use, to the byte.")
@click.option("--network", help="One of the fleet's networks, or 'predicted': NAT classes and round trips alone.")
@click.option(
    "--compare",
    is_flag=True,
    help="The paper's Table IV for this fleet, its own figures in brackets, on its own network.",
)
@click.option("--json", "as_json", is_flag=True, help="One object with the plan and its figures.")
def plan(
    fleet: str,
    model: str | None,
    allocation: str,
    objective: str,
    context: int,
    concurrency: int,
    users: int | None,
    shares: str | None,
    host: str | None,
    host_must_serve: bool,
    memories: tuple[str, ...],
    network: str | None,
    compare: bool,
    as_json: bool,
) -> None:
    """Plan MODEL for the machines of FLEET."""
    workload = Workload(context, concurrency)
    loaded = load_fleet(fleet, network)
    if compare and network is None and PAPER in loaded.networks:
        loaded = load_fleet(fleet, PAPER)
    loaded = _with_memories(_with_host(loaded, host), memories)
    if compare:
        _print_comparison(loaded, model, workload, as_json=as_json)
        return
    if model is None:
        raise UsageError(f"name a model to plan for: {', '.join(PAPER_MODELS)}, or a config.json")
    if objective == "throughput" and (allocation != "kafila" or shares is not None):
        raise UsageError("--objective throughput chooses the division itself: leave out --allocation and --shares")
    planned = plan_session(
        loaded.members,
        load_model(model),
        workload,
        anchor=loaded.host,
        objective=objective,
        allocation=allocation,
        users=users,
        shares=None if shares is None else _counts(shares),
        edges=loaded.edges,
        host_must_serve=host_must_serve,
    )
    if isinstance(planned, Declined):
        _decline(planned, as_json=as_json)
    elif as_json:
        click.echo(
            json.dumps({"fleet": loaded.name, "plan": json.loads(planned.to_json()), "figures": figures(planned)})
        )
    else:
        click.echo(describe(planned))
        if planned.objective.value != objective:
            click.echo("The throughput objective needs every member's speed and every edge's round trip.")


def figures(planned: Plan) -> dict[str, float]:
    """The plan's numbers by name; those that could not be predicted are left out."""
    found: dict[str, float | None] = {
        "members": len(planned.stages),
        "blocks": planned.blocks,
        "users": planned.users,
        "bottleneck_ms": _ms(planned.bottleneck_s),
        "compute_ms": _ms(planned.compute_s),
        "network_ms": _ms(planned.network_s),
        "circuit_ms": _ms(planned.circuit_s),
        "imbalance": planned.imbalance,
        "utilisation_percent": None if planned.utilisation is None else planned.utilisation * 100,
        "tokens_per_s": planned.tokens_per_s(planned.users),
        "tokens_per_s_one_user": planned.tokens_per_s(1),
        "relayed_edges": sum(edge.kind.value == "relayed" for edge in planned.edges),
        **_by_objective(planned),
    }
    return {name: value for name, value in found.items() if value is not None}


def _by_objective(planned: Plan) -> dict[str, float]:
    """Both objectives' predictions, and how many times as fast throughput is, for one user and for all of them."""
    own = planned.prediction
    if own is None:
        return {}
    known = [*planned.alternatives, *([own] if planned.allocation is Allocation.KAFILA else [])]
    found: dict[str, float] = {}
    for said, users in (("one_user", 1), ("all_users", planned.users)):
        whole = _rate(known, Objective.BOTTLENECK, users)
        fastest = _rate(known, Objective.THROUGHPUT, users)
        if whole:
            found[f"bottleneck_objective_tokens_per_s_{said}"] = whole
        if fastest:
            found[f"throughput_objective_tokens_per_s_{said}"] = fastest
        if whole and fastest:
            found[f"throughput_over_bottleneck_{said}"] = fastest / whole
    return found


def _rate(known: Sequence[Prediction], objective: Objective, users: int) -> float | None:
    """Tokens per second for ``users`` with the ring that ``objective`` chooses for so many."""
    rates = [
        prediction.tokens_per_s(users)
        for prediction in known
        if prediction.objective is objective and (objective is Objective.BOTTLENECK or prediction.users == users)
    ]
    return max(rates, default=None)


def _print_comparison(fleet: Fleet, model: str | None, workload: Workload, *, as_json: bool) -> None:
    names = [model] if model is not None else table_iv.paper_models(fleet.name) or list(PAPER_MODELS)
    models: list[ModelManifest] = [load_model(name) for name in names]
    rows = table_iv.compare(fleet, models, workload)
    if as_json:
        click.echo(json.dumps({"fleet": fleet.name, "figures": table_iv.figures(rows)}))
        return
    click.echo(f"{fleet.name}, {workload.concurrency} x {workload.context:,} tokens, one user: ours (the paper's)")
    click.echo(table_iv.layout(rows))


def _decline(declined: Declined, *, as_json: bool) -> NoReturn:
    """The refusal, and exit code 1: there is no plan."""
    if as_json:
        click.echo(json.dumps({"declined": asdict(declined), "figures": {"shortfall_bytes": declined.shortfall_bytes}}))
    click.echo(f"Declined: {declined.message}.", err=True)
    for remedy in declined.remedies:
        click.echo(f"  would help: {remedy}", err=True)
    raise SystemExit(1)


def _with_host(fleet: Fleet, host: str | None) -> Fleet:
    if host is None:
        return fleet
    return replace(fleet, host=_find(fleet.members, host))


def _with_memories(fleet: Fleet, memories: Sequence[str]) -> Fleet:
    members = list(fleet.members)
    for text in memories:
        name, _, amount = text.rpartition("=")
        index = _find(members, name)
        try:
            size = round(float(amount) * 1e9)
        except (ValueError, OverflowError):
            raise UsageError(f"--memory {text}: give a number of gigabytes after the '='") from None
        if size < 0:
            raise UsageError(f"--memory {text}: give 0 or more gigabytes")
        members[index] = replace(members[index], memory_bytes=size, memory_is_exact=True)
    return replace(fleet, members=tuple(members))


def _find(members: Sequence[Member], name: str) -> int:
    for index, member in enumerate(members):
        if member.name == name:
            return index
    raise UsageError(f"no member is called {name!r}; there are {', '.join(member.name for member in members)}")


def _counts(shares: str) -> tuple[int, ...]:
    try:
        return tuple(int(share) for share in shares.split(","))
    except ValueError:
        raise UsageError(f"--shares {shares}: give whole numbers with commas between them") from None


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else duration_s * 1e3
