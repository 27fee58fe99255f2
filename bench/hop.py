"""What one hop costs the processor: an activation of 8 KiB across a real link on loopback, both ends counted.

    python bench/hop.py [--json] [--rounds N]

The link is the deployed one: Trio, one UDP socket an end, mutually authenticated QUIC. The floor is the least that any
encrypted link could do: the same bytes as six AES-GCM-sealed UDP packets, sent and received by two plain sockets. Both
run in this process, in turns, and each is taken at its quickest round, because other work on the machine only ever adds
(``context`` has the medians). A hop begins where the one before it was received, in the callback that a node would
have there, so no task of the benchmark's own is counted.

``hop_*``   hops one after another: an acknowledgement answers more than one.
``bulk_*``  16 MiB as one message.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from telling import command, tell

from kafila.endpoint import Endpoint
from kafila.ring.identity import make_identity
from kafila.ring.quic import Closed, Established, Message, QuicConnection, Stream
from kafila.types import Address, Transmit
from kafila.udp import TrioNetwork

ACTIVATION_BYTES = 8192  # one token at hidden size 4,096 in bfloat16
FLOOR_PACKETS = 6
BULK_BYTES = 16 * 2**20
HOPS_A_ROUND = 8  # a few milliseconds: short enough to fall between other work on the machine
FLOORS_A_ROUND = 64  # about as long
WARM_UP_HOPS = 200
BULK_ROUNDS = 5
TARGETS = {"hop_over_floor_1200": "<=13", "hop_over_floor_1452": "<=13", "bulk_over_floor": "<=13"}


@dataclass
class Link:
    """One end: a machine of one QUIC connection to one address, and its endpoint."""

    quic: QuicConnection
    peer: Address
    endpoint: Endpoint = field(init=False)
    on_arrival: Callable[[], None] = lambda: None

    def receive(self, data: bytes, source: Address, now: float) -> None:
        if source == self.peer:
            self.quic.receive([data], now)

    def handle_timer(self, now: float) -> None:
        self.quic.handle_timer(now)

    def next_timer(self) -> float | None:
        return self.quic.next_timer()

    def datagrams_to_send(self, now: float) -> Sequence[Transmit]:
        return [Transmit(datagram, self.peer) for datagram in self.quic.datagrams_to_send(now)]

    def drain(self) -> None:
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, Message | Established):
                self.on_arrival()
            elif isinstance(event, Closed):
                raise SystemExit(f"the link closed: {event.reason}")


async def hops(sender: Link, receiver: Link, payload: bytes, count: int) -> None:
    """``count`` messages across, each sent when the one before it has arrived."""
    done, left = trio.Event(), count

    def send() -> None:
        sender.quic.send(Stream.BULK, payload)
        sender.endpoint.poke()

    def arrived() -> None:
        nonlocal left
        left -= 1
        if left:
            send()
        else:
            done.set()

    receiver.on_arrival = arrived
    send()
    await done.wait()


async def cpu_of_hops(sender: Link, receiver: Link, payload: bytes, count: int) -> float:
    """Processor seconds a hop, both ends."""
    begin = time.process_time()
    await hops(sender, receiver, payload, count)
    return (time.process_time() - begin) / count


class Floor:
    """Sealed datagrams between two plain sockets."""

    def __init__(self) -> None:
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.receiver.bind(("127.0.0.1", 0))
        self.cipher = AESGCM(AESGCM.generate_key(128))

    def cpu_of(self, payload_bytes: int, repeats: int) -> float:
        """Processor seconds for ``payload_bytes``, six packets at a time."""
        size = -(-ACTIVATION_BYTES // FLOOR_PACKETS)
        packets = -(-payload_bytes // size)
        piece, to = bytes(size), self.receiver.getsockname()
        begin = time.process_time()
        for _ in range(repeats):
            for first in range(0, packets, FLOOR_PACKETS):
                numbers = range(first, min(first + FLOOR_PACKETS, packets))
                for number in numbers:
                    self.sender.sendto(self.cipher.encrypt(number.to_bytes(12, "big"), piece, None), to)
                for number in numbers:
                    self.cipher.decrypt(number.to_bytes(12, "big"), self.receiver.recv(2048), None)
        return (time.process_time() - begin) / repeats


async def connect(nursery: trio.Nursery, datagram_bytes: int) -> tuple[Link, Link]:
    """Two ends with an established connection and datagrams of ``datagram_bytes``."""
    client_identity, server_identity = make_identity(), make_identity()
    network, now = TrioNetwork(), trio.current_time()
    sockets = [await network.bind(), await network.bind()]
    addresses = [Address("127.0.0.1", each.address.port) for each in sockets]
    ends = (
        Link(QuicConnection.client(client_identity, server_identity.fingerprint, now, alpn="hop"), addresses[1]),
        Link(QuicConnection.server(server_identity, client_identity.fingerprint, now, alpn="hop"), addresses[0]),
    )
    ready = (trio.Event(), trio.Event())
    for end, bound, event in zip(ends, sockets, ready, strict=True):
        end.on_arrival = event.set
        end.endpoint = Endpoint(bound, end, end.drain)
        nursery.start_soon(end.endpoint.run)
    for end, event in zip(ends, ready, strict=True):
        await event.wait()
        end.quic.path_changed(trio.current_time(), datagram_bytes)
    return ends


async def measure(rounds: int) -> tuple[dict[str, float], dict[str, object]]:
    """The figures, and what they were measured on."""
    floor, payload, bulk = Floor(), os.urandom(ACTIVATION_BYTES), os.urandom(BULK_BYTES)
    times: dict[str, list[tuple[float, float]]] = {}

    async def compare(name: str, ends: tuple[Link, Link], data: bytes, hop_count: int, floor_count: int) -> None:
        floor_s = floor.cpu_of(len(data), floor_count)
        times.setdefault(name, []).append((await cpu_of_hops(*ends, data, hop_count), floor_s))

    async with trio.open_nursery() as nursery:
        small, large = await connect(nursery, 1200), await connect(nursery, 1452)
        for ends in (small, large):  # warm up: caches, the congestion window
            await cpu_of_hops(*ends, payload, WARM_UP_HOPS)
        for _ in range(rounds):
            await compare("hop_over_floor_1200", small, payload, HOPS_A_ROUND, FLOORS_A_ROUND)
            await compare("hop_over_floor_1452", large, payload, HOPS_A_ROUND, FLOORS_A_ROUND)
        for _ in range(BULK_ROUNDS):
            await compare("bulk_over_floor", large, bulk, 1, 1)
        nursery.cancel_scope.cancel()
    figures = {name: round(min(h for h, _ in pairs) / min(f for _, f in pairs), 2) for name, pairs in times.items()}
    context: dict[str, object] = {
        "rounds": rounds,
        "median_ratios": {n: round(statistics.median(h / f for h, f in pairs), 2) for n, pairs in times.items()},
        "floor_us": round(min(f for _, f in times["hop_over_floor_1452"]) * 1e6, 1),
        "hop_us": round(min(h for h, _ in times["hop_over_floor_1452"]) * 1e6, 1),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processors": os.cpu_count(),
    }
    return figures, context


def main(arguments: Sequence[str]) -> None:
    """Print one JSON object, or a table."""
    options = command(__doc__, model=False, rounds=150).parse_args(arguments)
    figures, context = trio.run(measure, options.rounds)
    tell("hop", figures, TARGETS, context, as_json=options.json)
    if not options.json:
        print(f"floor {context['floor_us']} us, hop at 1452 {context['hop_us']} us, {context['rounds']} rounds")


if __name__ == "__main__":
    main(sys.argv[1:])
