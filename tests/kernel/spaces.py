"""Network namespaces as machines, routers and the Internet between them.

    internet  one bridge, 11.0.0.0/16 (public as far as kafila can tell; nothing leaves the namespaces)
    carrier   one bridge, 100.64.0.0/10, behind a router on the Internet
    home      one bridge, 192.168.1.0/24 in every home, behind a router on either

Every namespace is named after the process that made it. :func:`networks` removes them all, and first those of processes
that did not live to do so. No network interface is ever made outside of them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from itertools import count

from tests.kernel import rules

_PREFIX = "kafila-test"
_OURS = re.compile(rf"{_PREFIX}-(\d+)-\d+\b")


# What the tools print of the kernel's refusals, as opposed to our mistakes.
_REFUSALS = ("not permitted", "Permission denied", "Read-only", "not supported", "No such file", "Unknown device type")


class Refused(Exception):
    """This machine does not let us; the text says what is missing, or what the kernel said."""


def run(*command: str, text: str = "") -> str:
    """What a command prints. Raises Refused with its complaint where the machine is to blame."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = f"{' '.join(command)}: {done.stderr.strip()}"
        if any(refusal in complaint for refusal in _REFUSALS):
            raise Refused(complaint)
        raise RuntimeError(complaint)
    return done.stdout


@dataclass(frozen=True, slots=True)
class Space:
    """One namespace: a machine or a router. ``host`` is its address on the side of the Internet."""

    name: str
    host: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command, runs it here."""
        return ("ip", "netns", "exec", self.name)

    def ip(self, *words: str) -> None:
        """Configure links, addresses and routes."""
        run("ip", "-n", self.name, *words)


class Segment:
    """A bridge in ``space``, which is also the way out. Addresses are given in turn, the bridge's own first."""

    def __init__(self, space: Space, net: IPv4Network) -> None:
        self.space = space
        self._net = net
        self._hosts = net.hosts()
        self._ports = count()
        self.gateway = str(next(self._hosts))
        space.ip("link", "add", "lan", "type", "bridge")
        space.ip("addr", "add", f"{self.gateway}/{net.prefixlen}", "dev", "lan")
        space.ip("link", "set", "lan", "up")

    def next_host(self) -> str:
        """An address nobody has yet."""
        return str(next(self._hosts))

    def plug(self, space: Space, interface: str) -> None:
        """A cable from here to ``interface`` of ``space``, which gets its address and its default route."""
        port = f"port{next(self._ports)}"
        space.ip("link", "add", interface, "type", "veth", "peer", "name", port, "netns", self.space.name)
        self.space.ip("link", "set", port, "master", "lan", "up")
        self.alias(space, interface, space.host)
        space.ip("link", "set", interface, "up")
        space.ip("route", "add", "default", "via", self.gateway)

    def alias(self, space: Space, interface: str, host: str) -> None:
        """One more address."""
        space.ip("addr", "add", f"{host}/{self._net.prefixlen}", "dev", interface)


@dataclass(frozen=True, slots=True)
class Home:
    """A router and the machines behind it. ``public`` is the address the Internet sees them at."""

    public: str
    lan: Segment


class Networks:
    """An Internet, and what hangs on it."""

    def __init__(self) -> None:
        self._numbers = count()
        self.internet = Segment(self._space(""), IPv4Network("11.0.0.0/16"))

    def server(self, *, hosts: int = 1) -> tuple[Space, list[str]]:
        """A machine on the Internet, and its addresses."""
        space = self._space(self.internet.next_host())
        self.internet.plug(space, "eth0")
        more = [self.internet.next_host() for _ in range(hosts - 1)]
        for host in more:
            self.internet.alias(space, "eth0", host)
        return space, [space.host, *more]

    def home(self, nat: str, carrier: Home | None = None) -> Home:
        """A home whose router obeys ``nat``, on the Internet or behind a ``carrier``."""
        uplink, public = (self.internet, None) if carrier is None else (carrier.lan, carrier.public)
        return self._routed(nat, uplink, IPv4Network("192.168.1.0/24"), public)

    def carrier(self, nat: str) -> Home:
        """A carrier-grade NAT (RFC 6598); its machines are the routers of homes."""
        return self._routed(nat, self.internet, IPv4Network("100.64.0.0/10"), None)

    def machine(self, home: Home) -> Space:
        """One more machine in a home."""
        machine = self._space(home.lan.next_host())
        home.lan.plug(machine, "eth0")
        return machine

    def _routed(self, nat: str, uplink: Segment, inner: IPv4Network, public: str | None) -> Home:
        router = self._space(uplink.next_host())
        uplink.plug(router, "wan")
        lan = Segment(router, inner)
        run(*router.prefix, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        run(*router.prefix, "nft", "-f", "-", text=nat)
        return Home(public or router.host, lan)

    def _space(self, host: str) -> Space:
        space = Space(f"{_PREFIX}-{os.getpid()}-{next(self._numbers)}", host)
        run("ip", "netns", "add", space.name)
        space.ip("link", "set", "lo", "up")
        return space


@contextmanager
def networks() -> Iterator[Networks]:
    """Networks that are gone after the block. Raises Refused on the way in where they cannot be had."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Refused("network namespaces need Linux and root")
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        raise Refused(f"not installed: {', '.join(missing)} (scripts/kernel_tests.sh installs them on Debian)")
    _remove_orphans()
    try:
        made = Networks()
        made.home(rules.RANDOM)
        yield made
    finally:
        _remove(os.getpid())


def _remove_orphans() -> None:
    """What a killed run left: its namespaces, and whatever still runs in them."""
    for owner in {int(owner) for owner in _OURS.findall(run("ip", "netns", "list"))}:
        if not _lives(owner):
            _remove(owner)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(owner: int) -> None:
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        match = _OURS.fullmatch(name)
        if match is not None and int(match[1]) == owner:
            for process in run("ip", "netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            run("ip", "netns", "delete", name)
