"""One member of a simulated fleet: its node, what its trace says, and the person who asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from kafila.errors import KafilaError, SessionError
from kafila.node import Node, run_node
from kafila.question import conversation
from kafila.reachability import Routers
from kafila.ring.invite import HostPort, SessionCode, parse_code
from kafila.settings import HostSettings, JoinSettings, NodeSettings
from kafila.types import FinishReason, PathKind, Question
from sims.fleet.shard import SimulatedBackend
from sims.net import Machine


class Facts:
    """A recorder that remembers, by what was recorded."""

    def __init__(self) -> None:
        self._records: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}

    def record(self, what: str, now: float, facts: Mapping[str, Any]) -> None:
        """One more."""
        self._records.setdefault(what, []).append((now, facts))

    def of(self, what: str) -> list[tuple[float, Mapping[str, Any]]]:
        """Time and facts, in order."""
        return self._records.get(what, [])


class Member:
    """The deployed node on a virtual machine. It is its own console and person."""

    def __init__(self, name: str, machine: Machine, backend: SimulatedBackend) -> None:
        self.name = name
        self.machine = machine
        self.backend = backend
        self.facts = Facts()
        self.serving = trio.Event()
        self.failure: KafilaError | None = None
        self.last_words = "it said nothing"
        self._code = ""
        self._changed = trio.Event()
        self._node: Node | None = None
        self._ended = False

    # -- the node's life ----------------------------------------------------------------------------------------------

    async def host(self, role: HostSettings) -> None:
        """Open the session, until it is over."""
        await self.machine.run(self._live, role)

    async def join(self, code: SessionCode, where: HostPort) -> None:
        """Enter it, until it is over."""
        await self.machine.run(self._live, JoinSettings(code, where, None))

    async def _live(self, role: HostSettings | JoinSettings) -> None:
        settings = NodeSettings(role, self.name, self.name.encode())
        try:
            await run_node(
                settings, self.machine, self.backend, self, self.facts, self, routers=Routers(self._gateways)
            )
        except KafilaError as error:
            self.failure = error
        finally:
            self._ended = True
            self._tell()

    async def _gateways(self) -> list[str]:
        await trio.lowlevel.checkpoint()
        return [gateway.host for gateway in self.machine.gateways()]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def invited_or_ended(self) -> None:
        """Until there is a code."""
        while not self._code and not self._ended:
            await self._changed.wait()
        if self.failure is not None:
            raise self.failure

    def code(self) -> SessionCode:
        """What friends join with."""
        return parse_code(self._code)

    async def serving_or_ended(self) -> None:
        """Until it serves, or never will."""
        while not self.serving.is_set() and not self._ended:
            await self._changed.wait()

    # -- its console and its person -----------------------------------------------------------------------------------

    def status(self, line: str) -> None:
        """A console's."""
        self.last_words = line

    def progress(self, line: str) -> None:
        """A console's."""

    def error(self, line: str) -> None:
        """What went wrong."""
        self.last_words = line

    def invite(self, code: str) -> None:
        """A console's."""
        self._code = code
        self._tell()

    async def gather(self, node: Node) -> None:
        """A person's: the host has said how many to wait for."""

    async def chat(self, node: Node) -> None:
        """A person's: stays until the simulation ends."""
        self._node = node
        self.serving.set()
        self._tell()
        await trio.sleep_forever()

    async def ask(self, prompt_tokens: int, answer_tokens: int) -> Mapping[str, Any]:
        """One question; what the trace has of its answer. Raises SessionError where the node has ended."""
        if self._node is None or self._ended:
            raise SessionError(f"{self.name} does not serve: {self.failure or self.last_words}")
        question = Question(conversation(("user", str(prompt_tokens))), max_tokens=answer_tokens)
        finish: Mapping[str, Any] = {}
        async with self._node.answer(question) as parts:
            async for part in parts:
                if part.finish not in {None, FinishReason.LENGTH}:
                    raise SessionError(f"{self.name} was not answered: {part.note or part.finish}")
                finish = {
                    "answer_tokens": part.answer_tokens,
                    "first_token_s": part.queue_s + part.prefill_s,
                    "rest_s": part.decode_s,
                }
        return finish

    # -- its links, by the trace --------------------------------------------------------------------------------------

    def _since_plan(self, what: str, other: Member, kind: PathKind | None = None) -> float | None:
        """Seconds from the plan to the first such record about ``other``; None where there is none."""
        planned = self.facts.of("plan")[-1][0]
        times = [
            at
            for at, facts in self.facts.of(what)
            if facts["member"] == other.name and (kind is None or facts.get("kind") == kind.value)
        ]
        return min(times) - planned if times else None

    def linked_s(self, other: Member) -> float:
        """From the plan to a link that carries data."""
        linked = self._since_plan("link", other)
        if linked is None:
            raise SessionError(f"{self.name} has no link to {other.name}")
        return linked

    def direct_s(self, other: Member) -> float | None:
        """From the plan to a direct path, None for never."""
        return self._since_plan("path", other, PathKind.DIRECT)

    def kind_to(self, other: Member) -> PathKind:
        """How data travels to a neighbour in the end."""
        kinds = [
            facts["kind"] for _, facts in self.facts.of("path") if facts["member"] == other.name and "kind" in facts
        ]
        return PathKind(kinds[-1]) if kinds else PathKind.RELAYED
