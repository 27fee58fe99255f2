"""Sessions of real processes for benchmarks: started once, asked in turns, read by their traces (not run by itself)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 300.0
POLL_S = 0.02
PROMPTS = (
    "Tell me a long story about a caravan that crosses a desert.",
    "Explain how bread is baked, step by step and at length.",
    "Describe the life of a lighthouse keeper in great detail.",
    "Write a long letter from a sailor to his sister.",
)
"""Questions that are answered at length."""


class Session:
    """A ring of processes on this machine with one worker thread each; questions are asked at the host."""

    def __init__(self, folder: Path, model: Path, shares: Sequence[int], options: Sequence[str]) -> None:
        self._trace = folder / "host.jsonl"
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        members = ["--members", str(len(shares)), "--shares", ",".join(map(str, shares))]
        host = ["--host", "--model", str(model), *members, *options, "--trace", str(self._trace)]
        self._host = self._start("host", host)
        code = self._wait_for("host", "session code: ")
        for n in range(1, len(shares)):
            self._start(f"m{n}", ["--join", code, "--serve"])
            self._wait_for("host", f"{n + 1} of {len(shares)} here")

    def _start(self, name: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.err").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kafila", "--threads", "1", "--name", name, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def _wait_for(self, name: str, text: str) -> str:
        """The rest of the first status line of ``name`` that has ``text``."""
        log = self._folder / f"{name}.err"
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for line in log.read_text().splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line.partition(text)[2].strip()
            if any(process.poll() is not None for process in self._processes):
                break
            time.sleep(POLL_S)
        raise SystemExit(f"the benchmark's session did not form:\n{log.read_text()}")

    def ready(self) -> None:
        """Wait until it serves."""
        self._wait_for("host", "serving: every member may ask")

    @property
    def api(self) -> str:
        """Where the host's local interface is."""
        return self._wait_for("host", "local API and page: ").partition(" ")[0]

    def ask(self, prompt: str) -> dict[str, Any]:
        """Ask at the host; the trace's record of the answer."""
        before = len(self.answers())
        stdin = self._host.stdin
        if stdin is None:
            raise SystemExit("the host takes no questions")
        stdin.write(prompt.encode() + b"\n")
        stdin.flush()
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            answers = self.answers()
            if len(answers) > before:
                return answers[-1]
            time.sleep(POLL_S)
        raise SystemExit("the benchmark's question was not answered")

    def answers(self) -> list[dict[str, Any]]:
        """The records of answers so far, those asked through the local interface too."""
        return [record for record in self.records() if record["what"] == "answer"]

    def records(self) -> list[dict[str, Any]]:
        """The host's trace so far."""
        lines = self._trace.read_text().splitlines(keepends=True) if self._trace.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def stop(self) -> None:
        """End every process."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(10)
            if process.stdin is not None:
                process.stdin.close()


@contextmanager
def sessions(model: Path, divisions: Sequence[Sequence[int]], options: Sequence[str] = ()) -> Iterator[list[Session]]:
    """One session a division, all formed before any is asked, all ended with the block."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        formed = []
        for n, shares in enumerate(divisions):
            own = Path(folder) / str(n)
            own.mkdir()
            session = Session(own, model, shares, options)
            stack.callback(session.stop)
            session.ready()
            formed.append(session)
        yield formed
