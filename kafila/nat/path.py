"""One direct path: an address of the peer, in the direction from here to there.

    IDLE         known, not probed now
    PUNCHING     probed on the punch schedule; nothing sent to it was acked yet
    CONFIRMING   a small ping was acked; does it carry the 1200 bytes that QUIC needs?
    USABLE       it does: fit for bulk data, checked often while sending and kept alive while idle
    SILENT       it was usable and gave no sign of life; probed on the punch schedule again
    LOST         it did not come back; looked for every few seconds

An ack may return by any route, so this says nothing of the way from there to here: that is the peer's own machine.
"""

from __future__ import annotations

from enum import Enum

from kafila.nat.candidates import CandidateKind, Scope, scope_of
from kafila.nat.messages import MIN_MESSAGE_BYTES
from kafila.nat.mtu import BASE_BYTES, MtuSearch
from kafila.nat.schedule import PUNCH_OFFSETS_S, PUNCH_WINDOW_S, RoundTrip, sooner
from kafila.types import Address

CHECK_S = 0.25
"""Between an ack and the next ping on a path that carries data. Three or more pings fit into the shortest silence that
is acted upon, so that single losses are not."""
CHECK_AGAIN_S = 0.1
"""At least, before an unacked ping is repeated."""
SILENCE_S = 0.75
"""DESIGN section 5: silence is max(3 PTO, 750 ms)."""
IDLE_SILENCE_S = 2.0
"""Without data nothing is delayed by a dead path, so a longer burst of loss is forgiven."""
SILENCE_PINGS = 3
"""No silence before so many pings went unanswered: a stalled process must not take its own pause for the peer's."""
VERIFY_S = 0.5
"""Between full-size pings while sending: how long a black hole may eat data, against two more datagrams a second."""
LOOK_AGAIN_S = 4.0
"""Between pings on a lost path: found twice within the ten seconds promised, should one of them be dropped."""
CONFIRM_AT_LEAST_S = 1.5
HOLD_OFF_S = (5.0, 15.0, 60.0)
"""How long a path that answers pings but does not carry data is left alone, the first, second and later times."""
TRIGGER_GAP_S = 0.02
"""Between pings on one path that the peer's pings set off, however fast those come."""


class PathState(Enum):
    """See the module docstring."""

    IDLE = "idle"
    PUNCHING = "punching"
    CONFIRMING = "confirming"
    USABLE = "usable"
    SILENT = "silent"
    LOST = "lost"


TRANSITIONS: dict[PathState, frozenset[PathState]] = {
    PathState.IDLE: frozenset({PathState.PUNCHING, PathState.CONFIRMING, PathState.LOST}),
    PathState.PUNCHING: frozenset({PathState.CONFIRMING, PathState.IDLE, PathState.LOST}),
    PathState.CONFIRMING: frozenset({PathState.USABLE, PathState.IDLE, PathState.SILENT}),
    PathState.USABLE: frozenset({PathState.SILENT, PathState.CONFIRMING, PathState.IDLE}),
    PathState.SILENT: frozenset({PathState.CONFIRMING, PathState.LOST}),
    PathState.LOST: frozenset({PathState.CONFIRMING, PathState.PUNCHING, PathState.IDLE}),
}


class Path:
    """One direct path; :class:`kafila.nat.paths.PeerPaths` owns those of a peer."""

    def __init__(self, address: Address, kind: CandidateKind) -> None:
        self.address = address
        self.kind = kind
        self.scope: Scope = scope_of(address)
        self.advertised = False
        """The peer itself names it among its addresses."""
        self.state = PathState.IDLE
        self.socket = 0
        """Which of this machine's sockets it leaves from."""
        self.round_trip = RoundTrip()
        self.mtu = MtuSearch(self.scope)
        self.observed: Address | None = None
        """This machine as the peer sees it along this path."""
        self.heard_at: float | None = None
        """When a sealed message last came from the address; None: never, so it is not proven to be the peer."""
        self.acked_at: float | None = None
        self.idle_s = 0.0
        """How long nothing had left on it when the oldest unanswered ping did."""
        self.sent_at: float | None = None
        self.worked = False
        self.busy_since: float | None = None
        """Since when it carries data without a pause; None: it carries none."""
        self._entered_at = 0.0
        self._offset = 0
        self._next_at: float | None = None
        self._unacked_since: float | None = None
        self._unacked = 0
        self._verified_at = 0.0
        self._hold_until = 0.0
        self._holds = 0

    # -- what sets it going -------------------------------------------------------------------------------------

    def punch(self, now: float) -> None:
        """Begin a round of probes, unless one is on, the path works, or it is being left alone."""
        if self.state in (PathState.IDLE, PathState.LOST) and now >= self._hold_until:
            self._enter(PathState.PUNCHING, now)

    def heard(self, now: float) -> None:
        """The peer's ping came from here: it is worth one right back, on whatever schedule we are."""
        if self.state in (PathState.PUNCHING, PathState.SILENT, PathState.LOST) and (
            self.sent_at is None or now >= self.sent_at + TRIGGER_GAP_S
        ):
            self._next_at = now

    def acked(self, size_bytes: int, generation: int, sample_s: float, now: float, keepalive_s: float) -> None:
        """A ping of ``size_bytes``, sent ``sample_s`` ago in the MTU search's ``generation``, was acked."""
        self.round_trip.measured(sample_s)
        self.acked_at = now
        self._unacked_since, self._unacked = None, 0
        if self.state is PathState.USABLE:
            self.mtu.acked(size_bytes, generation, now)
            self._next_at = now + (CHECK_S if self.busy_since is not None else keepalive_s)
        elif self.state is PathState.CONFIRMING:
            self.mtu.acked(size_bytes, generation, now)
            if self.mtu.confirmed_bytes:
                self._enter(PathState.USABLE, now)
        elif now >= self._hold_until:
            self.confirm(now)

    def confirm(self, now: float) -> None:
        """Prove (once more) that it carries full datagrams, before it may be relied on."""
        self._enter(PathState.CONFIRMING, now)
        self.mtu.restart(now)

    def data_lost(self, now: float) -> None:
        """Pings are acked but data is not. First suspect the size of the data; a second time, the path."""
        if self.mtu.black_holes or self.mtu.confirmed_bytes <= BASE_BYTES:
            self.hold_off(now)
        else:
            self._enter(PathState.CONFIRMING, now)
            self.mtu.fall_back(now)

    def busy(self, now: float) -> None:
        """Data begins to move on it after a pause: check it at once, at full size."""
        self.busy_since = now
        if self.state is PathState.USABLE and self._unacked_since is None:
            self._next_at = now
            self._verified_at = now
            self.mtu.verify(now)

    def resting(self, moved_at: float, keepalive_s: float) -> None:
        """Data last moved at ``moved_at``: the next ping is due ``keepalive_s`` later."""
        self.busy_since = None
        self.sent_at = moved_at if self.sent_at is None else max(self.sent_at, moved_at)
        if self.state is PathState.USABLE and self._unacked_since is None:
            self._next_at = moved_at + keepalive_s

    def silent(self, now: float) -> None:
        """It gives no sign of life: probe it as if anew."""
        self._enter(PathState.SILENT, now)

    def hold_off(self, now: float) -> bool:
        """It answers pings but carries no data: leave it alone, for longer each time; whether this was the first."""
        hold_s = HOLD_OFF_S[min(self._holds, len(HOLD_OFF_S) - 1)]
        self._holds += 1
        self._hold_until = now + hold_s
        self._enter(PathState.IDLE, now)
        self._next_at = self._hold_until if self.worked else None
        return self._holds == 1

    def retire(self, now: float) -> None:
        """Others work and are as good: stop keeping it alive, or looking for it."""
        self._enter(PathState.IDLE, now)

    def forget_holds(self) -> None:
        """The network changed: what did not carry data before may do so now."""
        self._holds, self._hold_until = 0, 0.0

    # -- time -----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """The transitions that time alone makes, except silence, which needs to know what the path is used for."""
        if self.state in (PathState.PUNCHING, PathState.SILENT) and now >= self._punched_at():
            self._enter(PathState.LOST if self.worked else PathState.IDLE, now)
        elif self.state is PathState.CONFIRMING and self._unconfirmed(now) and not self._answers():
            self._enter(PathState.SILENT if self.worked else PathState.IDLE, now)
        elif self.state is PathState.IDLE and self._next_at is not None and now >= self._next_at:
            self._enter(PathState.LOST, now)

    def too_narrow(self, now: float) -> bool:
        """Whether pings are answered but 1200 bytes do not get through."""
        return self.state is PathState.CONFIRMING and self._unconfirmed(now) and self._answers()

    def _unconfirmed(self, now: float) -> bool:
        """Confirming has taken too long."""
        return self.mtu.failed or now >= self._confirmed_by()

    def _confirmed_by(self) -> float:
        return self._entered_at + max(CONFIRM_AT_LEAST_S, 6 * self.round_trip.pto_s)

    def _answers(self) -> bool:
        """Something was acked since the present state began."""
        return self.acked_at is not None and self.acked_at > self._entered_at

    def gone_silent(self, now: float) -> float | None:
        """For how long there was no sign of life, once that is too long; else None."""
        if self.state is not PathState.USABLE or self._unacked_since is None or self._unacked < SILENCE_PINGS:
            return None
        return now - self._quiet_from() if now >= self._silence_at() else None

    @property
    def doubtful(self) -> bool:
        """Not known to work, or no longer as surely as before: what matters goes another way too."""
        return self.state is not PathState.USABLE or self._unacked > 1

    def _quiet_from(self) -> float:
        since = self._unacked_since if self._unacked_since is not None else self._entered_at
        if self.busy_since is None or self.acked_at is None:
            return since
        return min(since, max(self.acked_at, self.busy_since))

    def _silence_at(self) -> float:
        patience_s = SILENCE_S if self.busy_since is not None else IDLE_SILENCE_S
        return self._quiet_from() + max(patience_s, 3 * self.round_trip.pto_s)

    def due_at(self) -> float | None:
        """When it next wants :meth:`advance` or :meth:`take`."""
        state, due = self.state, self._next_at
        if state is PathState.USABLE or state is PathState.CONFIRMING:
            due = sooner(due, self.mtu.due_at())
            if state is PathState.CONFIRMING:
                due = sooner(due, self._confirmed_by())
            if self._unacked >= SILENCE_PINGS:
                due = sooner(due, self._silence_at())
        elif state is PathState.PUNCHING or state is PathState.SILENT:
            due = sooner(due, self._punched_at())
        return due

    def take(self, now: float) -> list[int]:
        """The sizes of the pings to send now, in bytes; the schedule moves on as if they were sent."""
        sizes: list[int] = []
        if self._next_at is not None and now >= self._next_at and self.state is not PathState.IDLE:
            sizes.append(MIN_MESSAGE_BYTES)
            if self.state is PathState.USABLE:
                self._next_check(now)
            elif self.state is PathState.LOST:
                self._next_at = now + LOOK_AGAIN_S
            else:
                self._next_offset(now)
        if self.state in (PathState.CONFIRMING, PathState.USABLE):
            full = self.mtu.take(now, self.round_trip.pto_s, answering=self._unacked <= 1)
            if full and self.state is PathState.CONFIRMING:
                sizes.append(MIN_MESSAGE_BYTES)  # tells a narrow path from a dead one
            sizes.extend(full)
        if self.state is PathState.USABLE and not self.mtu.confirmed_bytes:
            self._enter(PathState.CONFIRMING, now)  # VERIFY has found a black hole
        return sizes

    def _next_check(self, now: float) -> None:
        if self._unacked_since is None:
            self._unacked_since = now
            self.idle_s = 0.0 if self.sent_at is None else now - self.sent_at
        self._unacked += 1
        self._next_at = now + max(CHECK_AGAIN_S, self.round_trip.pto_s)
        if self.busy_since is not None and now >= self._verified_at + VERIFY_S:
            self._verified_at = now
            self.mtu.verify(now)

    def _next_offset(self, now: float) -> None:
        while self._offset < len(PUNCH_OFFSETS_S) and self._entered_at + PUNCH_OFFSETS_S[self._offset] <= now:
            self._offset += 1
        more = self._offset < len(PUNCH_OFFSETS_S)
        self._next_at = self._entered_at + PUNCH_OFFSETS_S[self._offset] if more else None

    def _punched_at(self) -> float:
        return self._entered_at + PUNCH_WINDOW_S + self.round_trip.pto_s

    def _enter(self, state: PathState, now: float) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"a path cannot go from {self.state.value} to {state.value}")
        self.state = state
        self._entered_at = now
        self._offset = 0
        self._unacked_since, self._unacked = None, 0
        self._next_at = now if state in {PathState.PUNCHING, PathState.SILENT, PathState.LOST} else None
        if state is PathState.USABLE:
            self.worked = True
            self._verified_at = now
            self._next_at = now + CHECK_S
