"""A whole session of deployed nodes with stand-in shards, over any network: the virtual one or real loopback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import trio

from kafila.backend import Duty
from kafila.errors import KafilaError
from kafila.head import Language
from kafila.nat.driver import OpenStream
from kafila.net import Network
from kafila.node import Node, run_node
from kafila.plan import Plan
from kafila.planning import Wishes
from kafila.question import conversation
from kafila.reachability import Routers
from kafila.ring.agreement import ModelOffer
from kafila.ring.frames import Text
from kafila.ring.invite import HostPort, SessionCode, parse_code
from kafila.settings import HostSettings, JoinSettings, NodeSettings
from kafila.shard.worker import Job, Loaded, Result
from kafila.types import Capability, ModelManifest, Question, Sampling
from sims.net import Machine
from sims.standin import WORDS, Letters, StandInShard, solo_tokens

BLOCKS = 6
CONTEXT = 60
SLOTS = 3
STAGE_S = 0.005
MANIFEST = ModelManifest(
    name="stand-in",
    blocks=BLOCKS,
    block_bytes=1000,
    head_bytes=500,
    head_read_bytes=400,
    kv_bytes_per_token_per_block=2,
    hidden_bytes=4,
    max_context=CONTEXT,
)


class StandInWorker:
    """A worker whose every job takes ``STAGE_S`` of the run's clock."""

    def __init__(self, shard: StandInShard, on_result: Callable[[Result], None], nursery: trio.Nursery) -> None:
        self._shard = shard
        self._on_result = on_result
        self._nursery = nursery
        self._jobs_in, self._jobs = trio.open_memory_channel[Job](64)
        self._scope = trio.CancelScope()

    def start(self) -> None:
        self._nursery.start_soon(self._run)

    async def _run(self) -> None:
        with self._scope:
            await trio.sleep(STAGE_S)
            self._on_result(Loaded("stand-in", STAGE_S))
            async for job in self._jobs:
                await trio.sleep(STAGE_S)
                self._on_result(self._shard.do(job))

    def submit(self, job: Job) -> None:
        self._jobs_in.send_nowait(job)

    def stop(self) -> None:
        self._scope.cancel()


class StandInBackend:
    """A device of a stated memory and speed. ``fault`` is raised where it is named: offer, measure, worker."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        memory_bytes: int = 10**6,
        bandwidth: float = 1e6,
        blocks: int = BLOCKS,
        faults: Mapping[str, KafilaError] | None = None,
    ) -> None:
        self._nursery = nursery
        self._memory_bytes = memory_bytes
        self._bandwidth = bandwidth
        self._manifest = replace(MANIFEST, blocks=blocks)
        self._faults = faults or {}

    async def _may_fail(self, where: str) -> None:
        await trio.lowlevel.checkpoint()
        if where in self._faults:
            raise self._faults[where]

    async def offer(self, model: str, context: int | None, slots: int) -> ModelOffer:
        await self._may_fail("offer")
        return ModelOffer(self._manifest, model, "{}", "float32", context or CONTEXT, slots)

    async def measure(self, offer: ModelOffer) -> Capability:  # noqa: ARG002  - a backend's
        await self._may_fail("measure")
        return Capability("stand-in", self._memory_bytes, self._bandwidth, 1e-4, 1e9)

    async def worker(self, offer: ModelOffer, duty: Duty, on_result: Callable[[Result], None]) -> StandInWorker:  # noqa: ARG002  - a backend's
        await self._may_fail("worker")
        return StandInWorker(StandInShard(duty.blocks.first, duty.scored_percent), on_result, self._nursery)

    async def language(self, offer: ModelOffer) -> Language:  # noqa: ARG002  - a backend's
        await trio.lowlevel.checkpoint()
        return Letters()


class Screen:
    """A console that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.codes: list[str] = []
        self.invited = trio.Event()

    def status(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, line: str) -> None:
        self.lines.append(line)

    def error(self, line: str) -> None:
        self.errors.append(line)

    def invite(self, code: str) -> None:
        self.codes.append(code)
        self.invited.set()


class Facts:
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.records: list[tuple[str, float, Mapping[str, Any]]] = []

    def record(self, what: str, now: float, facts: Mapping[str, Any]) -> None:
        self.records.append((what, now, facts))

    def plan(self) -> Plan:
        """The one that was shown."""
        (plan,) = {facts["plan"] for what, _, facts in self.records if what == "plan"}
        return Plan.from_json(plan)


class Guest:
    """One member: its node, what its person saw, and how it ended."""

    def __init__(self, name: str, network: Network, backend: StandInBackend) -> None:
        self.name = name
        self.network = network
        self.backend = backend
        self.screen = Screen()
        self.facts = Facts()
        self.node: Node | None = None
        self.serving = trio.Event()
        self.leaving = trio.Event()
        self.ended = trio.Event()
        self.error: KafilaError | None = None
        self.scope = trio.CancelScope()
        self.start_at_once = False
        self.stun: tuple[HostPort, ...] = ()
        self.port_mapping = True
        self.open_stream: OpenStream | None = None
        """To a gateway that speaks UPnP."""

    async def gather(self, node: Node) -> None:
        if self.start_at_once:
            node.start()

    async def chat(self, node: Node) -> None:
        self.node = node
        self.serving.set()
        await self.leaving.wait()

    async def run(self, role: HostSettings | JoinSettings) -> None:
        settings = NodeSettings(role, self.name, self.name.encode(), stun=self.stun, port_mapping=self.port_mapping)
        try:
            with self.scope:
                await run_node(
                    settings,
                    self.network,
                    self.backend,
                    self.screen,
                    self.facts,
                    self,
                    routers=Routers(self._gateways, self.open_stream),
                )
        except KafilaError as error:
            self.error = error
        finally:
            self.ended.set()

    async def _gateways(self) -> list[str]:
        """What a virtual machine's system says; real ones are not asked, tests stay on loopback."""
        await trio.lowlevel.checkpoint()
        network = self.network
        return [a.host for a in network.gateways() if ":" not in a.host] if isinstance(network, Machine) else []

    async def ask(self, words: str, *, sampling: Sampling = Sampling(), max_tokens: int = 0) -> list[Text]:  # noqa: B008  - frozen
        """The parts of an answer."""
        await self.serving.wait()
        if self.node is None:
            raise RuntimeError(f"{self.name} has never served")
        question = Question(conversation(("user", words)), None, sampling, max_tokens)
        async with self.node.answer(question) as texts:
            return [text async for text in texts]


async def answer_of(guest: Guest, words: str, **options: Any) -> str:
    return "".join(text.delta for text in await guest.ask(words, **options))


def solo(words: str, firsts: Sequence[int], sampling: Sampling = Sampling(), max_tokens: int = 0) -> str:  # noqa: B008  - frozen
    """What the ring whose members' blocks begin at ``firsts`` must answer."""
    prompt = [WORDS.index(word) for word in words.split()]
    return "".join(WORDS[token] for token in solo_tokens(prompt, firsts, sampling, max_tokens, CONTEXT))


class Party:
    """A host and its friends."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.guests: list[Guest] = []

    def member(self, name: str, network: Network, **backend: Any) -> Guest:
        guest = Guest(name, network, StandInBackend(self.nursery, **backend))
        self.guests.append(guest)
        return guest

    async def host(
        self, guest: Guest, members: int | None, *, rendezvous: HostPort | None = None, wishes: Wishes | None = None
    ) -> SessionCode:
        """Open a session; returns when there is a code (or raises what the host died of)."""
        role = HostSettings("model", members, None, SLOTS, rendezvous, wishes or Wishes())
        self._start(guest, role)
        await first_of(guest.screen.invited.wait, guest.ended.wait)
        if guest.error is not None:
            raise guest.error
        return parse_code(guest.screen.codes[0])

    def join(self, guest: Guest, code: SessionCode, *, visiting: bool = False) -> None:
        """As a member, or ``visiting``: as one that asks and holds no share."""
        if code.rendezvous is None:
            raise RuntimeError("a code of the virtual network names its rendezvous")
        self._start(guest, JoinSettings(code, code.rendezvous, None, visiting))

    def _start(self, guest: Guest, role: HostSettings | JoinSettings) -> None:
        """On its machine, where there is one: then the node sleeps when the machine does."""
        if isinstance(guest.network, Machine):
            self.nursery.start_soon(guest.network.run, guest.run, role)
        else:
            self.nursery.start_soon(guest.run, role)


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Until one of them returns."""
    async with trio.open_nursery() as nursery:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            await one()
            nursery.cancel_scope.cancel()

        for one in waits:
            nursery.start_soon(wait, one)


__all__ = ["BLOCKS", "CONTEXT", "Guest", "Party", "Screen", "answer_of", "first_of", "solo"]
