"""What a link does to packets, counted over many of them."""

from __future__ import annotations

from collections import Counter

import pytest
import trio

from kafila.types import Address
from sims.fabric import Fabric
from sims.link import MAX_IN_FLIGHT_PACKETS, Bursts, Link, Quality
from sims.packet import Drop, Packet
from sims.trace import MemoryTrace

MANY = 20_000
SOURCE, TO = Address("11.0.0.1", 1), Address("11.0.0.2", 2)


def packet(number: int, payload_bytes: int = 72) -> Packet:
    """By default 100 bytes of IPv4."""
    return Packet(SOURCE, TO, number.to_bytes(4) + bytes(payload_bytes - 4))


class Arrivals:
    """Takes what a link delivers."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.numbers: list[int] = []

    def __call__(self, packet: Packet, now: float) -> None:
        self.times.append(now)
        self.numbers.append(int.from_bytes(packet.data[:4]))


async def carry(quality: Quality, count: int, *, every_s: float = 0.0, seed: int = 1) -> tuple[Arrivals, Fabric]:
    """Send ``count`` packets, one each ``every_s``, and wait for what arrives."""
    fabric, arrivals = Fabric(seed), Arrivals()
    link = Link(fabric, "link", quality)
    for number in range(count):
        fabric.at(number * every_s, link.carry, packet(number), number * every_s, arrivals)
    async with fabric.running():
        await trio.sleep(count * every_s + 100)
    return arrivals, fabric


async def test_latency_is_exact(autojump_clock: trio.testing.MockClock) -> None:
    arrivals, _ = await carry(Quality(latency_s=0.25), 3, every_s=1.0)
    assert arrivals.times == [0.25, 1.25, 2.25]


async def test_jitter_delays_but_never_reorders(autojump_clock: trio.testing.MockClock) -> None:
    apart, _ = await carry(Quality(latency_s=0.1, jitter_s=0.02), 1000, every_s=1.0)
    delays = [time - n for time, n in zip(apart.times, apart.numbers, strict=True)]
    assert 0.1 <= min(delays) < 0.101
    assert 0.119 < max(delays) <= 0.12 + 1e-9
    close, _ = await carry(Quality(latency_s=0.1, jitter_s=0.02), 1000, every_s=0.001)
    assert close.numbers == list(range(1000))


async def test_rate_spaces_packets(autojump_clock: trio.testing.MockClock) -> None:
    arrivals, _ = await carry(Quality(latency_s=1.0, rate_bytes_per_s=1000.0), 5)
    assert arrivals.times == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5])


async def test_a_full_queue_drops_its_tail(autojump_clock: trio.testing.MockClock) -> None:
    arrivals, fabric = await carry(Quality(rate_bytes_per_s=1000.0, queue_bytes=250), 5)
    assert arrivals.numbers == [0, 1]
    assert fabric.drops == {Drop.QUEUE_FULL: 3}


async def test_a_link_without_a_rate_is_bounded_too(autojump_clock: trio.testing.MockClock) -> None:
    arrivals, fabric = await carry(Quality(latency_s=1.0), MAX_IN_FLIGHT_PACKETS + 7)
    assert len(arrivals.numbers) == MAX_IN_FLIGHT_PACKETS
    assert fabric.drops == {Drop.QUEUE_FULL: 7}


@pytest.mark.parametrize("seed", range(3))
async def test_random_loss(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    arrivals, fabric = await carry(Quality(loss=0.05), MANY, seed=seed)
    assert fabric.drops[Drop.LOSS] == MANY - len(arrivals.numbers)
    assert fabric.drops[Drop.LOSS] / MANY == pytest.approx(0.05, abs=0.005)  # three standard deviations
    assert mean_run(lost(arrivals, MANY)) == pytest.approx(1 / 0.95, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
async def test_bursty_loss(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    arrivals, _ = await carry(Quality(bursts=Bursts.of(loss=0.05, mean_packets=8)), MANY, seed=seed)
    gone = lost(arrivals, MANY)
    assert len(gone) / MANY == pytest.approx(0.05, abs=0.02)
    assert mean_run(gone) == pytest.approx(8, abs=2)


async def test_duplication(autojump_clock: trio.testing.MockClock) -> None:
    arrivals, _ = await carry(Quality(duplicate=0.1), MANY)
    counts = Counter(Counter(arrivals.numbers).values())
    assert set(counts) == {1, 2}
    assert counts[2] / MANY == pytest.approx(0.1, abs=0.01)


async def test_reordering(autojump_clock: trio.testing.MockClock) -> None:
    arrivals, _ = await carry(Quality(reorder=0.1, reorder_s=0.0055), 4000, every_s=0.001)
    assert sorted(arrivals.numbers) == list(range(4000))
    late = sum(1 for here, after in zip(arrivals.numbers, arrivals.numbers[1:], strict=False) if after < here)
    assert 0.07 < late / 4000 < 0.11
    displacement = {place - number for place, number in enumerate(arrivals.numbers) if place > number}
    assert max(displacement) == 5


async def test_a_link_that_gets_faster_overtakes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    fabric, arrivals = Fabric(1), Arrivals()
    link = Link(fabric, "link", Quality(latency_s=1.0))
    fabric.at(0.0, link.carry, packet(0), 0.0, arrivals)
    fabric.at(1.0, link.set, latency_s=0.0)
    fabric.at(1.0, link.carry, packet(1), 1.0, arrivals)
    async with fabric.running():
        await trio.sleep(2)
    assert arrivals.numbers == [0, 1]


@pytest.mark.parametrize(("host", "overhead"), [("11.0.0.2", 28), ("2a10::2", 48)])
async def test_mtu(autojump_clock: trio.testing.MockClock, host: str, overhead: int) -> None:
    fabric, arrivals = Fabric(1), Arrivals()
    link = Link(fabric, "link", Quality(mtu_bytes=1280))
    async with fabric.running():
        for payload in (1280 - overhead, 1281 - overhead):
            link.carry(Packet(Address(host, 1), Address(host, 2), bytes(payload)), 0.0, arrivals)
        await trio.sleep(1)
    assert len(arrivals.times) == 1
    assert fabric.drops == {Drop.TOO_BIG: 1}


async def test_a_cut_has_a_beginning_and_an_end(autojump_clock: trio.testing.MockClock) -> None:
    fabric, arrivals, trace = Fabric(1), Arrivals(), MemoryTrace()
    fabric.sinks.append(trace)
    link = Link(fabric, "link")
    link.cut(3.0, 6.0)
    link.cut(8.0)
    for number in range(10):
        fabric.at(number, link.carry, packet(number), float(number), arrivals)
    async with fabric.running():
        await trio.sleep(20)
    assert arrivals.numbers == [0, 1, 2, 6, 7]
    assert fabric.drops == {Drop.LINK_DOWN: 5}
    assert [r.detail for r in trace if r.packet is None] == ["the link is down", "the link is up", "the link is down"]


async def test_a_censor_sees_each_packet(autojump_clock: trio.testing.MockClock) -> None:
    fabric, arrivals = Fabric(1), Arrivals()
    link = Link(fabric, "link")
    link.censor = lambda packet: len(packet.data) > 100
    async with fabric.running():
        for number, payload in enumerate((20, 1200, 30)):
            link.carry(packet(number, payload), 0.0, arrivals)
        await trio.sleep(1)
    assert arrivals.numbers == [0, 2]
    assert fabric.drops == {Drop.CENSORED: 1}


async def test_each_link_has_luck_of_its_own(autojump_clock: trio.testing.MockClock) -> None:
    """The same seed and name draw the same; another name or seed draws otherwise."""

    async def fate(name: str, seed: int) -> list[int]:
        fabric, arrivals = Fabric(seed), Arrivals()
        Link(fabric, "a link made before")
        link = Link(fabric, name, Quality(loss=0.5))
        async with fabric.running():
            for number in range(64):
                link.carry(packet(number), trio.current_time(), arrivals)
            await trio.sleep(1)
        return arrivals.numbers

    assert await fate("x", 1) == await fate("x", 1)
    assert await fate("x", 1) != await fate("y", 1)
    assert await fate("x", 1) != await fate("x", 2)


def lost(arrivals: Arrivals, count: int) -> list[int]:
    return sorted(set(range(count)) - set(arrivals.numbers))


def mean_run(numbers: list[int]) -> float:
    """Mean length of runs of consecutive numbers."""
    runs = sum(1 for n, previous in zip(numbers, [-2, *numbers], strict=False) if n != previous + 1)
    return len(numbers) / runs
