"""The commands: options into settings, a node under Trio, signals, the prompt."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import trio

from kafila.api.guard import is_loopback
from kafila.console import StderrConsole, is_terminal, printable, styled
from kafila.device import DeviceBackend, DeviceSettings, parse_size
from kafila.errors import KafilaError, Unanswered, UsageError
from kafila.lines import Leave, Lines, PipeLines, PromptLines, terminal_kept
from kafila.members import machine_digest
from kafila.node import Node, run_node
from kafila.plan import Allocation, Objective
from kafila.planning import Wishes
from kafila.question import check, conversation
from kafila.reachability import SYSTEM_ROUTERS
from kafila.rendezvous_service import Alternate, serve
from kafila.repl import Chat
from kafila.ring.invite import HostPort, parse_code, parse_host_port
from kafila.settings import ApiSettings, HostSettings, JoinSettings, NodeSettings
from kafila.shard.devices import library_for
from kafila.sharing import Sharing
from kafila.trace import Recorder, Silence, TraceFile
from kafila.types import Question, Sampling
from kafila.udp import TrioNetwork

SWITCH_INTERVAL_S = 20e-6
"""How long one of the threads that matter, event loop and worker, may keep the interpreter from the other. Each gives
the other work and then has a little left to do; with Python's 5 ms the other waits for it, three times a token."""
API_DEFAULT = HostPort("127.0.0.1", 11435)
"""Where the local interface is unless its owner says: beside Ollama's own port."""


def history_file() -> Path:
    """Where a person's prompts are kept between sessions: the XDG base directory specification's place for history."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "kafila/history"


def host_or_join(options: dict[str, Any]) -> None:
    """Until the session ends or the person leaves. Raises KafilaError; KeyboardInterrupt after Ctrl-C or SIGTERM."""
    settings = node_settings(options)
    if not options["guest"]:
        library_for(options["device"])  # what is not installed is said before anybody is asked to join
    device = DeviceSettings(
        device=options["device"],
        dtype=options["dtype"],
        quantize=options["quantize"] or "",
        kv_dtype=options["kv_dtype"],
        threads=options["threads"],
        memory_bytes=None if options["memory"] is None else parse_size(options["memory"]),
        probe_cache=not options["no_probe_cache"],
    )
    console = StderrConsole(quiet=options["quiet"])
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with terminal_kept(), _trace(options["trace"], console) as recorder:
        person = _Person(console, options)

        async def member() -> None:
            sharing = Sharing() if options["share_weights"] else None
            with contextlib.closing(DeviceBackend(device, console.status, sharing)) as backend:
                around = (TrioNetwork(), backend, console, recorder, person)
                await run_node(settings, *around, routers=SYSTEM_ROUTERS, sharing=sharing)

        trio.run(person.watch, member)
    if person.interrupted:
        raise KeyboardInterrupt
    if person.unanswered:
        raise Unanswered(f"{person.unanswered} of the questions got no answer: why stands above")


def node_settings(options: dict[str, Any]) -> NodeSettings:
    """The settings that options ask for. Raises UsageError for a combination that cannot be meant."""
    if options["hosting"] == (options["code"] is not None):
        raise UsageError("say either --host, to open a session, or --join CODE, to enter one")
    if options["guest"] and options["share_weights"]:
        raise UsageError("--share-weights is for members that hold a share: a guest neither gives nor asks for weights")
    if options["guest"] and (options["hosting"] or options["only_serve"]):
        raise UsageError("--guest goes with --join: a guest asks and holds no share, so it neither hosts nor serves")
    rendezvous = None if options["rendezvous"] is None else parse_host_port(options["rendezvous"])
    role = _host(options, rendezvous) if options["hosting"] else _join(options, rendezvous)
    return NodeSettings(
        role,
        options["name"] or _default_name(),
        machine_digest(),
        options["port"],
        stun=tuple(parse_host_port(where) for where in options["stun"]),
        port_mapping=not options["no_port_mapping"],
        api=_api(options),
    )


def _api(options: dict[str, Any]) -> ApiSettings | None:
    where, key = options["api"], options["api_key"]
    if where == "off":
        return None
    host, port = API_DEFAULT if where is None else parse_host_port(where)
    if key is not None and not key.strip():
        raise UsageError("--api-key is empty: leave it out, or choose a long one")
    if key is None and not is_loopback(host):
        raise UsageError(
            f"--api {where} can be reached from other machines: add --api-key KEY, which every request then needs"
        )
    return ApiSettings(
        host,
        port,
        where is not None,
        key and key.strip(),
        _sampling(options),
        options["max_tokens"],
        options["rolling_context"],
    )


def _sampling(options: dict[str, Any]) -> Sampling:
    """Raises UsageError for what no question may have."""
    sampling = Sampling(options["temperature"], options["top_k"], options["top_p"], seed=options["seed"])
    check(Question(conversation(("user", "?")), sampling=sampling))
    return sampling


def _host(options: dict[str, Any], rendezvous: HostPort | None) -> HostSettings:
    if options["model"] is None:
        raise UsageError(
            "say which model to serve: --model WHERE, a checkpoint's folder, its address, or its name on the hub"
        )
    if options["members"] is None and not is_terminal():
        raise UsageError("say how many members to wait for, yourself included: --members N")
    shares = options["shares"]
    if shares is not None and len(shares) != (options["members"] or len(shares)):
        raise UsageError(f"--shares names {len(shares)} members and --members {options['members']}: make them agree")
    return HostSettings(
        model=options["model"],
        members=options["members"],
        context=options["context"],
        slots=options["concurrency"],
        rendezvous=rendezvous,
        wishes=Wishes(
            Objective(options["objective"]), Allocation(options["allocation"]), shares, options["concurrency"]
        ),
    )


def _join(options: dict[str, Any], rendezvous: HostPort | None) -> JoinSettings:
    code = parse_code(options["code"])
    where = rendezvous or code.rendezvous
    if where is None:
        raise UsageError("that code does not say where its rendezvous is: add --rendezvous HOST:PORT, as the host did")
    return JoinSettings(code, where, options["model"], options["guest"])


def _default_name() -> str:
    """What a person would recognise a machine by: ``ada@laptop``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        user = ""
    return "@".join(part for part in (user, platform.node().partition(".")[0]) if part) or "member"


@contextlib.contextmanager
def _trace(path: Path | None, console: StderrConsole) -> Iterator[Recorder]:
    if path is None:
        yield Silence()
        return
    try:
        file = path.open("w", buffering=1)
    except OSError as error:
        raise UsageError(f"the trace cannot be written to {path}: {error.strerror}") from error
    try:
        yield TraceFile(file, lambda why: console.error(f"the trace {path} ends here: {why}"))
    finally:
        with contextlib.suppress(OSError):  # told when it was written
            file.close()


class _Person:
    """The person, or the pipe, in front of this node."""

    def __init__(self, console: StderrConsole, options: dict[str, Any]) -> None:
        self.interrupted = False
        """Whether Ctrl-C or SIGTERM ended it."""
        self.unanswered = 0
        """Questions of a pipe that got no answer. At a terminal the person has seen it."""
        self._console = console
        self._options = options
        self._chat: Chat | None = None

    async def watch(self, member: Callable[[], Awaitable[None]]) -> None:
        """Run ``member``; Ctrl-C at a terminal stops an answer that is streaming, and otherwise ends it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals, nursery.cancel_scope)
            await member()
            nursery.cancel_scope.cancel()

    async def _watch_signals(self, everything: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                one_answer = number == signal.SIGINT and is_terminal()
                if not (one_answer and self._chat is not None and self._chat.stop_answer()):
                    self.interrupted = True
                    everything.cancel()

    async def gather(self, node: Node) -> None:
        """A host that did not say how many to wait for says when."""
        if self._options["hosting"] and self._options["members"] is None:
            self._console.status("press Enter when everybody is here")
            if await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
                node.start()

    async def chat(self, node: Node) -> None:
        """Prompts from the terminal or the pipe, until they end."""
        if self._options["only_serve"]:
            await trio.sleep_forever()
        sampling = _sampling(self._options)
        at_terminal = is_terminal()
        write, think = (_show, _show_thought) if at_terminal else (_write, None)
        most = self._options["max_tokens"]
        rolling = self._options["rolling_context"]
        self._chat = Chat(
            node, write, self._console, sampling, most, remember=at_terminal, think=think, rolling=rolling
        )
        lines: Lines = PromptLines("> ", history_file()) if at_terminal else PipeLines(sys.stdin)
        if at_terminal:
            self._console.status("type a question; /help lists the commands")
        try:
            await self._chat.run(lines)
        except Leave:
            self.interrupted = True
        if not at_terminal:
            self.unanswered = self._chat.unanswered


def _write(text: str) -> None:
    """Answers go to stdout as they come."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Whoever read the answers has gone, or a disk is full. Nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise KafilaError("nobody reads the answers any more: stdout is closed") from None
        raise KafilaError(f"the answers cannot be written to stdout: {error.strerror}") from None


def _show(text: str) -> None:
    """On a terminal a model's text must not move the cursor or change its colours."""
    _write(printable(text))


def _show_thought(text: str) -> None:
    """What a model thinks before it answers."""
    _write(styled(printable(text), dim=True))


def run_rendezvous(bind: str, alt_address: str | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises KafilaError."""
    where = parse_host_port(bind)
    network, alternate = TrioNetwork(), None
    if alt_address is not None:
        first, second = _two_hosts(where.host, alt_address)
        network, alternate = TrioNetwork(first), Alternate(TrioNetwork(second), first, second)

    async def until_signal() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
            await serve(network, where.port, StderrConsole(), alternate)

    trio.run(until_signal)


def _two_hosts(first: str, second: str) -> tuple[str, str]:
    """Two addresses to listen on, each by itself. Raises UsageError where they are not that."""
    try:
        one, other = ip_address(first), ip_address(second)
    except ValueError:
        raise UsageError("with --alt-address, --bind and --alt-address are numbers, as in 203.0.113.5") from None
    if one.is_unspecified or other.is_unspecified or one == other or one.version != other.version:
        raise UsageError(
            "--alt-address needs two different addresses of one family: say the first with --bind HOST:PORT, "
            "the second with --alt-address HOST"
        )
    return str(one), str(other)


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
