"""The one socket of a node, driven for one sans-IO machine.

The driver decides nothing: it drains the socket into the machine, flushes once, and arms one timer. Draining before the
flush lets one acknowledgement answer many packets; flushing after every input keeps frames from waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from kafila.net import DatagramSocket
from kafila.types import Address, Transmit
from kafila.wire import Kind, classify

BATCH_LIMIT = 64
"""Datagrams taken before the machine may answer: a full receive of the kernel's, and at most about 2 ms of work."""

MIN_TIMER_S = 0.001
"""No timer is armed closer than this, the granularity of QUIC's own timers (RFC 9002 section 6.1.2): a machine that
asks to be called at once, for ever, gets slow instead of taking the processor."""


class DatagramMachine(Protocol):
    """A sans-IO machine that speaks datagrams. None of its methods may raise for anything a network can send."""

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """One datagram came."""
        ...

    def handle_timer(self, now: float) -> None:
        """The time that ``next_timer`` named has come."""
        ...

    def next_timer(self) -> float | None:
        """When ``handle_timer`` wants to be called, ``None`` for never."""
        ...

    def datagrams_to_send(self, now: float) -> Sequence[Transmit]:
        """What should leave now. Called again without new input it has nothing more to say."""
        ...


class Endpoint:
    """Drives ``machine`` over ``socket``.

    ``on_progress`` is called after every input, before what the machine has to say leaves, and again after it has left:
    drain the machine's events there. What it queues into the machine leaves at once; calling :meth:`poke` from it is
    allowed and not needed.
    """

    def __init__(
        self, socket: DatagramSocket, machine: DatagramMachine, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        self.unknown_datagrams = 0
        """Datagrams whose first byte nobody answers to, dropped."""
        self._socket = socket
        self._machine = machine
        self._on_progress = on_progress
        self._alarm = trio.CancelScope()
        self._settling = False

    @property
    def address(self) -> Address:
        """Where the socket is bound."""
        return self._socket.address

    async def run(self) -> None:
        """Drive until cancelled, or until the socket is closed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_time)
            self.poke()
            while True:
                try:
                    batch = await self._socket.receive_batch(BATCH_LIMIT)
                except trio.ClosedResourceError:
                    nursery.cancel_scope.cancel()
                    return
                now = trio.current_time()
                for data, source in batch:
                    if classify(data) is Kind.UNKNOWN:
                        self.unknown_datagrams += 1
                    else:
                        self._machine.receive(data, source, now)
                self._settle()

    def poke(self) -> None:
        """Send what was queued into the machine, now. Call it from any task of the same run."""
        if not self._settling:
            self._settle()

    async def _keep_time(self) -> None:
        while True:
            due = self._machine.next_timer()
            soonest = trio.current_time() + MIN_TIMER_S
            with trio.CancelScope(deadline=math.inf if due is None else max(due, soonest)) as self._alarm:
                await trio.sleep_forever()
            now = trio.current_time()
            due = self._machine.next_timer()
            if due is not None and due <= now:
                self._machine.handle_timer(now)
                self._settle()

    def _settle(self) -> None:
        """Let the owner drain events and the machine speak, until neither has more to say; then look at the clock.

        The time is read anew each time: what the owner did meanwhile must not lie in the machine's future.
        """
        self._settling = True
        try:
            self._on_progress()
            while transmits := self._machine.datagrams_to_send(trio.current_time()):
                self._socket.send_batch(transmits)
                self._on_progress()
        finally:
            self._settling = False
        # The alarm is only ever moved forward: one that rings too early looks again, and that is rarer than datagrams.
        due = self._machine.next_timer()
        if due is not None and due < self._alarm.deadline:
            self._alarm.deadline = max(due, trio.current_time() + MIN_TIMER_S)
