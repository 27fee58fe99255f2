"""Real ``kafila-node`` processes on this machine: started, listened to, and always ended."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import trio

PATIENCE_S = 90.0
"""A cold start imports a tensor library, and this may be a slow machine with a full test run beside it."""
CODE = "session code: "


@cache
def own_cache_home() -> str:
    """Where processes keep what they measure: what a machine full of tests measured is nothing for its owner's
    sessions, and two workers do not write one file."""
    folder = tempfile.mkdtemp(prefix="kafila-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Process:
    """One command. What it prints is kept; tests wait for lines, never for time."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._changed = trio.Event()
        self._silent = trio.Event()
        self.out = ""
        self.err = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def listen(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, self._process.stdout, "out")
            nursery.start_soon(self._read, self._process.stderr, "err")
        self._silent.set()
        self._tell()

    async def _read(self, stream: trio.abc.ReceiveStream | None, name: str) -> None:
        assert stream is not None
        data = b""
        async for chunk in stream:
            data += chunk
            setattr(self, name, data.decode(errors="replace"))
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, text: str, *, stream: str = "err") -> str:
        """The rest of the first line with ``text`` in it, once that line is whole."""
        with trio.move_on_after(PATIENCE_S):
            while True:
                for line in getattr(self, stream).splitlines(keepends=True):
                    if text in line and line.endswith("\n"):
                        return str(line.partition(text)[2].strip())
                if self._silent.is_set():
                    break  # it has ended, and nothing more will come
                await self._changed.wait()
        raise AssertionError(f"no {text!r} in {stream}:\n{self.err}\n{self.out}")

    async def until_count(self, text: str, count: int) -> None:
        """Until ``text`` stands ``count`` times in what it said on stderr, or it has ended and been read to the end."""
        with trio.fail_after(PATIENCE_S):
            while self.err.count(text) < count and not self._silent.is_set():
                await self._changed.wait()

    async def changed(self) -> None:
        """Until it has printed something more; a process that has ended never does."""
        assert not self._silent.is_set(), f"it has ended:\n{self.err}\n{self.out}"
        with trio.fail_after(PATIENCE_S):
            await self._changed.wait()

    async def say(self, line: str) -> None:
        assert self._process.stdin is not None
        await self._process.stdin.send_all(line.encode() + b"\n")

    async def hang_up(self) -> None:
        """End its standard input."""
        assert self._process.stdin is not None
        await self._process.stdin.aclose()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit code, once its last words have been read too: processes are often reaped before their pipes are
        empty."""
        with trio.fail_after(PATIENCE_S):
            code = await self._process.wait()
            await self._silent.wait()
            return code

    async def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        await self._process.wait()


class Machine:
    """Starts processes and ends them all with the block they were started in."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.processes: list[Process] = []

    async def start(self, *command: str) -> Process:
        """Start any program."""
        environment = {**os.environ, "XDG_CACHE_HOME": own_cache_home()}
        process = Process(
            await trio.lowlevel.open_process(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
        )
        self.processes.append(process)
        self._nursery.start_soon(process.listen)
        return process

    async def command(self, *arguments: str, prefix: Sequence[str] = ()) -> Process:
        """Start ``python -m`` with these arguments, after ``prefix`` (such as ``ip netns exec NAME``)."""
        return await self.start(*prefix, sys.executable, "-m", *arguments)

    async def node(self, *options: str, prefix: Sequence[str] = ()) -> Process:
        return await self.command("kafila", "--threads", "1", *options, prefix=prefix)

    async def ring(
        self, model: Path, members: int, *host_options: str, friend_options: Sequence[str] = ()
    ) -> list[Process]:
        """A session that serves: the host first, then its friends in the order they joined."""
        options = ["--host", "--model", str(model), "--members", str(members), "--name", "m0", *host_options]
        host = await self.node(*options)
        code = await host.until(CODE)
        ring = [host]
        for n in range(1, members):
            ring.append(await self.node("--join", code, "--name", f"m{n}", *friend_options))
            await host.until(f"{n + 1} of {members} here")
        for process in ring:
            await process.until("serving: every member may ask")
        return ring


@asynccontextmanager
async def machine() -> AsyncIterator[Machine]:
    async with trio.open_nursery() as nursery:
        here = Machine(nursery)
        try:
            yield here
        finally:
            with trio.CancelScope(shield=True):
                for process in here.processes:
                    await process.stop()
            nursery.cancel_scope.cancel()
