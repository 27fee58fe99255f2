"""How a NAT picks the external port of a new mapping (RFC 4787 section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

DYNAMIC_PORTS = range(1024, 65_536)
"""A NAT keeps off the well-known ports (RFC 4787 REQ-3 note)."""

_RANDOM_TRIES = 32
"""Draws before a linear search: with half of all ports taken, 32 draws all fail once in four thousand million."""


class PortAllocator(Protocol):
    """The allocator of one NAT address, or of one subscriber's block of ports."""

    def allocate(self, wanted: int, is_free: Callable[[int], bool], now: float) -> int | None:
        """A free port for an internal endpoint on port ``wanted``, or None where all are taken."""
        ...


class PortPolicy(Protocol):
    """Makes allocators; the part a scenario names."""

    def allocator(self, ports: range, random: Random) -> PortAllocator:
        """An allocator that gives out ``ports``."""
        ...


def _first_free(ports: range, start: int, is_free: Callable[[int], bool]) -> int | None:
    """The first free port from index ``start``, going round."""
    for offset in range(len(ports)):
        port = ports[(start + offset) % len(ports)]
        if is_free(port):
            return port
    return None


@dataclass(frozen=True, slots=True)
class RandomPorts:
    """Every mapping's port is an independent draw."""

    def allocator(self, ports: range, random: Random) -> PortAllocator:
        return _RandomAllocator(ports, random)


@dataclass(frozen=True, slots=True)
class Preserving:
    """The internal port where it is free, else a random one: no overloading (RFC 4787 REQ-3)."""

    def allocator(self, ports: range, random: Random) -> PortAllocator:
        return _PreservingAllocator(ports, random)


@dataclass(frozen=True, slots=True)
class Sequential:
    """Each mapping's port is ``step`` past the last one's.

    Others behind the NAT make ``cross_traffic_per_s`` mappings a second on average (Poisson), which consume ports
    between two of ours.
    """

    step: int = 1
    cross_traffic_per_s: float = 0.0

    def allocator(self, ports: range, random: Random) -> PortAllocator:
        return _SequentialAllocator(self, ports, random)


class _RandomAllocator:
    def __init__(self, ports: range, random: Random) -> None:
        self._ports = ports
        self._random = random

    def allocate(self, wanted: int, is_free: Callable[[int], bool], now: float) -> int | None:  # noqa: ARG002 - protocol
        for _ in range(_RANDOM_TRIES):
            port = self._random.choice(self._ports)
            if is_free(port):
                return port
        return _first_free(self._ports, self._random.randrange(len(self._ports)), is_free)


class _PreservingAllocator:
    def __init__(self, ports: range, random: Random) -> None:
        self._ports = ports
        self._otherwise = _RandomAllocator(ports, random)

    def allocate(self, wanted: int, is_free: Callable[[int], bool], now: float) -> int | None:
        if wanted in self._ports and is_free(wanted):
            return wanted
        return self._otherwise.allocate(wanted, is_free, now)


class _SequentialAllocator:
    def __init__(self, policy: Sequential, ports: range, random: Random) -> None:
        self._policy = policy
        self._ports = ports
        self._random = random
        self._next = random.randrange(len(ports))
        self._last_time = 0.0

    def allocate(self, wanted: int, is_free: Callable[[int], bool], now: float) -> int | None:  # noqa: ARG002 - protocol
        others = _poisson(self._random, self._policy.cross_traffic_per_s * (now - self._last_time))
        self._last_time = now
        self._next += others * self._policy.step
        port = _first_free(self._ports, self._next, is_free)
        if port is not None:
            self._next = self._ports.index(port) + self._policy.step
        return port


def _poisson(random: Random, mean: float) -> int:
    """A Poisson draw; past a mean of 500, where exp() underflows, its normal approximation."""
    if mean <= 0:
        return 0
    if mean > 500:
        return max(0, round(random.gauss(mean, math.sqrt(mean))))
    limit, count, product = math.exp(-mean), 0, random.random()
    while product > limit:
        count += 1
        product *= random.random()
    return count
