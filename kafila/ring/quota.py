"""Token buckets: how much a member, a session or a network may use (pure)."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network

MAX_KEYS = 4096
"""Networks remembered at once, about 200 bytes each. Only validated addresses get here."""


class TokenBucket:
    """``burst`` at once, ``rate`` a second in the long run. Units are the caller's (bytes, attempts)."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def take(self, cost: float, now: float) -> bool:
        """Take ``cost`` if it is there."""
        if self.ready_at(cost, now) > now:
            return False
        self._level -= cost
        return True

    def ready_at(self, cost: float, now: float) -> float:
        """When ``cost`` can be taken: ``now`` or later. A cost above the burst is taken from a full bucket."""
        self._refill(now)
        missing = min(cost, self._burst) - self._level
        return now + missing / self._rate if missing > 0 else now

    def full(self, now: float) -> bool:
        """Whether the bucket is as good as a new one."""
        self._refill(now)
        return self._level >= self._burst

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now


class Buckets:
    """A bucket for every key. A full one is forgotten when room is needed, since a new one is the same."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: dict[str, TokenBucket] = {}

    def get(self, key: str, now: float) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            self._make_room(now)
            bucket = self._buckets[key] = TokenBucket(self._rate, self._burst, now)
        return bucket

    def __len__(self) -> int:
        return len(self._buckets)

    def _make_room(self, now: float) -> None:
        if len(self._buckets) < MAX_KEYS:
            return
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if not bucket.full(now)}
        while len(self._buckets) >= MAX_KEYS:
            del self._buckets[next(iter(self._buckets))]


def network_of(host: str) -> str:
    """What one household or host can take addresses from at will: an IPv4 address, an IPv6 /64 (RFC 6177 section 2)."""
    address = ip_address(host)
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return str(ip_network((int(address) >> 64 << 64, 64)))
        address = address.ipv4_mapped
    return str(address)
