"""``kafila-rendezvous`` on its own, as a process between processes."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import sys
from pathlib import Path

from tests.integration.models import talking_checkpoint
from tests.integration.processes import CODE, machine

COMMAND = "from kafila.cli import rendezvous; rendezvous()"


def free_port() -> int:
    """Of those that systems give nobody who did not ask for one, so that it is still free when it is used."""
    ports = list(range(20_000, 30_000))
    random.shuffle(ports)
    for port in ports:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::", port))
            return port
    raise AssertionError("no free port")


async def test_members_meet_at_it_and_go_on_without_it(tmp_path: Path) -> None:
    folder = talking_checkpoint(tmp_path / "tiny")
    port = free_port()
    async with machine() as here:
        rendezvous = await here.start(sys.executable, "-c", COMMAND, "--bind", f"[::]:{port}")
        await rendezvous.until("listening on UDP port")
        meet = ["--rendezvous", f"127.0.0.1:{port}"]
        host = await here.node("--host", "--model", str(folder), "--members", "2", *meet)
        code = await host.until(CODE)
        assert code.endswith(f"@127.0.0.1:{port}")
        friend = await here.node("--join", code, "--max-tokens", "20")
        await friend.until("serving: every member may ask")
        await friend.until("direct")
        rendezvous.signal(signal.SIGTERM)
        assert await rendezvous.wait() == 0
        await host.until("the rendezvous is lost")
        await friend.say("hello")
        await friend.until_count(" tokens, ", 1)
        assert "Traceback" not in rendezvous.err + host.err + friend.err


async def test_a_port_in_use_is_told_in_a_line() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as holder:
        holder.bind(("::", 0))
        async with machine() as here:
            process = await here.start(sys.executable, "-c", COMMAND, "--bind", f"[::]:{holder.getsockname()[1]}")
            assert await process.wait() == 1
            assert process.err.startswith("error: ")
            assert "Traceback" not in process.err
