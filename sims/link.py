"""One direction of one wire: how long a packet takes, and whether it arrives.

A :class:`Quality` describes a link; a :class:`Link` carries packets with it. Each link draws from a generator of its
own, so that changing one link never changes another's luck.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sims.fabric import Fabric
from sims.packet import IPV6_HEADER_BYTES, UDP_HEADER_BYTES, Drop, Packet

MAX_IN_FLIGHT_PACKETS = 65_536
"""No wire holds more: at 1,500 bytes that is 100 MB, ten times 1 Gbit/s over 80 ms."""

ETHERNET_MTU_BYTES = 1500
_FITS_ETHERNET_BYTES = ETHERNET_MTU_BYTES - IPV6_HEADER_BYTES - UDP_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Bursts:
    """Gilbert-Elliott loss: two states, and a draw per packet whether to change between them."""

    to_bad: float
    """Probability per packet of going from the good state to the bad."""
    to_good: float
    """Probability per packet of recovering: bursts last 1 / to_good packets on average."""
    loss_in_bad: float = 1.0
    loss_in_good: float = 0.0

    @classmethod
    def of(cls, loss: float, mean_packets: float) -> Bursts:
        """Bursts of ``mean_packets`` lost packets that together lose the fraction ``loss`` of all."""
        to_good = 1.0 / mean_packets
        return cls(to_bad=to_good * loss / (1.0 - loss), to_good=to_good)


@dataclass(frozen=True, slots=True)
class Quality:
    """What a link does to packets. The default is a perfect wire of Ethernet's MTU."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    """Each packet waits up to this much longer, uniformly, but overtakes none."""
    rate_bytes_per_s: float | None = None
    queue_bytes: int = 64 * 1024
    """What waits for a link with a rate; a packet that does not fit is dropped (tail drop)."""
    loss: float = 0.0
    bursts: Bursts | None = None
    duplicate: float = 0.0
    reorder: float = 0.0
    """Probability that a packet is held back by ``reorder_s`` while later ones pass it."""
    reorder_s: float = 0.010
    mtu_bytes: int = ETHERNET_MTU_BYTES
    """IP header included. A larger packet vanishes without a word, as behind a firewall that eats ICMP."""


PERFECT = Quality()


class Link:
    """Carries packets one way. ``up``, ``quality`` and ``censor`` may be changed at any time."""

    def __init__(self, fabric: Fabric, name: str, quality: Quality = PERFECT) -> None:
        self.name = name
        self.quality = quality
        self.up = True
        self.censor: Callable[[Packet], bool] | None = None
        """Asked of each packet where set: True drops it (small probes pass, data does not, and such)."""
        self.carried = 0
        """Packets put on the wire, duplicates not counted."""
        self._fabric = fabric
        self._random = fabric.random(f"link/{name}")
        self._rank = fabric.new_rank()
        self._serial = 0
        self._in_flight = 0
        self._in_burst = False
        self._busy_until = 0.0
        self._last_arrival = 0.0

    def set(self, **changes: Any) -> None:
        """Change some fields of the quality: ``link.set(loss=0.05, mtu_bytes=1280)``."""
        self.quality = dataclasses.replace(self.quality, **changes)

    def cut(self, start_s: float, stop_s: float = float("inf")) -> None:
        """A black hole from ``start_s`` to ``stop_s`` of the clock, in this direction alone."""
        self._fabric.at(start_s, self._switch, up=False)
        if stop_s != float("inf"):
            self._fabric.at(stop_s, self._switch, up=True)

    def _switch(self, *, up: bool) -> None:
        self.up = up
        self._fabric.note(self.name, "the link is up" if up else "the link is down")

    def carry(self, packet: Packet, now: float, deliver: Callable[[Packet, float], None]) -> None:
        """Take a packet at ``now``; call ``deliver`` with it and its arrival time, zero, one or two times."""
        if (
            self.quality is PERFECT
            and len(packet.data) <= _FITS_ETHERNET_BYTES
            and self.up
            and self.censor is None
            and not self._in_flight
        ):
            self.carried += 1  # as most wires are: from a machine to its own LAN, in no time
            deliver(packet, now)
            return
        lost = self._verdict(packet, now)
        if lost is not None:
            self._fabric.drop(self.name, lost, packet, now)
            return
        self.carried += 1
        departure = self._departure(packet, now)
        self._schedule(packet, now, self._arrival(departure), deliver)
        if self.quality.duplicate and self._random.random() < self.quality.duplicate:
            self._schedule(packet, now, self._arrival(departure), deliver)

    def _verdict(self, packet: Packet, now: float) -> Drop | None:
        quality = self.quality
        if not self.up:
            return Drop.LINK_DOWN
        if packet.ip_bytes > quality.mtu_bytes:
            return Drop.TOO_BIG
        if self.censor is not None and self.censor(packet):
            return Drop.CENSORED
        if quality.loss and self._random.random() < quality.loss:
            return Drop.LOSS
        if quality.bursts is not None and self._lost_in_burst(quality.bursts):
            return Drop.BURST
        if self._in_flight >= MAX_IN_FLIGHT_PACKETS or self._queue_is_full(packet, now):
            return Drop.QUEUE_FULL
        return None

    def _lost_in_burst(self, bursts: Bursts) -> bool:
        change = bursts.to_good if self._in_burst else bursts.to_bad
        if self._random.random() < change:
            self._in_burst = not self._in_burst
        return self._random.random() < (bursts.loss_in_bad if self._in_burst else bursts.loss_in_good)

    def _queue_is_full(self, packet: Packet, now: float) -> bool:
        rate = self.quality.rate_bytes_per_s
        if rate is None or self._busy_until <= now:
            return False
        return (self._busy_until - now) * rate + packet.ip_bytes > self.quality.queue_bytes

    def _departure(self, packet: Packet, now: float) -> float:
        """When the last bit has been sent."""
        rate = self.quality.rate_bytes_per_s
        if rate is None:
            return now
        self._busy_until = max(now, self._busy_until) + packet.ip_bytes / rate
        return self._busy_until

    def _arrival(self, departure: float) -> float:
        quality = self.quality
        arrival = departure + quality.latency_s
        if quality.jitter_s:
            arrival += self._random.uniform(0.0, quality.jitter_s)
        if quality.reorder and self._random.random() < quality.reorder:
            return arrival + quality.reorder_s
        self._last_arrival = max(self._last_arrival, arrival)
        return self._last_arrival

    def _schedule(self, packet: Packet, now: float, arrival: float, deliver: Callable[[Packet, float], None]) -> None:
        if arrival <= now and not self._in_flight:
            deliver(packet, now)  # a wire that takes no time has nothing to wait for
            return
        self._in_flight += 1
        self._serial += 1
        self._fabric.push(arrival, self._rank, self._serial, partial(self._arrive, packet, deliver))

    def _arrive(self, packet: Packet, deliver: Callable[[Packet, float], None], now: float) -> None:
        self._in_flight -= 1
        deliver(packet, now)
