"""The network seam: what a node needs of the machine it runs on.

A node is handed its :class:`Network`. The real one is Trio UDP; in the simulator each virtual machine is one, so the
deployed node runs unmodified behind emulated NATs in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kafila.types import Address, Transmit


class DatagramSocket(Protocol):
    """One bound UDP socket."""

    @property
    def address(self) -> Address:
        """Where the socket is bound (the host part may be a wildcard)."""
        ...

    async def send(self, data: bytes, to: Address) -> None:
        """Send one datagram; one too large or unroutable is dropped, as a network would."""
        ...

    async def receive(self) -> tuple[bytes, Address]:
        """The next datagram and where it came from."""
        ...

    async def receive_batch(self, limit: int) -> list[tuple[bytes, Address]]:
        """Wait for one datagram, then take whatever else has arrived, up to ``limit``, without waiting.

        Draining before answering is what keeps a QUIC driver from sending an acknowledgement a packet.
        """
        ...

    def send_batch(self, datagrams: Sequence[Transmit]) -> None:
        """Send now, without waiting; what the operating system has no room for is dropped, as a network would."""
        ...

    def close(self) -> None:
        """Give the socket back. Closing twice is allowed."""
        ...


class Network(Protocol):
    """One machine's view of the network."""

    async def bind(self, port: int = 0) -> DatagramSocket:
        """A UDP socket for both address families where the machine has both; port 0 picks a free one.

        Raises OSError when the port is taken.
        """
        ...

    def interface_addresses(self) -> list[Address]:
        """Addresses of the machine's own interfaces, port 0, most useful first, loopback last."""
        ...
