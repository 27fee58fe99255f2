"""The real network: non-blocking UDP sockets under Trio.

One socket speaks both address families where the machine has both: it is bound to ``[::]`` and sees IPv4 peers as
mapped addresses, which never leave this file. Whatever the network does to a datagram (no route, no listener, too
large, no room) is loss: counted, never raised.

Linux takes and gives several datagrams a system call (UDP_SEGMENT and UDP_GRO, ``man 7 udp``). The six datagrams of one
frame cost 57 us across loopback without and 25 us with, so it is used where the kernel agrees.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import psutil  # type: ignore[import-untyped]  # it ships no types; we call two functions
import trio

from kafila.types import Address, Transmit

_MAPPED_PREFIX = "::ffff:"

_BUFFER_BYTES = 4 * 2**20
"""Asked of the kernel each way (it may give less): 40 ms of a gigabit link, so a busy interpreter loses nothing."""

_MAX_DATAGRAM_BYTES = 65_535

# include/uapi/linux/udp.h; Python has no names for them.
_UDP_SEGMENT = 103
_UDP_GRO = 104
_MAX_SEGMENTS = 64  # UDP_MAX_SEGMENTS of every kernel that segments
_MAX_SEGMENTED_BYTES = 65_000  # an IP packet, its headers off

_SEGMENT_SIZE = struct.Struct("=H")
_GRO_SIZE = struct.Struct("=i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_GRO_SIZE.size)

# Never fragment: QUIC forbids it (RFC 9000 section 14) and path MTU probing lives on it. Linux numbers from
# include/uapi/linux/in.h and in6.h (PROBE: set DF, ignore the cached path MTU); Darwin's from netinet/in.h.
_NO_FRAGMENTS = {
    "linux": {socket.AF_INET: (socket.IPPROTO_IP, 10, 3), socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 3)},
    "darwin": {socket.AF_INET: (socket.IPPROTO_IP, 28, 1), socket.AF_INET6: (socket.IPPROTO_IPV6, 62, 1)},
}

_REMEMBERED_ADDRESSES = 1024
"""Spellings kept: more peers than a member has, and cheap to forget on a busy rendezvous."""

# Nothing is ever sent to these (RFC 5737, RFC 3849): connecting a UDP socket only asks the routing table.
_ANYWHERE: dict[int, tuple[str, int]] = {socket.AF_INET: ("203.0.113.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}


@dataclass(slots=True)
class SocketCounters:
    """What one socket did, in datagrams."""

    sent: int = 0
    received: int = 0
    no_room: int = 0
    """Dropped because the kernel's send buffer was full."""
    unreachable: int = 0
    """Dropped for any other reason the kernel gave: no route, too large, refused."""
    receive_errors: int = 0


class UdpSocket:
    """A :class:`kafila.net.DatagramSocket` over the operating system's."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self.counters = SocketCounters()
        self._socket = raw
        self._dual = raw.family == socket.AF_INET6
        self._buffer = memoryview(bytearray(_MAX_DATAGRAM_BYTES))
        self._left: deque[tuple[bytes, Address]] = deque()
        self._segments = sys.platform == "linux"
        if self._segments:
            with suppress(OSError):  # before Linux 5.0: one datagram a call
                raw.setsockopt(socket.SOL_UDP, _UDP_GRO, 1)
        host, port = raw.getsockname()[:2]
        self._address = Address(host, port)

    @property
    def address(self) -> Address:
        """Where the socket is bound: ``::`` (both families) or ``0.0.0.0``, and the port."""
        return self._address

    async def send(self, data: bytes, to: Address) -> None:
        """Send one datagram, waiting for room."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                return self._transmit([data], to)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._descriptor())

    async def receive(self) -> tuple[bytes, Address]:
        """The next datagram and where it came from."""
        if not self._left:
            self._left.extend(await self.receive_batch(1))
        else:
            await trio.lowlevel.checkpoint()
        return self._left.popleft()

    async def receive_batch(self, limit: int) -> list[tuple[bytes, Address]]:
        """Wait for one datagram, then take what else is there: at least one, and not much over ``limit`` (what the
        kernel hands over together stays together)."""
        batch = [*self._left]
        self._left.clear()
        while not batch:
            await trio.lowlevel.wait_readable(self._descriptor())
            while len(batch) < limit and self._take(batch):
                pass
        return batch

    def send_batch(self, datagrams: Sequence[Transmit]) -> None:
        """Send now; what the kernel has no room for is dropped: to QUIC that is congestion, and it is."""
        for run, to in _runs(datagrams, _MAX_SEGMENTS if self._segments else 1):
            try:
                self._transmit(run, to)
            except BlockingIOError:
                self.counters.no_room += len(run)

    def close(self) -> None:
        """Close; a task waiting in ``receive`` gets ``trio.ClosedResourceError``."""
        if self._socket.fileno() != -1:
            trio.lowlevel.notify_closing(self._socket.fileno())
            self._socket.close()

    def _take(self, batch: list[tuple[bytes, Address]]) -> bool:
        """One system call's worth of datagrams; whether there may be more."""
        try:
            size, ancillary, _, source = self._socket.recvmsg_into([self._buffer], _ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            self._descriptor()  # an error because it was closed is the caller's
            self.counters.receive_errors += 1  # the network's word on something sent earlier
            return True
        sender = _unmapped(source)
        step = _GRO_SIZE.unpack(ancillary[0][2])[0] if ancillary else size
        if step >= size:
            batch.append((bytes(self._buffer[:size]), sender))
            self.counters.received += 1
        else:
            cuts = range(0, size, step)
            batch.extend((bytes(self._buffer[cut : min(cut + step, size)]), sender) for cut in cuts)
            self.counters.received += len(cuts)
            return False  # a batch already: asking once more to be told that there is no more costs as much again
        return True

    def _transmit(self, run: list[bytes], to: Address) -> None:
        """Datagrams of one size (the last may be shorter) to one address. Raises BlockingIOError without room."""
        target = _native(to, dual=self._dual)
        if target is None:
            self.counters.unreachable += len(run)
            return
        try:
            if len(run) == 1:
                self._socket.sendto(run[0], target)
            else:
                control = [(socket.SOL_UDP, _UDP_SEGMENT, _SEGMENT_SIZE.pack(len(run[0])))]
                self._socket.sendmsg(run, control, 0, target)
        except BlockingIOError:
            raise
        except OSError:
            self._descriptor()  # an error because it was closed is the caller's
            if len(run) == 1:
                self.counters.unreachable += 1
            else:
                self._transmit_singly(run, to)
        else:
            self.counters.sent += len(run)

    def _transmit_singly(self, run: list[bytes], to: Address) -> None:
        """After a refused run: the address may be at fault, or the kernel or the interface may not segment."""
        before = self.counters.sent
        for datagram in run:
            self._transmit([datagram], to)
        self._segments = self.counters.sent == before

    def _descriptor(self) -> int:
        descriptor = self._socket.fileno()
        if descriptor == -1:
            raise trio.ClosedResourceError("this socket was closed")
        return descriptor


class TrioNetwork:
    """The machine this process runs on: a :class:`kafila.net.Network`. ``host``: by this address of it alone."""

    def __init__(self, host: str | None = None) -> None:
        self._host = host

    async def bind(self, port: int = 0) -> UdpSocket:
        """A socket for both address families, or for IPv4 alone where the machine has no IPv6, or for the one address.

        Raises OSError when the port is taken, or the machine does not have the address.
        """
        await trio.lowlevel.checkpoint()
        if self._host is not None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            return UdpSocket(_bound(family, port, self._host))
        try:
            raw = _bound(socket.AF_INET6, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            raw = _bound(socket.AF_INET, port)
        return UdpSocket(raw)

    def interface_addresses(self) -> list[Address]:
        """Addresses of the interfaces that are up: those the machine would reach the world from, then the others,
        loopback last. IPv6 link-local ones are left out: they mean nothing without a zone."""
        up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
        hosts = [
            entry.address
            for name, entries in psutil.net_if_addrs().items()
            if name in up
            for entry in entries
            if entry.family in _ANYWHERE
        ]
        outward = {_outward_host(family) for family in _ANYWHERE}
        usable = [host for host in hosts if "%" not in host and not _is_link_local_v6(host)]
        return [Address(host, 0) for host in sorted(usable, key=lambda host: _rank(host, outward))]


def _bound(family: socket.AddressFamily, port: int, host: str | None = None) -> socket.socket:
    anywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"  # noqa: S104  - members come from anywhere
    raw = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        raw.bind((host or anywhere, port))
    except OSError:
        raw.close()
        raise
    _tune(raw)
    return raw


def _tune(raw: socket.socket) -> None:
    """Ask for what helps; a kernel that refuses serves us all the same."""
    families = _NO_FRAGMENTS.get(sys.platform, {})
    # A socket for both families has both families' options.
    options = (
        list(families.values()) if raw.family == socket.AF_INET6 else [families[f] for f in families if f == raw.family]
    )
    options += [
        (socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES),
    ]
    for level, option, value in options:
        with suppress(OSError):
            raw.setsockopt(level, option, value)


def _runs(datagrams: Sequence[Transmit], most: int) -> Iterator[tuple[list[bytes], Address]]:
    """Consecutive datagrams that one system call can carry: one address, one size, the last perhaps shorter."""
    at = 0
    while at < len(datagrams):
        first, to = datagrams[at]
        size = len(first)
        run = [first]
        room = min(most, _MAX_SEGMENTED_BYTES // max(size, 1))
        for data, other in islice(datagrams, at + 1, at + room):
            if other != to or len(data) > size:
                break
            run.append(data)
            if len(data) < size:
                break
        yield run, to
        at += len(run)


@lru_cache(maxsize=_REMEMBERED_ADDRESSES)
def _native(address: Address, *, dual: bool) -> tuple[str, int] | None:
    """``address`` as the socket's family writes it; ``None`` where it cannot be reached, or is not an IP literal (which
    the socket would ask the DNS about, and block)."""
    try:
        version = ipaddress.ip_address(address.host).version
    except ValueError:
        return None
    if version == 4:
        return (_MAPPED_PREFIX + address.host if dual else address.host, address.port)
    return (address.host, address.port) if dual else None


@lru_cache(maxsize=_REMEMBERED_ADDRESSES)
def _unmapped(source: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    host = source[0].partition("%")[0]
    return Address(host.removeprefix(_MAPPED_PREFIX) if "." in host else host, source[1])


def _outward_host(family: int) -> str | None:
    """The address this machine would speak to the world from; ``None`` without a route. Sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE[family])
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_link_local_v6(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return address.version == 6 and address.is_link_local


def _rank(host: str, outward: set[str | None]) -> tuple[bool, bool, bool, bool]:
    address = ipaddress.ip_address(host)
    return (address.is_loopback, address.is_link_local, host not in outward, address.version == 6)
