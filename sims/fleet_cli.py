"""``kafila-sim fleet``: whole sessions of a fleet, with the deployed code, in virtual time."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import NoReturn

import click

from kafila.errors import UsageError
from kafila.members import MAX_NAME_CHARS
from kafila.plan import Allocation, Objective
from sims.fleet.place import Net, with_relayed_edge
from sims.fleet.run import run_all, sessions_of
from sims.fleet.trial import Refused, Summary, Trial, summary
from sims.fleet.words import describe, figures
from sims.fleets import PAPER_FLEETS, Fleet, load_fleet
from sims.models import PAPER_MODELS, load_model


@click.command(
    epilog=f"FLEET is one of {', '.join(PAPER_FLEETS)}, or a TOML file (sims/examples/friends.toml is one, with every "
    f"field explained). The model is one of {', '.join(PAPER_MODELS)}, or a config.json, or a folder with one."
)
@click.argument("fleet")
@click.option("--model", default="Qwen3-8B", show_default=True)
@click.option("--allocation", type=click.Choice(["kafila", "uniform", "memory"]), default="kafila", show_default=True)
@click.option("--users", type=click.IntRange(1, 64), default=1, show_default=True, help="People who ask at once.")
@click.option("--objective", type=click.Choice(["bottleneck", "throughput"]), default="bottleneck", show_default=True)
@click.option(
    "--planned-users", type=click.IntRange(1, 64), help="Whom the throughput objective plans for.  [default: the users]"
)
@click.option("--sessions", type=click.IntRange(1, 100), default=5, show_default=True, help="Medians are over so many.")
@click.option(
    "--network",
    type=click.Choice([kind.value for kind in Net]),
    help="overhead: the paper's own share of a token; geography: fibre distances and the paper's relays; paths: fibre "
    "distances and whatever paths our engine finds.  [default: overhead for the paper's fleets; else geography where "
    "the file has relayed edges, paths where not]",
)
@click.option("--batching/--no-batching", default=True, help="Whether requests are computed together. [default: yes]")
@click.option("--pin-head", is_flag=True, help="Ablation: the head stays where the session was opened.")
@click.option("--count-relays", is_flag=True, help="Ablation: order the ring by relayed edges, not by their cost.")
@click.option("--no-margin", is_flag=True, help="Ablation: any gain moves the head.")
@click.option(
    "--whole-head",
    is_flag=True,
    help="Ablation: the head scores the whole vocabulary.  [with --no-batching it does, as the paper's]",
)
@click.option("--context", type=click.IntRange(16), default=4096, show_default=True, help="Tokens of a conversation.")
@click.option("--concurrency", type=click.IntRange(1, 1024), help="Answers at once.  [default: 4, or the users]")
@click.option("--prompt-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option("--tokens", type=click.IntRange(4), default=16, show_default=True, help="Of an answer.")
@click.option("--minutes", type=click.FloatRange(0), default=0.0, help="The users then go on asking for so long.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one a processor]")
@click.option("--json", "as_json", is_flag=True, help="One object with every session and the figures.")
def fleet(
    fleet: str,
    model: str,
    allocation: str,
    users: int,
    planned_users: int | None,
    objective: str,
    sessions: int,
    network: str | None,
    batching: bool,
    pin_head: bool,
    count_relays: bool,
    no_margin: bool,
    whole_head: bool,
    context: int,
    concurrency: int | None,
    prompt_tokens: int,
    tokens: int,
    minutes: float,
    seed: int,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Serve a model on the machines of FLEET, without a machine of it at hand."""
    if (pin_head or count_relays or no_margin) and (allocation, objective) != ("kafila", "bottleneck"):
        raise UsageError("--pin-head, --count-relays and --no-margin are about Kafila's own bottleneck division")
    if objective == "throughput" and allocation != "kafila":
        raise UsageError("--objective throughput chooses the division itself: leave out --allocation")
    loaded = load_fleet(fleet)
    check_names(loaded)
    trial = Trial(
        fleet=fleet,
        model=model,
        network=_network(fleet, loaded, network),
        allocation=Allocation(allocation),
        objective=Objective(objective),
        users=users,
        planned_users=planned_users,
        batching=batching,
        head_stays=pin_head,
        count_relays=count_relays,
        divide_head=batching and not whole_head,
        margin=not no_margin,
        context=context,
        slots=concurrency or max(4, users),
        seed=seed,
        prompt_tokens=prompt_tokens,
        answer_tokens=tokens,
        minutes=minutes,
    )
    _check(trial)
    result = summary(run_all(sessions_of(trial, sessions), jobs))
    if isinstance(result, Refused):
        _refuse(result, as_json=as_json)
    found = figures(trial, loaded, result)
    if as_json:
        click.echo(json.dumps({"name": "fleet", "figures": found, "sessions": _plain(result)}, default=_value))
    else:
        click.echo(describe(trial, loaded, result))


def check_names(fleet: Fleet) -> None:
    """Members are found again by their names, which a session shows cut to what fits a line."""
    for member in fleet.members:
        if not member.name.isprintable() or len(member.name) > MAX_NAME_CHARS:
            raise UsageError(
                f"{fleet.name}: a member's name has at most {MAX_NAME_CHARS} printable characters, not {member.name!r}"
            )


def _network(fleet: str, loaded: Fleet, stated: str | None) -> Net:
    ours = fleet.lower() not in PAPER_FLEETS
    if stated is None:
        if not ours:
            return Net.OVERHEAD
        return Net.GEOGRAPHY if with_relayed_edge(loaded) else Net.PATHS
    if ours and stated == Net.OVERHEAD.value:
        raise UsageError("--network overhead is known of the paper's fleets alone: leave it out")
    return Net(stated)


def _check(trial: Trial) -> None:
    """What a person typed and cannot have meant."""
    if trial.slots < trial.users:
        raise UsageError(f"{trial.users} users need a concurrency of {trial.users}, not {trial.slots}")
    most = min(trial.context, load_model(trial.model).max_context)
    if trial.prompt_tokens + trial.answer_tokens > most:
        raise UsageError(f"{trial.prompt_tokens} + {trial.answer_tokens} tokens do not fit a context of {most:,}")


def _plain(result: Summary) -> list[object]:
    return [asdict(outcome) for outcome in result.outcomes]


def _value(thing: object) -> object:
    return getattr(thing, "value", str(thing))


def _refuse(refused: Refused, *, as_json: bool) -> NoReturn:
    """The refusal, and exit code 1: there is no session."""
    if as_json:
        click.echo(json.dumps({"name": "fleet", "declined": refused.text, "figures": {"declined": 1}}))
    click.echo(f"Declined: {refused.text}.", err=True)
    raise SystemExit(1)
