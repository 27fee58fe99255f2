"""``make demo``: a ring of three separate processes on this machine, and a prompt at one of them.

The host and one friend run in the background, in sessions of their own so that Ctrl-C at the prompt is the prompt's
alone; a second friend is the process the person talks to. It is a member like any other, which is the point.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

import click
import trio

from kafila.demo import default_folder

START_TIMEOUT_S = 60.0
"""A cold start imports a tensor library from disk."""
STOP_TIMEOUT_S = 3.0
MAX_LOG_LINES = 20
_CODE = "session code: "
_THREADS = max((os.cpu_count() or 1) // 3, 1)
"""A third of the processor each: three members that each took all of it would wait for one another."""
_NODE = (sys.executable, "-m", "kafila", "--threads", str(_THREADS))


class Background:
    """A member nobody types at; its last lines are kept in case it fails."""

    def __init__(self, name: str, options: Sequence[str]) -> None:
        self.name = name
        self.log: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self.code: str | None = None
        self.ready = trio.Event()
        """Set when the code is known, or never will be."""
        self._options = options
        self._process: trio.Process | None = None

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Until it ends or is told to stop."""
        self._process = await trio.lowlevel.open_process(
            [*_NODE, *self._options, "--name", self.name, "--serve"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        task_status.started()
        try:
            await self._listen(self._process)
            await self._process.wait()
        finally:
            with trio.CancelScope(shield=True):
                await self._stop(self._process)

    async def _listen(self, process: trio.Process) -> None:
        unfinished = b""
        if process.stderr is not None:
            async for chunk in process.stderr:
                *lines, unfinished = (unfinished + chunk).split(b"\n")
                for line in lines:
                    self._heard(line.decode(errors="replace"))
        self.ready.set()

    def _heard(self, line: str) -> None:
        self.log.append(line)
        if line.startswith(_CODE):
            self.code = line.removeprefix(_CODE).strip()
            self.ready.set()

    async def _stop(self, process: trio.Process) -> None:
        if process.poll() is None:
            process.terminate()
            with trio.move_on_after(STOP_TIMEOUT_S):
                await process.wait()
        if process.poll() is None:
            process.kill()


async def demonstrate(prompt: str) -> int:
    """Run the ring until the person leaves. The exit code of the member they talked to."""
    async with trio.open_nursery() as nursery:
        host = Background("host", ["--host", "--model", str(default_folder()), "--members", "3"])
        await nursery.start(host.run)
        with trio.move_on_after(START_TIMEOUT_S):
            await host.ready.wait()
        if host.code is None:
            click.echo("\n".join(["the host did not start:", *host.log]), err=True)
            nursery.cancel_scope.cancel()
            return 1
        await nursery.start(Background("friend", ["--join", host.code]).run)
        code = await _talk(host.code, prompt)
        nursery.cancel_scope.cancel()
    return code


async def _talk(session: str, prompt: str) -> int:
    """The member in front, with this process's own terminal or one prompt."""
    command = [*_NODE, "--join", session, "--name", "you"]
    person = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE if prompt else None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_pass_on_signals, person)
        if person.stdin is not None:
            async with person.stdin as stdin:
                await stdin.send_all(prompt.replace("\n", " ").encode() + b"\n")
        await person.wait()
        nursery.cancel_scope.cancel()
    return person.returncode or 0


async def _pass_on_signals(person: trio.Process) -> None:
    """Ctrl-C reaches the member in front from the terminal itself; what is sent to us alone is passed on."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if number == signal.SIGTERM:
                person.terminate()


@click.command(help="Chat with a small model served by three processes on this machine.")
@click.option("--prompt", default="", envvar="KAFILA_PROMPT", help="Ask this one question and end.")
def main(prompt: str) -> None:
    sys.exit(trio.run(demonstrate, prompt))


if __name__ == "__main__":
    main(prog_name="python -m kafila.demo.ring")
