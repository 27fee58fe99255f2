"""One Internet for all tests of this folder, with two rendezvous on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kernel.spaces import Networks, Refused, networks

PORT = 7443


@dataclass(frozen=True, slots=True)
class World:
    """Where everybody meets."""

    nets: Networks
    rendezvous: str
    """HOST:PORT of one with a second address, as RFC 5780 wants it."""
    plain_rendezvous: str
    """HOST:PORT of one without."""


@contextmanager
def _rendezvous(nets: Networks, *, hosts: int) -> Iterator[str]:
    """HOST:PORT of a ``kafila-rendezvous`` that runs during the block on a machine with one or two addresses."""
    space, (host, *second) = nets.server(hosts=hosts)
    where = f"{host}:{PORT}"
    options = [option for address in second for option in ("--alt-address", address)]
    command = [*space.prefix, str(Path(sys.executable).with_name("kafila-rendezvous")), "--bind", where, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            assert f"listening on UDP port {PORT}" in said
            yield where
        finally:
            process.kill()


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    """Skips, with the reason, where namespaces or NAT cannot be had."""
    with ExitStack() as stack:
        try:
            nets = stack.enter_context(networks())
        except Refused as refused:
            pytest.skip(str(refused))
        yield World(
            nets,
            rendezvous=stack.enter_context(_rendezvous(nets, hosts=2)),
            plain_rendezvous=stack.enter_context(_rendezvous(nets, hosts=1)),
        )
