"""A host that asks several questions of its ring at once, as told line by line (started by other benchmarks).

    python bench/asker.py MODEL SHARES THREADS SLOTS

``SHARES`` are the blocks of each process of the ring, as in ``15,15``; the first is this one. A number alone is how
many processes there are, and a plan divides the blocks. A line on stdin is a JSON list of questions, a line on stdout
the answers: see :class:`Asked` and :class:`Heard`.
"""

from __future__ import annotations

import kafila.shard  # noqa: F401  # isort: skip  - before torch: it says how threads wait

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import trio

from kafila.commands import SWITCH_INTERVAL_S
from kafila.device import DeviceBackend, DeviceSettings
from kafila.members import machine_digest
from kafila.node import Node, run_node
from kafila.planning import Wishes
from kafila.question import conversation
from kafila.settings import HostSettings, NodeSettings
from kafila.trace import Silence
from kafila.types import Question, Sampling
from kafila.udp import TrioNetwork

CONTEXT = 4096
START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Asked:
    """A question: a text to continue, or a conversation of alternating turns, the asker's first."""

    tokens: int
    """The answer's length: ends of turns are passed over."""
    prompt: str | None = None
    turns: Sequence[str] = ()
    after_tokens: int = 0
    """Ask once the first question has so many tokens of its answer."""


@dataclass
class Heard:
    """What became of it. Times in seconds of one clock for all questions of a line."""

    asked_at: float = 0.0
    token_at: Sequence[float] = ()
    """When each token of the answer was known here."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    text: str = ""


class _Console:
    """Status lines, which the members that have to join read the code from."""

    def __init__(self, members: Sequence[list[str]], folder: Path) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._members = members
        self._folder = folder

    def status(self, line: str) -> None:
        """Nothing to see."""

    def progress(self, line: str) -> None:
        """Nothing to see."""

    def error(self, line: str) -> None:
        """On stderr."""
        print(line, file=sys.stderr)

    def invite(self, code: str) -> None:
        """The others join."""
        for n, options in enumerate(self._members):
            with (self._folder / f"m{n}.err").open("wb") as log:
                command = [sys.executable, "-m", "kafila", "--join", code, "--serve", "--name", f"m{n}", *options]
                self.processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
                )


class _Person:
    async def gather(self, node: Node) -> None:
        """The host knows how many to wait for."""

    async def chat(self, node: Node) -> None:
        """Questions from stdin, until it ends."""
        print("ready", flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            asked = [Asked(**entry) for entry in json.loads(line)]
            heard = [Heard() for _ in asked]
            due = [trio.Event() for _ in asked]
            async with trio.open_nursery() as nursery:
                for n in range(len(asked)):
                    nursery.start_soon(_ask, node, n, asked, heard, due)
            print(json.dumps([asdict(one) for one in heard]), flush=True)


async def _ask(node: Node, n: int, asked: Sequence[Asked], heard: Sequence[Heard], due: Sequence[trio.Event]) -> None:
    mine, here = asked[n], heard[n]
    if mine.after_tokens:
        await due[n].wait()
    times: list[float] = []
    here.asked_at, here.token_at = trio.current_time(), times
    async with node.answer(_question(mine)) as texts:
        async for text in texts:
            times += [trio.current_time()] * (text.answer_tokens - len(times))
            here.text += text.delta
            here.prompt_tokens, here.reused_tokens = text.prompt_tokens, text.reused_tokens
            here.queue_s, here.prefill_s = text.queue_s, text.prefill_s
            for later, event in zip(asked, due, strict=True):
                if n == 0 and len(times) >= later.after_tokens:
                    event.set()
            if text.note and text.finish is not None:
                raise SystemExit(f"a question of the benchmark was refused: {text.note}")


def _question(asked: Asked) -> Question:
    sampling = Sampling(logit_bias=tuple((token, -1000.0) for token in _stop_ids()))
    if asked.prompt is not None:
        return Question(prompt=asked.prompt, sampling=sampling, max_tokens=asked.tokens)
    turns = [("assistant" if n % 2 else "user", turn) for n, turn in enumerate(asked.turns)]
    return Question(conversation(*turns), sampling=sampling, max_tokens=asked.tokens)


def _stop_ids() -> set[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids = json.loads((Path(sys.argv[1]) / name).read_text()).get("eos_token_id")
        found |= set(ids) if isinstance(ids, list) else {ids} - {None}
    return found


def main() -> None:
    """Form the ring and answer stdin until it ends."""
    model, threads, slots = sys.argv[1], int(sys.argv[3]), int(sys.argv[4])
    shares = tuple(int(share) for share in sys.argv[2].split(",")) if "," in sys.argv[2] else ()
    members = len(shares) or int(sys.argv[2])
    wishes = replace(Wishes(), shares=shares or None, users=slots)
    settings = NodeSettings(
        HostSettings(model, members, CONTEXT, slots, None, wishes),
        "host",
        machine_digest(),
        port_mapping=False,
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with tempfile.TemporaryDirectory() as folder:
        console = _Console([["--threads", str(threads)]] * (members - 1), Path(folder))
        backend = DeviceBackend(DeviceSettings(device="cpu", dtype="auto", threads=threads, memory_bytes=None))
        try:
            trio.run(run_node, settings, TrioNetwork(), backend, console, Silence(), _Person())
        finally:
            for process in console.processes:
                process.terminate()
                process.wait(10)


class Asker:
    """The other end: such a process, asked from another benchmark."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *asked: Asked) -> list[Heard]:
        """All at once; what became of each."""
        source, answers = self._process.stdin, self._process.stdout
        if source is None or answers is None:
            raise SystemExit("the asker was started without pipes")
        source.write(json.dumps([asdict(one) for one in asked]) + "\n")
        source.flush()
        return [Heard(**entry) for entry in json.loads(answers.readline() or _gone())]


def _gone() -> str:
    raise SystemExit("the benchmark's ring ended before it answered")


@contextmanager
def asker(model: Path, shares: Sequence[int] | int, *, threads: int, slots: int) -> Iterator[Asker]:
    """A ring that serves, ended with the block; ``shares`` alone: how many processes, divided by a plan."""
    division = str(shares) if isinstance(shares, int) else ",".join(map(str, shares))
    command = [sys.executable, __file__, str(model), division, str(threads), str(slots)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            _gone()
        yield Asker(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait(START_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


if __name__ == "__main__":
    main()
