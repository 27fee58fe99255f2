"""When to probe: the punch schedule, retries, the rate limit, round-trip estimates and keepalives."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Protocol

PUNCH_OFFSETS_S = (0.0, 0.02, 0.06, 0.14, 0.3, 0.62, *(0.62 + 0.5 * n for n in range(1, 7)))
"""From the start of a round (DESIGN section 5). Dense at first, because the two sides begin within one signalling
delay of each other and the first crossing pair opens both NATs; sparse later, for lost packets and late starters."""
PUNCH_WINDOW_S = 4.0
RETRY_AFTER_S = (5.0, 15.0, 60.0)
"""Pauses between rounds that found nothing; the last repeats, because networks heal without telling anybody."""

MAX_PROBES_PER_S = 100
"""To one peer, in any second (DESIGN section 5): what a hostile member can make us send at a victim."""

KEEPALIVE_S = 15.0
KEEPALIVE_SPREAD = 0.2
"""15 +- 3 s: half of the 30 s after which common NATs drop an idle mapping (RFC 4787 REQ-5 asks for two minutes, which
many ignore), and spread so that neither the two sides nor many sessions fall into step."""
MIN_KEEPALIVE_S = 5.0

FIRST_PTO_S = 0.5
"""Before any round trip was measured: twice a slow continental one."""
_GRANULARITY_S = 0.001  # RFC 9002 section 6.1.2


def sooner(one: float | None, other: float | None) -> float | None:
    """The earlier of two times; None is never."""
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def next_due(times: Iterable[float | None], now: float, ready_at: float) -> float:
    """The earliest of ``times``, infinity for none. What is due already waits for ``ready_at``."""
    later, overdue = math.inf, math.inf
    for time in times:
        if time is None:
            continue
        if time > now:
            later = min(later, time)
        else:
            overdue = min(overdue, time)
    return min(later, max(overdue, ready_at))


class Randomness(Protocol):
    """What the path machine asks of ``random.Random`` or, outside simulations, ``random.SystemRandom``."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...

    def randbytes(self, n: int) -> bytes:
        """``n`` random bytes."""
        ...


class RateLimit:
    """At most ``limit`` takings in any second."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: deque[float] = deque(maxlen=limit)

    def ready_at(self) -> float:
        """The earliest time of the next taking; minus infinity while there is room."""
        return self._taken[0] + 1.0 if len(self._taken) == self._limit else float("-inf")

    def take(self, now: float) -> bool:
        """Take one, if the limit allows it."""
        if now < self.ready_at():
            return False
        self._taken.append(now)
        return True


class RoundTrip:
    """Smoothed round-trip time (RFC 9002 section 5.3) and the probe timeout that follows from it."""

    __slots__ = ("_variance_s", "samples", "smoothed_s")

    def __init__(self) -> None:
        self.smoothed_s: float | None = None
        self.samples = 0
        self._variance_s = 0.0

    def measured(self, sample_s: float) -> None:
        """One ping was acked after ``sample_s``."""
        self.samples += 1
        if self.smoothed_s is None:
            self.smoothed_s = sample_s
            self._variance_s = sample_s / 2
            return
        self._variance_s += (abs(self.smoothed_s - sample_s) - self._variance_s) / 4
        self.smoothed_s += (sample_s - self.smoothed_s) / 8

    @property
    def pto_s(self) -> float:
        """How long to wait for an ack before sending again (RFC 9002 section 6.2.1; acks are never delayed)."""
        if self.smoothed_s is None:
            return FIRST_PTO_S
        return self.smoothed_s + max(4 * self._variance_s, _GRANULARITY_S)


class Keepalive:
    """How long a path may lie idle: 15 +- 3 s, less once a NAT has been seen to forget sooner."""

    def __init__(self) -> None:
        self.interval_s = KEEPALIVE_S

    def jittered_s(self, random: Randomness) -> float:
        """The next pause, spread by a fifth either way."""
        return self.interval_s * (1.0 + KEEPALIVE_SPREAD * (2.0 * random.random() - 1.0))

    def forgotten_after(self, idle_s: float) -> bool:
        """A mapping was gone after ``idle_s`` without a packet out; whether that shortened the interval."""
        shorter = max(MIN_KEEPALIVE_S, idle_s / 2)
        if shorter >= self.interval_s:
            return False
        self.interval_s = shorter
        return True
