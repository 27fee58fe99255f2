"""One Internet for all tests of this folder, with a rendezvous and a STUN server on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kernel import stun_responder
from tests.kernel.spaces import Networks, Refused, networks

STUN_PORTS = ("3478", "3479")


@dataclass(frozen=True, slots=True)
class World:
    """Where everybody meets."""

    nets: Networks
    rendezvous: str
    """HOST:PORT."""
    stun: str
    """HOST:PORT of a server with a second address (RFC 5780)."""


def program(name: str) -> str:
    """The path of one of the project's commands, as a user would call it."""
    return str(Path(sys.executable).with_name(name))


@contextmanager
def _running(command: Sequence[str], ready: str) -> Iterator[None]:
    """``command`` until the end of the block, which begins when it has said that it is ready."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            assert ready in said, said + process.stderr.read()
            yield
        finally:
            process.kill()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Skips, with the reason, where namespaces or NAT cannot be had."""
    with ExitStack() as stack:
        try:
            nets = stack.enter_context(networks())
        except Refused as refused:
            pytest.skip(str(refused))
        meeting, (host,) = nets.server()
        stack.enter_context(_running([*meeting.prefix, program("kafila-rendezvous")], "listening on UDP port 7443"))
        stun, hosts = nets.server(hosts=2)
        answering = [*stun.prefix, sys.executable, stun_responder.__file__, *hosts, *STUN_PORTS]
        stack.enter_context(_running(answering, stun_responder.READY))
        yield World(nets, f"{host}:7443", f"{hosts[0]}:{STUN_PORTS[0]}")
