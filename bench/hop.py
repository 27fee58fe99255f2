"""What one hop costs the processor: an activation of 8 KiB across a real link on loopback, both ends counted.

    python bench/hop.py [--json] [--rounds N]

The link is the deployed one: Trio, one UDP socket an end, mutually authenticated QUIC. The floor is the least that any
encrypted link could do: the same bytes as six AES-GCM-sealed UDP packets, sent and received by two plain sockets. Both
run in this process, in turns, and the figure is the median over rounds of the ratio of their processor times, so the
machine's speed and its other work cancel.

``hop_*``     hops one after another, as in prefill; an acknowledgement answers more than one hop.
``spaced_*``  hops 15 ms apart, as in decode: every hop pays for its own acknowledgement and timers.
``bulk_*``    16 MiB as one message, per byte.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kafila.endpoint import Endpoint
from kafila.ring.identity import make_identity
from kafila.ring.quic import Closed, Established, Message, QuicConnection, Stream
from kafila.types import Address, Transmit
from kafila.udp import TrioNetwork

ACTIVATION_BYTES = 8192  # one token at hidden size 4,096 in bfloat16
FLOOR_PACKETS = 6
BULK_BYTES = 16 * 2**20
HOPS_A_ROUND = 40
SPACED_HOPS_A_ROUND = 10
SPACING_S = 0.015
TARGETS = {"hop_over_floor_1200": "<=13", "hop_over_floor_1452": "<=13", "bulk_over_floor": "<=13"}


@dataclass
class Link:
    """One end: a machine of one QUIC connection to one address, its endpoint, and what arrived."""

    quic: QuicConnection
    peer: Address
    endpoint: Endpoint = field(init=False)
    arrived: trio.Event = field(default_factory=trio.Event)

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
                self.arrived.set()
            elif isinstance(event, Closed):
                raise SystemExit(f"the link closed: {event.reason}")


async def hop(sender: Link, receiver: Link, payload: bytes) -> None:
    """One message across."""
    receiver.arrived = trio.Event()
    sender.quic.send(Stream.BULK, payload)
    sender.endpoint.poke()
    await receiver.arrived.wait()


async def cpu_of_hops(sender: Link, receiver: Link, payload: bytes, count: int, spacing_s: float) -> float:
    """Processor seconds a hop, both ends."""
    begin = time.process_time()
    for _ in range(count):
        await hop(sender, receiver, payload)
        if spacing_s:
            await trio.sleep(spacing_s)
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
    for end, bound in zip(ends, sockets, strict=True):
        end.endpoint = Endpoint(bound, end, end.drain)
        nursery.start_soon(end.endpoint.run)
    for end in ends:
        await end.arrived.wait()
        end.quic.path_changed(trio.current_time(), datagram_bytes)
    return ends


async def measure(rounds: int) -> tuple[dict[str, float], dict[str, object]]:
    """The figures, and what they were measured on."""
    floor, payload = Floor(), os.urandom(ACTIVATION_BYTES)
    ratios: dict[str, list[float]] = {}
    floors_s: list[float] = []
    hops_s: list[float] = []

    async def compare(name: str, ends: tuple[Link, Link], data: bytes, count: int, spacing_s: float = 0.0) -> float:
        floor_s = floor.cpu_of(len(data), count)
        hop_s = await cpu_of_hops(*ends, data, count, spacing_s)
        ratios.setdefault(name, []).append(hop_s / floor_s)
        if name == "hop_over_floor_1452":
            floors_s.append(floor_s)
            hops_s.append(hop_s)
        return hop_s

    async with trio.open_nursery() as nursery:
        small, large = await connect(nursery, 1200), await connect(nursery, 1452)
        for ends in (small, large):  # warm up: caches, the congestion window
            await cpu_of_hops(*ends, payload, HOPS_A_ROUND, 0.0)
        for _ in range(rounds):
            await compare("hop_over_floor_1200", small, payload, HOPS_A_ROUND)
            await compare("hop_over_floor_1452", large, payload, HOPS_A_ROUND)
            await compare("spaced_over_floor_1452", large, payload, SPACED_HOPS_A_ROUND, SPACING_S)
        bulk = os.urandom(BULK_BYTES)
        for _ in range(3):
            await compare("bulk_over_floor", large, bulk, 1)
        nursery.cancel_scope.cancel()
    context = {
        "rounds": rounds,
        "floor_us": round(statistics.median(floors_s) * 1e6, 1),
        "hop_us": round(statistics.median(hops_s) * 1e6, 1),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processors": os.cpu_count(),
    }
    return {name: round(statistics.median(values), 2) for name, values in ratios.items()}, context


def main(arguments: Sequence[str]) -> None:
    """Print one JSON object, or a table."""
    parser = argparse.ArgumentParser(description="What one hop costs the processor, against sealed plain UDP.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    figures, context = trio.run(measure, options.rounds)
    if options.json:
        print(json.dumps({"name": "hop", "figures": figures, "targets": TARGETS, "context": context}))
        return
    for name, value in figures.items():
        print(f"{name:26} {value:8.2f}   {TARGETS.get(name, '')}")
    print(f"floor {context['floor_us']} us, hop at 1452 {context['hop_us']} us, {context['rounds']} rounds")


if __name__ == "__main__":
    main(sys.argv[1:])
