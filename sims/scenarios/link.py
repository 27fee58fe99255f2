"""A link between two members as a scenario sees it: opened, measured, loaded with frames, and watched."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypedDict

import trio

from kafila.mesh import LinkMessage
from kafila.nat.candidates import Candidate
from kafila.types import Address, PathKind
from sims.scenarios.member import Member
from sims.scenarios.scenario import Unmet, expect

LINK_TIMEOUT_S = 10.0
FIRST = b"the first application byte"


class Pace(TypedDict):
    """How often a frame is sent each way, and how large."""

    every_s: float
    frame_bytes: int


USUAL: Pace = {"every_s": 0.04, "frame_bytes": 4000}
DENSE: Pace = {"every_s": 0.02, "frame_bytes": 2000}
"""As many bytes in twice the frames: where it is measured when the first arrives again."""

_FRAME = struct.Struct("!Id")  # number, time sent

Way = tuple[Address, Address]
"""(the first member's external address, the second's) that a datagram has travelled between."""


@dataclass(slots=True)
class Flow:
    """Numbered frames one way: when each was sent and when it arrived."""

    sender: Member
    receiver: Member
    sent: list[float] = field(default_factory=list)
    arrived: dict[int, float] = field(default_factory=dict)
    doubled: int = 0
    is_open: bool = True
    """Until it is closed frames are sent."""

    def take(self, now: float, message: LinkMessage) -> None:
        """One frame has come."""
        number, _ = _FRAME.unpack_from(message.data)
        if number in self.arrived:
            self.doubled += 1
        self.arrived[number] = now

    @property
    def missing(self) -> int:
        """Frames sent and not arrived."""
        return len(self.sent) - len(self.arrived)

    def delays(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
        """One-way delays, seconds, of the frames sent in a span of time; infinite where one has not arrived."""
        return [
            self.arrived.get(number, float("inf")) - sent_at
            for number, sent_at in enumerate(self.sent)
            if since_s <= sent_at < until_s
        ]

    def longest_silence(self, since_s: float, until_s: float) -> float:
        """The longest time in a span without a frame arriving, seconds."""
        times = sorted(time_s for time_s in self.arrived.values() if since_s <= time_s <= until_s)
        edges = [since_s, *times, until_s]
        return max(later - earlier for earlier, later in pairwise(edges))


class Link:
    """Two members; ``a`` to ``b`` is forward."""

    def __init__(self, a: Member, b: Member) -> None:
        self.a = a
        self.b = b
        self.opened_at = 0.0

    @property
    def ends(self) -> tuple[tuple[Member, Member], tuple[Member, Member]]:
        """(member, its peer), both ways round."""
        return (self.a, self.b), (self.b, self.a)

    def open(self, *, extra_of_b: Sequence[Candidate] = ()) -> None:
        """Both begin now, as after an assignment; each queues its first message at once. ``extra_of_b``: addresses that
        the second member names besides its own."""
        self.opened_at = now = trio.current_time()
        for me, peer in self.ends:
            me.tap.is_noting = True
            me.peers.append(peer.node_id)
            candidates = [*(extra_of_b if peer is self.b else ()), *peer.reach.candidates]
            identity = peer.identity
            me.mesh.open_link(
                peer.node_id,
                identity.fingerprint,
                candidates,
                now,
                same_machine=False,
                early_key=identity.early.public,
            )
            me.mesh.send(peer.node_id, FIRST, bulk=False)
        for me, _ in self.ends:
            me.endpoint.poke()

    async def up(self) -> list[float]:
        """Until both first messages have arrived and both ends are authenticated; the times of the messages since the
        opening. Raises Unmet."""
        try:
            with trio.fail_after(LINK_TIMEOUT_S):
                for me, _ in self.ends:
                    await me.until(lambda me=me: me.messages and me.ups)  # type: ignore[misc]  # mypy does not infer it
        except trio.TooSlowError:
            raise Unmet(f"no link within {LINK_TIMEOUT_S:.0f} s") from None
        return [me.messages[0][0] - self.opened_at for me, _ in self.ends]

    async def direct(self, within_s: float = 5.0) -> float:
        """Until both directions are direct; the time since the opening. Raises Unmet."""
        try:
            with trio.fail_after(within_s):
                for me, peer in self.ends:
                    await me.until(lambda me=me, peer=peer: me.kind_to(peer) is PathKind.DIRECT)  # type: ignore[misc]  # as above
        except trio.TooSlowError:
            raise Unmet(f"not direct within {within_s:g} s of waiting: {self.kinds()}") from None
        found = self.direct_after()
        return max(time_s for time_s in found if time_s is not None)

    def direct_after(self) -> list[float | None]:
        """For each direction: when it last became direct, since the opening; None where it is relayed."""
        return [self._direct_after(me, peer) for me, peer in self.ends]

    def _direct_after(self, me: Member, peer: Member) -> float | None:
        if me.kind_to(peer) is not PathKind.DIRECT:
            return None
        times = [t for t, news in me.changes_to(peer) if news.previous_kind is not news.kind]
        return times[-1] - self.opened_at if times else None

    def kinds(self) -> str:
        """``direct there, relayed back``."""
        there, back = (me.kind_to(peer) for me, peer in self.ends)
        return f"{there.value if there else 'no link'} there, {back.value if back else 'no link'} back"

    def lasted(self) -> None:
        """Raise Unmet where the link went down at either end."""
        for me, _ in self.ends:
            for time_s, down in me.downs:
                raise Unmet(f"the link of {me.machine.name} went down at {time_s:.2f} s: {down.reason}")

    def reach(self) -> str:
        """What was achieved, in the words of the pair matrix, from the first member to the second."""
        forward, backward = (me.kind_to(peer) is PathKind.DIRECT for me, peer in self.ends)
        if forward and backward:
            there = {(source, to) for source, to in self._delivered(self.a, self.b)}
            back = {(to, source) for source, to in self._delivered(self.b, self.a)}
            return "direct" if there & back else "asymmetric"
        return "forward" if forward else "backward" if backward else "none"

    @staticmethod
    def _delivered(sender: Member, receiver: Member) -> set[Way]:
        """(source as seen by the receiver, destination as sent to) of the datagrams that arrived directly."""
        return {(source, to) for data, source in receiver.tap.received if (to := sender.tap.sent.get(data)) is not None}

    # -- load ------------------------------------------------------------------------------------------------------

    def load(self, nursery: trio.Nursery, pace: Pace = USUAL) -> tuple[Flow, Flow]:
        """Numbered frames both ways from now on, as long as the flows are open and the link is up."""
        flows = Flow(self.a, self.b), Flow(self.b, self.a)
        for flow in flows:
            flow.receiver.on_message = flow.take
            nursery.start_soon(self._send_frames, flow, pace)
        return flows

    @staticmethod
    async def _send_frames(flow: Flow, pace: Pace) -> None:
        padding = bytes(pace["frame_bytes"] - _FRAME.size)
        while flow.is_open and not flow.sender.downs:
            now = trio.current_time()
            frame = _FRAME.pack(len(flow.sent), now) + padding
            flow.sent.append(now)
            flow.sender.mesh.send(flow.receiver.node_id, frame, bulk=True)
            flow.sender.endpoint.poke()
            await trio.sleep(pace["every_s"])


def expect_whole(*flows: Flow) -> None:
    """Every frame arrived, once. Raises Unmet."""
    for flow in flows:
        expect(flow.sent, "no frame was sent")
        expect(not flow.missing, f"{flow.missing} of {len(flow.sent)} frames from {flow.sender.machine.name} are lost")
        expect(not flow.doubled, f"{flow.doubled} frames from {flow.sender.machine.name} came twice")
