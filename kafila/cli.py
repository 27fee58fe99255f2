"""The commands' options, and errors as one line. What is heavy is imported when a command runs, so that `--help` is
quick and Ctrl-C during a slow import ends without a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kafila.errors import KafilaError
from kafila.streams import steady_streams

INTERRUPTED = 128 + signal.SIGINT
"""What a shell reports of a command that Ctrl-C ended."""


def _whole_numbers(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("whole numbers with commas between them, as in 10,5,15") from None


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option("--host", "hosting", is_flag=True, help="Open a session and print its code.")
@click.option("--join", "code", metavar="CODE", help="Join the session with this code.")
@click.option(
    "--model",
    metavar="WHERE",
    help="The checkpoint: a folder, https://host/path/, or org/name[@revision] on the hub. When joining: where this "
    "machine has it, if not from where the host has.",
)
@click.option("--members", type=click.IntRange(1, 64), help="Host: how many to wait for, you included.")
@click.option("--context", type=click.IntRange(16), help="Host: tokens a conversation may hold.")
@click.option(
    "--concurrency", type=click.IntRange(1, 1024), default=4, show_default=True, help="Host: answers at once."
)
@click.option(
    "--objective",
    type=click.Choice(["bottleneck", "throughput"]),
    default="bottleneck",
    show_default=True,
    help="Host: what the division is best at.",
)
@click.option(
    "--allocation",
    type=click.Choice(["kafila", "uniform", "memory"]),
    default="kafila",
    show_default=True,
    help="Host: whose division.",
)
@click.option(
    "--shares",
    callback=_whole_numbers,
    metavar="N,N,...",
    help="Host: blocks for each member in the order they join, you first.",
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    envvar="KAFILA_RENDEZVOUS",
    help="Where members meet; without one, the host runs it for its own network.",
)
@click.option("--name", help="What you are called in the session.  [default: this machine's name]")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps, mlx.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Host: the numbers that are computed with.",
)
@click.option(
    "--quantize",
    type=click.Choice(["int8", "int4"]),
    help="Host: hold the weights in 8 or 4 bits, made while they are loaded.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="Host: what conversations are remembered in.  [default: --dtype]",
)
@click.option("--memory", metavar="SIZE", help="Use at most this much memory, as in 12GB.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Processor threads for the model.")
@click.option("--no-probe-cache", is_flag=True, help="Measure this device anew, even if it was within a day.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="UDP port to use.  [default: any]")
@click.option(
    "--stun",
    multiple=True,
    metavar="HOST:PORT",
    help="One more STUN server to ask what the NAT here does. May be given several times.",
)
@click.option("--no-port-mapping", is_flag=True, help="Never ask the router to open the port (PCP, NAT-PMP, UPnP).")
@click.option(
    "--api",
    metavar="HOST:PORT|off",
    help="Where this machine's programs and browsers ask.  [default: 127.0.0.1:11435, or the next free port]",
)
@click.option("--api-key", envvar="KAFILA_API_KEY", metavar="KEY", help="What every request to --api has to bring.")
@click.option("--guest", is_flag=True, help="With --join: ask, and lend nothing of this machine.")
@click.option(
    "--share-weights",
    is_flag=True,
    help="Give ring neighbours what is here of the checkpoint, and ask them where its source is silent or slow.",
)
@click.option("--serve", "only_serve", is_flag=True, help="Hold a share of the model and ask nothing.")
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 always takes the likeliest word."
)
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(0), default=0, show_default=True, help="0: no limit.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(0), default=0, help="End answers after so many tokens.")
@click.option(
    "--rolling-context", is_flag=True, help="A conversation that outgrows the context loses its oldest turns (/window)."
)
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write what was measured to this file.")
@click.option("--quiet", is_flag=True, help="No status lines.")
@click.version_option(package_name="kafila")
@click.pass_context
def node(invocation: click.Context, /, **options: Any) -> None:
    """Pool computers of people who trust one another to serve one language model.

    \b
      kafila-node --host --model WHERE --members 3       prints a session code
      kafila-node --join CODE                            on each friend's machine

    Then type questions, on any of them. In a pipe, each line is a question of its own:

    \b
      echo "Why is the sky blue?" | kafila-node --join CODE
    """
    if invocation.invoked_subcommand is None:
        _run(lambda: _node(options))


def _node(options: dict[str, Any]) -> None:
    from kafila.commands import host_or_join  # noqa: PLC0415  - see the module docstring

    host_or_join(options)


@node.group()
def cache() -> None:
    """The checkpoints that have been fetched to this machine."""


@cache.command("list")
def cache_list() -> None:
    """What is there, how much of it, and when it was used last."""

    def run() -> None:
        from kafila.cache_commands import list_cache  # noqa: PLC0415  - see the module docstring

        list_cache()

    _run(run)


@cache.command("prune")
@click.option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="What was not used for so many days.")
@click.option("--all", "everything", is_flag=True, help="Everything that is not in use now.")
def cache_prune(older_than: float | None, *, everything: bool) -> None:
    """Remove checkpoints to make room."""

    def run() -> None:
        from kafila.cache_commands import prune_cache  # noqa: PLC0415  - see the module docstring

        prune_cache(older_than, everything=everything)

    _run(run)


@node.command("trace")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="OUT.svg|png", help="Draw it, too.")
def trace(file: Path, plot: Path | None) -> None:
    """What a session measured (written with --trace): stage times against the plan's, bytes, paths."""

    def run() -> None:
        from kafila.trace_commands import show_trace  # noqa: PLC0415  - see the module docstring

        show_trace(file, plot)

    _run(run)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--bind", default="[::]:7443", show_default=True, metavar="HOST:PORT", help="Where to listen (UDP).")
@click.option(
    "--alt-address",
    metavar="HOST",
    help="A second address of this machine, for STUN: then members learn exactly what their NATs do.",
)
@click.version_option(package_name="kafila")
def rendezvous(bind: str, alt_address: str | None) -> None:
    """The always-on meeting point: introduces members, relays ciphertext where no direct path exists.

    It holds no model and can read nothing of what members say. Give members its address with --rendezvous.
    """

    def run() -> None:
        from kafila.commands import run_rendezvous  # noqa: PLC0415  - see the module docstring

        run_rendezvous(bind, alt_address)

    _run(run)


def _run(command: Callable[[], None]) -> None:
    """Run a command; whatever goes wrong is one line and an exit code."""
    steady_streams()
    try:
        code = _outcome(command)
    except BaseExceptionGroup as group:
        # Nurseries wrap what their tasks raise. One of our own errors, however deep, is still one line.
        ours, others = group.split(KafilaError)
        if ours is None or others is not None:
            raise
        code = _tell(_first(ours))
    _leave(code)


def _outcome(command: Callable[[], None]) -> int:
    try:
        command()
    except KafilaError as error:
        return _tell(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _tell(error: KafilaError) -> int:
    with contextlib.suppress(OSError):  # where standard error cannot be written, the exit code has to say it
        click.echo(click.style("error: ", fg="red") + str(error), err=True)
    return error.exit_code


def _first(group: BaseExceptionGroup[KafilaError]) -> KafilaError:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _leave(code: int) -> None:
    """End the process. A thread deep in a matrix product, or waiting at a prompt, must not hold it up."""
    with contextlib.suppress(OSError):  # whoever read our output may be gone; there is nobody to tell
        sys.stdout.flush()
        sys.stderr.flush()
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)
