"""Many clients at deployed nodes with exact stand-in shards, in virtual time: who asks, hangs up, or asks for something
else meanwhile changes nobody's answer, and nothing of it stays behind."""

from __future__ import annotations

import gc
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
from trio.testing import MockClock, memory_stream_pair

from kafila.api.app import Desk, make_app
from kafila.api.guard import Guard
from kafila.api.metrics import Metrics
from kafila.api.openai_requests import Defaults
from kafila.api.server import Server
from kafila.rendezvous_service import rendezvous
from kafila.ring.invite import HostPort
from kafila.types import Sampling
from sims.standin import WORDS
from sims.topology import VirtualNetwork
from tests.api.world import message, parse
from tests.party import Guest, Party, solo

CLIENTS = 64
REQUESTS = 4
FIRSTS = (0, 3)
"""Where the blocks of two equal members begin."""


class _Named:
    """What hypercorn asks of a stream's socket."""

    family = socket.AF_INET

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 50_000

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 11_435


class Door:
    """A member's interface, reached over streams in memory: virtual time cannot wait for sockets."""

    def __init__(self, guest: Guest, nursery: trio.Nursery) -> None:
        assert guest.node is not None
        self._faults: list[str] = []
        self._nursery = nursery
        defaults = Defaults(Sampling(), 0, lambda: 1)
        desk = Desk(guest.node, Metrics(guest.node), defaults, lambda: 0.0, lambda begin: begin, 0.0)
        self._server = Server(make_app(desk), Guard("127.0.0.1"), self._faults.append)

    def connect(self) -> trio.StapledStream[Any, Any]:
        ours, theirs = memory_stream_pair()
        theirs.socket = _Named()  # type: ignore[attr-defined]  # as hypercorn asks it
        self._nursery.start_soon(self._server.connection, cast("trio.SocketStream", theirs))
        return ours

    def check(self) -> None:
        assert not self._faults, self._faults


@asynccontextmanager
async def session() -> AsyncIterator[list[Guest]]:
    net = VirtualNetwork(seed=1)
    server = net.machine("rendezvous")
    async with net.running(), rendezvous(server) as running, trio.open_nursery() as nursery:
        where = HostPort(server.hosts()[0], running.address.port)
        party = Party(nursery)
        guests = [party.member(f"m{n}", net.nat(f"home {n}").machine(f"m{n}")) for n in range(2)]
        code = await party.host(guests[0], 2, rendezvous=where)
        party.join(guests[1], code)
        with trio.fail_after(60):
            for guest in guests:
                await guest.serving.wait()
        yield guests
        nursery.cancel_scope.cancel()


async def client(door: Door, chance: random.Random, requests: int) -> int:
    """A few requests, one after the other; how many of them it heard to their end."""
    heard = 0
    for _ in range(requests):
        words = " ".join(chance.choices(WORDS[1:], k=chance.randint(1, 6)))
        sampling = Sampling(temperature=chance.choice([0.0, 1.0]), seed=chance.randrange(1000))
        limit = chance.randint(1, 8)
        ask = {
            "messages": [{"role": "user", "content": words}],
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "max_tokens": limit,
            "stream": chance.random() < 0.5,
        }
        leaves = chance.random() < 0.4
        response = await exchange(door, ask, chance.uniform(0, 2) if leaves else None)
        if response is not None:
            assert answer(response, streamed=bool(ask["stream"])) == solo(words, FIRSTS, sampling, limit)
            heard += 1
    return heard


async def exchange(door: Door, ask: dict[str, Any], patience_s: float | None) -> bytes | None:
    """The response; None where the client hung up before its end."""
    stream = door.connect()
    request = message(11_435, "POST", "/v1/chat/completions", json.dumps(ask).encode())
    with trio.CancelScope(deadline=trio.current_time() + (patience_s if patience_s is not None else 600)) as scope:
        await stream.send_all(request)
        response = b"".join([chunk async for chunk in stream])
    await stream.aclose()
    assert patience_s is not None or not scope.cancelled_caught
    return None if scope.cancelled_caught else response


def answer(response: bytes, *, streamed: bool) -> str:
    reply = parse(response)
    assert reply.status == 200, reply
    if not streamed:
        return str(reply.json["choices"][0]["message"]["content"])
    return "".join(event["choices"][0]["delta"].get("content", "") for event in reply.events)


async def crowd(doors: list[Door], chance: random.Random, requests: int) -> int:
    heard = 0

    async def one(number: int) -> None:
        nonlocal heard
        mine = await client(doors[number % len(doors)], random.Random(chance.random()), requests)
        heard += mine

    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            nursery.start_soon(one, number)
    return heard


async def settled(guests: list[Guest]) -> None:
    """Until the last cancellations have been round, and the head has told so."""
    await trio.sleep(30)
    gc.collect()
    for guest in guests:
        assert guest.node is not None
        ring = guest.node.ring()
        assert ring is not None
        assert (ring.running, ring.waiting) == (0, 0)
        guest.facts.records.clear()  # the test's own memory


async def test_everybody_gets_their_own_answer_and_nothing_is_left(autojump_clock: MockClock) -> None:
    chance = random.Random(7)
    async with session() as guests, trio.open_nursery() as nursery:
        doors = [Door(guest, nursery) for guest in guests]
        await crowd(doors, chance, 1)
        await settled(guests)
        objects, tasks = len(gc.get_objects()), trio.lowlevel.current_statistics().tasks_living
        heard = await crowd(doors, chance, REQUESTS)
        await settled(guests)
        assert CLIENTS < heard < CLIENTS * REQUESTS
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert len(gc.get_objects()) < objects + CLIENTS * REQUESTS  # anything kept of a request is several
        # All slots are free: as many answers as there are slots begin at once.
        assert len([one for one in await at_once(doors, 3) if b": waiting" in one]) == 0
        for door in doors:
            door.check()


async def at_once(doors: list[Door], count: int) -> list[bytes]:
    responses: list[bytes] = []

    async def one(door: Door) -> None:
        ask = {"messages": [{"role": "user", "content": "a b c"}], "stream": True, "max_tokens": 5}
        response = await exchange(door, ask, None)
        assert response is not None
        responses.append(response)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, doors[number % len(doors)])
    return responses


async def test_a_full_queue_is_429(autojump_clock: MockClock) -> None:
    async with session() as guests, trio.open_nursery() as nursery:
        door = Door(guests[1], nursery)
        statuses: list[int] = []

        async def one() -> None:
            ask = {"messages": [{"role": "user", "content": "a b c"}]}
            response = await exchange(door, ask, None)
            assert response is not None
            statuses.append(parse(response).status)

        async with trio.open_nursery() as crowd_nursery:
            for _ in range(100):
                crowd_nursery.start_soon(one)
        assert sorted(statuses) == [200] * 67 + [429] * 33
        door.check()


async def test_too_long_a_conversation_is_400(autojump_clock: MockClock) -> None:
    async with session() as guests, trio.open_nursery() as nursery:
        for guest in guests:
            door = Door(guest, nursery)
            ask = {"messages": [{"role": "user", "content": "a " * 100}], "stream": True}
            response = await exchange(door, ask, None)
            assert response is not None
            reply = parse(response)
            assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
