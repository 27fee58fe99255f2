"""A session forming at one member: what its session machine asks for, done (Trio).

    MeasureWanted --backend--> measured    PlanWanted --planner--> assign | end    BuildWanted --links, shard--> ready

Tasks run in the node's nursery. A step that fails is told to the others before this member goes.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import trio

from kafila.backend import Backend
from kafila.building import Build, make_build
from kafila.console import Console
from kafila.errors import DeviceError, KafilaError, MemberLeft, PlanDeclined, SessionError, SessionFull
from kafila.fetching import Fetches
from kafila.members import birthday_role, link_candidates
from kafila.mesh import Mesh
from kafila.nat.birthday import BirthdayRole
from kafila.plan import Declined, describe
from kafila.planning import in_ring, make_plan
from kafila.ring import steps
from kafila.ring.agreement import Assign, MemberInfo, ModelOffer, Reachable, RefusalReason, SessionMessage
from kafila.ring.session import MemberSession
from kafila.ring.session_host import HostSession
from kafila.room import Room
from kafila.settings import HostSettings, JoinSettings, NodeSettings
from kafila.shard.worker import Coming
from kafila.sharing import Sharing
from kafila.trace import Recorder
from kafila.types import Capability, NodeId

SURVEY_PATIENCE_S = 1.0
"""How long a member that has measured its device waits for the survey of its network, which began before. Then it goes
without a report, and what comes later still reaches its neighbours."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a formation works with; ``poke`` makes the endpoint send, ``fail`` ends the node with an error (None: by
    somebody's wish)."""

    settings: NodeSettings
    backend: Backend
    console: Console
    recorder: Recorder
    nursery: trio.Nursery
    mesh: Mesh
    room: Room
    surveyed: trio.Event
    """Set once this machine's network has been surveyed."""
    sharing: Sharing
    poke: Callable[[], None]
    finish: Callable[[KafilaError | None], None]


class Formation:
    """One member's way from being let in to serving. ``offer`` is the host's own, None at a member."""

    def __init__(self, around: Surroundings, me: MemberInfo, host: NodeId, offer: ModelOffer | None) -> None:
        self.serving = trio.Event()
        """Set once prompts may be asked."""
        self.build: Build | None = None
        self._around = around
        self._me = me
        self._offer = offer
        self._here: tuple[str, ...] = ()
        """Who was here when last told."""
        self._own_fetch = Fetches(everybody=False)
        self._fetches = Fetches(everybody=offer is not None)
        self._session: HostSession | MemberSession
        around.nursery.start_soon(around.sharing.run)
        role = around.settings.role
        if isinstance(role, HostSettings) and offer is not None:
            self._session = HostSession(me, offer, role.members)
        else:
            self._session = MemberSession(me, host, trio.current_time(), guest=self._visits_by_wish)
            around.nursery.start_soon(self._keep_time, self._session)

    async def _keep_time(self, session: MemberSession) -> None:
        """Wake the member's machine when it asks to be woken."""
        while (due := session.next_timer()) is not None:
            await trio.sleep_until(due)
            session.handle_timer(trio.current_time())
            self._around.poke()

    # -- what the node tells ------------------------------------------------------------------------------------------

    def receive(self, sender: NodeId, message: SessionMessage) -> None:
        """An opened message of another member's."""
        self._session.receive(sender, message)

    def gone(self, member: NodeId) -> None:
        """A member is gone for good."""
        if self.build is not None:
            self.build.sharing.link_down(member)
        self._session.gone(member)

    def told_over(self, why: str) -> None:
        """A neighbour said why the session is over."""
        self._session.end(why)

    def start(self) -> None:
        """Host: do not wait for more members."""
        if isinstance(self._session, HostSession):
            self._session.start()

    def leave(self) -> None:
        """The owner leaves; a host ends the session with it."""
        if isinstance(self._session, HostSession):
            self._session.end(f"{self._me.name} ended the session", wished=True)

    def move(self) -> bool:
        """Act on what the session machine has to say, and send what it wants sent. Whether there was anything."""
        moved = False
        while (event := self._session.next_event()) is not None:
            moved = True
            self._act(event)
        while (outgoing := self._session.next_message()) is not None:
            moved = True
            self._around.room.post(outgoing.to, outgoing.message)
        if self.build is not None:
            self.build.drain()
        return moved

    def reachable(self, reachable: Reachable) -> None:
        """This machine's network is known better, or is another."""
        self._me = self._me.moved(reachable)
        self._session.reachable(reachable)

    def part_in_birthday(self, peer: NodeId) -> BirthdayRole | None:
        """What this member can do where punching towards a neighbour has failed."""
        known = () if self.build is None else (*self.build.assignment.ring, *self.build.guests.values())
        info = next((info for info in known if info.node_id == peer), None)
        return None if info is None else birthday_role(info, self._me)

    def is_guest(self, peer: NodeId) -> bool:
        """Whether a peer is linked with this member, the head, as a guest."""
        return self.build is not None and peer in self.build.guests

    @property
    def _visits_by_wish(self) -> bool:
        role = self._around.settings.role
        return isinstance(role, JoinSettings) and role.guest

    # -- what the session machine asks for ----------------------------------------------------------------------------

    def _act(self, event: steps.Event) -> None:
        console = self._around.console
        match event:
            case steps.Present() | steps.Dropped() | steps.Guests():
                self._tell_who_is_here(event)
            case steps.MeasureWanted(name, offer):
                self._measure_wanted(name, offer)
            case steps.Welcomed() | steps.GuestCame() | steps.GuestLeft():
                self._guest(event)
            case steps.PlanWanted(members):
                self._plan(members)
            case steps.BuildWanted(assignment):
                self._build_wanted(assignment)
            case steps.Fetching():
                self._fetching(event)
            case steps.Moved(member):
                candidates = link_candidates(member, self._me)
                self._around.mesh.peer_moved(member.node_id, candidates, trio.current_time())
            case steps.Serving():
                console.status("serving: every member may ask")
                # What is here now stays: the collector need not look through a tensor library between two tokens.
                gc.freeze()
                if self.build is not None:
                    self.build.serving.begin_telling_edges()
                self.serving.set()
            case steps.Ended():
                self._ended(event)

    def _tell_who_is_here(self, event: steps.Present | steps.Dropped | steps.Guests) -> None:
        if isinstance(event, steps.Present):
            if left := [name for name in self._here if name not in event.names]:
                self._around.console.status(f"{', '.join(left)} left before the ring was formed")
            self._here = event.names
        self._around.console.status(_who_is_here(event))

    async def _attempt(self, step: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """A step whose failure the others must hear of, too."""
        try:
            await step(*arguments)
        except KafilaError as error:
            self._trouble(error)

    def _trouble(self, error: KafilaError) -> None:
        self._around.finish(error)
        if isinstance(self._session, MemberSession):
            self._session.trouble(str(error))
        else:
            self._session.end(f"{self._me.name} cannot go on: {error}", (self._me.name,))
        self._around.poke()

    def _measure_wanted(self, name: str, offer: ModelOffer) -> None:
        role = self._around.settings.role
        if isinstance(role, JoinSettings) and role.model is not None:
            offer = replace(offer, source=role.model, revision="")
        self._offer = offer
        self._me = replace(self._me, name=name)
        self._around.nursery.start_soon(self._attempt, self._measure, offer)

    async def _measure(self, offer: ModelOffer) -> None:
        self._around.console.status(f"measuring this device for {offer.manifest.name}")
        capability = await self._around.backend.measure(offer)
        for line in (_capability_line(capability), *capability.remarks):
            self._around.console.status(line)
        with trio.move_on_after(SURVEY_PATIENCE_S):  # the plan is the better for it
            await self._around.surveyed.wait()
        self._session.measured(capability)
        self._around.poke()

    def _plan(self, members: Sequence[tuple[MemberInfo, Capability]]) -> None:
        """The host divides the model."""
        session, role, offer = self._session, self._around.settings.role, self._offer
        if not isinstance(session, HostSession) or not isinstance(role, HostSettings) or offer is None:
            return
        plan = make_plan(members, offer, role.wishes)
        if isinstance(plan, Declined):
            text = "; ".join([plan.message, *plan.remedies])
            self._around.finish(PlanDeclined(text))
            session.end(text)
        else:
            session.assign(plan.to_json(), [info.node_id for info in in_ring(plan, members)])

    def _build_wanted(self, assignment: Assign) -> None:
        around, now = self._around, trio.current_time()
        if self._offer is None:
            return
        try:
            self.build = make_build(
                self._me,
                self._offer,
                assignment,
                around.mesh,
                around.recorder,
                around.sharing,
                poke=around.poke,
                on_broken=lambda text: self._trouble(DeviceError(text)),
                on_coming=self._coming,
            )
        except KafilaError as error:
            self._trouble(error)
            return
        around.recorder.record("plan", now, {"plan": assignment.plan})
        for line in describe(self.build.plan).splitlines():
            around.console.status(line)
        if self.build.duty is None and not self._visits_by_wish:
            around.console.status("the ring is faster without this machine: it asks as a guest, and lends nothing")
        self.build.open_links(around.mesh, now, around.poke)
        around.nursery.start_soon(self._attempt, self._serve, self.build)
        around.nursery.start_soon(self._attempt, self._report_ready, self.build)

    def _guest(self, event: steps.Welcomed | steps.GuestCame | steps.GuestLeft) -> None:
        mesh, now = self._around.mesh, trio.current_time()
        match event:
            case steps.Welcomed(name, offer):
                self._offer, self._me = offer, replace(self._me, name=name)
                text = f"a guest here: the session serves {offer.manifest.name}, this machine lends nothing"
                self._around.console.status(text)
            case steps.GuestCame(member) if self.build is not None:
                self.build.guest_came(member, mesh, now)
            case steps.GuestLeft(node) if self.build is not None:
                self.build.guest_left(node, mesh, now)

    def _coming(self, coming: Coming) -> None:
        """This member's share is being fetched."""
        now = trio.current_time()
        if self._own_fetch.is_due(self._me.name, coming.done_bytes, coming.wanted_bytes, now):
            self._session.fetched(coming.done_bytes, coming.wanted_bytes)

    def _fetching(self, event: steps.Fetching) -> None:
        now, fetches = trio.current_time(), self._fetches
        fetches.update(event.name, event.done_bytes, event.wanted_bytes, now)
        if (line := fetches.finished(event.name, now)) is not None:
            self._around.console.status(line)
        elif event.done_bytes < event.wanted_bytes:
            self._around.console.progress(fetches.line(now))

    async def _serve(self, build: Build) -> None:
        if build.duty is None:
            await build.serving.visit()
        else:
            await build.serving.run(self._around.backend, build.offer, build.duty)

    async def _report_ready(self, build: Build) -> None:
        await build.wait()
        self._session.ready()
        self._around.poke()

    def _ended(self, ended: steps.Ended) -> None:
        if ended.wished:
            self._around.console.status(ended.text)
            self._around.finish(None)
        elif ended.refusal is RefusalReason.FULL:
            self._around.finish(SessionFull(ended.text))
        elif ended.names:
            self._around.finish(MemberLeft(ended.text))
        else:
            self._around.finish(SessionError(ended.text))


def _who_is_here(event: steps.Present | steps.Dropped | steps.Guests) -> str:
    match event:
        case steps.Present(names, expected):
            of = f" of {expected}" if expected else ""
            return f"{len(names)}{of} here: {', '.join(names)}"
        case steps.Dropped(name, text):
            return f"{name} cannot take part: {text}"
        case steps.Guests(names):
            return f"guests: {', '.join(names)}" if names else "no guests any more"


def _capability_line(capability: Capability) -> str:
    speed = capability.bandwidth_bytes_per_s
    read = "speed unknown" if speed is None else f"reads {speed / 1e9:.1f} GB/s"
    return f"{capability.device}: {read}, {capability.memory_bytes / 1e9:.1f} GB free"
