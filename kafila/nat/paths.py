"""All ways to one peer, and which of them bulk datagrams take now.

Relayed first: the relay is there from the start and never given up, so :meth:`PeerPaths.routes` is never empty. Direct
paths (kafila/nat/path.py) are punched meanwhile, and one takes over when it has proven itself; when it goes silent
under data, everything is sent over the relay as well until it or another one is proven again. Each direction chooses
for itself: that we reach the peer directly says nothing of how the peer reaches us.

    relayed       (None,)            no direct path is proven
    trying        (None, address)    one answered and is being confirmed: both, for a round trip
    direct        (address,)         the relay is only kept warm
    overlapping   (address, other)   a better direct path took over: both, for a round trip
    silent        (None, address)    no sign of life from it while sending: both, until one is proven

QUIC above sees one constant peer throughout; it is told (:class:`~kafila.nat.events.PathChanged`) when what it knows of
round trip and congestion no longer holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kafila.nat.candidates import (
    MAX_CANDIDATES,
    Candidate,
    CandidateKind,
    canonical,
    choose_candidates,
    may_probe,
)
from kafila.nat.choice import best_of
from kafila.nat.events import (
    DatagramSizeChanged,
    Event,
    KeepaliveShortened,
    PathChanged,
    PathLost,
    PathSilent,
    PathTooNarrow,
    PunchFailed,
)
from kafila.nat.exchange import Exchange, Outstanding, Probe
from kafila.nat.liveness import DataFlow
from kafila.nat.messages import Ack, Ping
from kafila.nat.path import SILENCE_S, Path, PathState
from kafila.nat.relayed import RelayedPath
from kafila.nat.schedule import PUNCH_WINDOW_S, RETRY_AFTER_S, Keepalive, Randomness
from kafila.types import Address, NodeId, PathKind

__all__ = ["Candidate", "CandidateKind", "PeerPaths", "Probe"]

SPARES = 2
"""Working direct paths kept alive beside the one in use."""
JOIN_GAP_S = 2.5
"""After a round, before the peer's beginning one begins another here: half the first pause, so that two sides cannot
keep each other going without rest."""
MAX_EVENTS = 64
"""Far more than happens between two looks; the oldest is dropped."""


class PeerPaths:
    """The path machine of one peer. ``key`` is the session's link key; ``candidates`` are the peer's addresses.

    ``same_machine``: the caller knows that the peer runs on this very machine (they told each other so under seal);
    only then are its loopback addresses probed. ``random`` must be unpredictable outside simulations
    (``random.SystemRandom()``), since nonces come from it.
    """

    def __init__(  # noqa: PLR0917  - who, to whom, under which key, where, when, with what luck: each asked for by all
        self,
        me: NodeId,
        peer: NodeId,
        key: bytes,
        candidates: Sequence[Candidate],
        now: float,
        random: Randomness,
        *,
        same_machine: bool = False,
    ) -> None:
        self._random = random
        self._same_machine = same_machine
        self._exchange = Exchange(me, peer, key, now, random)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._keepalive = Keepalive()
        self._flow = DataFlow()
        self._relayed = RelayedPath(now)
        self._paths: dict[Address, Path] = {}
        self._chosen: Path | None = None
        self._fallen: Path | None = None  # was chosen and went silent: duplicated to until something is proven
        self._overlap: tuple[Address, float] | None = None  # the path before the chosen one, and until when
        self._routes: tuple[Address | None, ...] = (None,)
        self._round_began_at: float | None = None
        self._next_round_at: float | None = now
        self._round_ended_at = float("-inf")
        self._failures = 0
        self._announced: tuple[Address | None, int] = (None, self._relayed.max_datagram_bytes)
        self._timer = now
        self.set_candidates(candidates, now)

    # -- what the caller tells us ---------------------------------------------------------------------------------

    def set_candidates(self, candidates: Sequence[Candidate], now: float) -> None:
        """The peer's addresses changed (a new epoch of its network): punch them all, at once."""
        wanted = choose_candidates(candidates, same_machine=self._same_machine)
        addresses = {candidate.address for candidate in wanted}
        for path in list(self._paths.values()):
            path.advertised = path.address in addresses
            if not path.advertised and path.state is PathState.IDLE:
                del self._paths[path.address]
        for candidate in wanted:
            self._add(candidate.address, candidate.kind, advertised=True)
        self._new_epoch(now)

    def network_changed(self, now: float) -> None:
        """This machine's network changed: nothing is proven any more, everything is tried anew."""
        self._exchange.forget()
        for path in self._paths.values():
            if path.state is PathState.USABLE:
                path.silent(now)
        self._new_epoch(now)

    def receive(self, data: bytes, source: Address | None, now: float, socket: int = 0) -> None:
        """A path message arrived from ``source`` (None: inside a relay envelope) on ``socket``. Anything that is not
        one from this peer is dropped without a word."""
        message = self._exchange.open(data)
        if message is None:
            return
        source = None if source is None else canonical(source)
        path = self._heard_from(source, now, socket)
        if isinstance(message, Ping):
            self._on_ping(message, source, path, now)
        else:
            self._on_ack(message, now)
        self._settle(now)

    def data_sent(self, now: float) -> None:
        """Datagrams were sent along :meth:`routes`."""
        if self._flow.sent(now) and self._chosen is not None:
            self._chosen.sending(now)
            self._timer = now

    def data_received(self, source: Address | None, now: float) -> None:
        """A datagram of the peer arrived from ``source`` (None: through the relay)."""
        self._flow.received()
        path = None if source is None else self._paths.get(source)
        if path is not None and path.heard_at is not None:
            path.heard_at = now

    # -- what the caller asks -------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """When to call :meth:`handle_timer`; never None, since paths are kept alive."""
        return self._timer

    def handle_timer(self, now: float) -> None:
        """Let time pass."""
        if now < self._timer:
            return
        self._advance(now)
        self._send_pings(now)
        self._settle(now)

    def probes_to_send(self, now: float) -> list[Probe]:
        """The path messages to send now."""
        self.handle_timer(now)
        return self._exchange.take()

    def routes(self, now: float) -> tuple[Address | None, ...]:  # noqa: ARG002  - the seam; changes come by timer
        """Where every bulk datagram goes now, each to all of them: one, or two while duplicating. None: the relay."""
        return self._routes

    def socket_for(self, address: Address) -> int:
        """Which of the machine's sockets reaches ``address``; 0 unless birthday probing found another."""
        path = self._paths.get(address)
        return 0 if path is None else path.socket

    def owns(self, address: Address) -> bool:
        """Whether a sealed message of the peer has come from ``address``."""
        path = self._paths.get(address)
        return path is not None and path.heard_at is not None

    @property
    def kind(self) -> PathKind:
        """How bulk data travels from here to the peer."""
        return PathKind.RELAYED if self._chosen is None else PathKind.DIRECT

    @property
    def address(self) -> Address | None:
        """The direct address in use, or None."""
        return None if self._chosen is None else self._chosen.address

    @property
    def rtt_s(self) -> float | None:
        """Smoothed round trip of the path in use (the way back is the peer's choice); None before the first ack."""
        path = self._relayed if self._chosen is None else self._chosen
        return path.round_trip.smoothed_s

    @property
    def max_datagram_bytes(self) -> int:
        """The largest QUIC datagram that fits every route in use; at least 1200."""
        sizes = [
            self._relayed.max_datagram_bytes if route is None else self._paths[route].mtu.confirmed_bytes
            for route in self._routes
            if route is None or self._paths[route].mtu.confirmed_bytes
        ]
        return min(sizes, default=self._relayed.max_datagram_bytes)

    def next_event(self) -> Event | None:
        """What happened, oldest first; None: no more."""
        return self._events.popleft() if self._events else None

    # -- messages -------------------------------------------------------------------------------------------------

    def _heard_from(self, source: Address | None, now: float, socket: int) -> Path | None:
        if source is None:
            return None
        path = self._paths.get(source)
        # A sealed message from a loopback address proves that the peer, or what speaks for it, is on this machine.
        if path is None and may_probe(source, same_machine=True):
            path = self._add(source, CandidateKind.LEARNED, advertised=False)
            if path is not None:
                path.socket = socket
        if path is not None:
            path.heard_at = now
        return path

    def _on_ping(self, ping: Ping, source: Address | None, path: Path | None, now: float) -> None:
        if path is not None:
            self._answer_with_probe(ping, path, now)
        elif source is None and ping.punching:
            self._join_round(now)
        back: list[tuple[Address | None, int]] = []
        if path is not None:
            back.append((path.address, path.socket))
        if path is None or path.state is not PathState.USABLE:
            # Whether the way back along that address works is not known: use one that does, too.
            back.extend((route, self._socket_of(route)) for route in self._routes if route != source or not back)
        self._exchange.acknowledge(ping, source, back, now)

    def _answer_with_probe(self, ping: Ping, path: Path, now: float) -> None:
        """Probe back where a ping came from, if that could be of use.

        Between two NATs that give every destination its own mapping, each answer to a new source makes a newer source,
        without end. So once a direct path works, only a nearer one is worth it, or one that the peer now relies on.
        """
        chosen = self._chosen
        if path.state in {PathState.IDLE, PathState.LOST} and (
            chosen is None or ping.active or path.scope < chosen.scope
        ):
            path.punch(now)
        path.heard(now)

    def _join_round(self, now: float) -> None:
        """The peer punches now: two that punch together open both NATs."""
        idle = self._chosen is None and self._round_began_at is None
        if idle and now >= self._round_ended_at + JOIN_GAP_S:
            self._begin_round(now)

    def _on_ack(self, ack: Ack, now: float) -> None:
        ping = self._exchange.match(ack)
        if ping is None:
            return
        keepalive_s = self._keepalive.jittered_s(self._random)
        if ping.to is None:
            self._relayed.acked(ping.size_bytes, ping.generation, now - ping.sent_at, now, keepalive_s)
            return
        path = self._paths.get(ping.to)
        if path is None:
            return
        if ack.observed is not None:
            if path.observed not in {None, ack.observed}:
                self._mapping_forgotten(ping.idle_s)
            path.observed = ack.observed
        if path.state is not PathState.USABLE:
            path.socket = ping.socket
        path.acked(ping.size_bytes, ping.generation, now - ping.sent_at, now, keepalive_s)

    def _mapping_forgotten(self, idle_s: float) -> None:
        if self._keepalive.forgotten_after(idle_s):
            self._events.append(KeepaliveShortened(idle_s, self._keepalive.interval_s))

    # -- time -----------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        chosen = self._chosen
        if chosen is not None and chosen.sending_since is not None and not self._flow.sending(now):
            chosen.resting(self._flow.sent_at, self._keepalive.jittered_s(self._random))
        for path in self._paths.values():
            self._advance_path(path, now)
        if self._overlap is not None and now >= self._overlap[1]:
            self._overlap = None
        self._advance_round(now)

    def _advance_path(self, path: Path, now: float) -> None:
        before = path.state
        path.advance(now)
        if before is PathState.SILENT and path.state is PathState.LOST:
            self._events.append(PathLost(path.address))
        if path.too_narrow(now):
            self._events.append(PathTooNarrow(path.address))
            path.hold_off(now)
            return
        silence_s = path.gone_silent(now)
        if silence_s is not None:
            if path is self._chosen:
                self._events.append(PathSilent(path.address, silence_s, data_only=False))
            path.silent(now)
        elif path is self._chosen:
            self._check_data(path, now)

    def _check_data(self, path: Path, now: float) -> None:
        unanswered_s = self._flow.unanswered_s(now, max(SILENCE_S, 3 * path.round_trip.pto_s))
        if unanswered_s is not None:
            self._events.append(PathSilent(path.address, unanswered_s, data_only=True))
            self._flow.restart()
            path.data_lost(now)

    def _advance_round(self, now: float) -> None:
        if self._round_began_at is not None and now >= self._round_began_at + PUNCH_WINDOW_S:
            self._round_began_at, self._round_ended_at = None, now
            if self._chosen is None and self._trial() is None:
                pause_s = RETRY_AFTER_S[min(self._failures, len(RETRY_AFTER_S) - 1)]
                self._failures += 1
                self._next_round_at = now + pause_s
                self._events.append(PunchFailed(len(self._paths), pause_s))
        if self._next_round_at is not None and now >= self._next_round_at and self._chosen is None:
            self._begin_round(now)

    def _begin_round(self, now: float) -> None:
        self._round_began_at, self._next_round_at = now, None
        self._relayed.wake(now)
        for path in self._paths.values():
            path.punch(now)

    def _new_epoch(self, now: float) -> None:
        self._failures = 0
        self._keepalive = Keepalive()
        for path in self._paths.values():
            path.forget_holds()
        self._begin_round(now)
        self._settle(now)

    def _send_pings(self, now: float) -> None:
        keepalive_s = self._keepalive.jittered_s(self._random)
        if now >= self._relayed.due_at() and now >= self._exchange.may_ping_at():
            for size in self._relayed.take(now, keepalive_s):
                self._ping(None, self._relayed, size, now)
        urgent = (self._chosen, self._fallen)
        for path in sorted(self._paths.values(), key=lambda p: (p not in urgent, not p.worked, p.scope)):
            due_at = path.due_at()
            if due_at is None or now < due_at or now < self._exchange.may_ping_at():
                continue
            for size in path.take(now):
                self._ping(path.address, path, size, now)

    def _ping(self, to: Address | None, path: Path | RelayedPath, size_bytes: int, now: float) -> None:
        idle_s = 0.0 if path.sent_at is None else now - max(path.sent_at, self._data_on(to))
        ping = Outstanding(to, now, idle_s, size_bytes, path.mtu.generation, self._socket_of(to))
        active = to is not None and to in self._routes
        punching = to is None and self._round_began_at is not None
        if self._exchange.ping(ping, active=active, punching=punching):
            path.sent_at = now

    def _data_on(self, to: Address | None) -> float:
        return self._flow.sent_at if to in self._routes else float("-inf")

    # -- choice ---------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """After any input: choose, say what changed, and set the timer."""
        self._choose(now)
        self._set_routes()
        self._announce()
        self._set_timer(now)

    def _choose(self, now: float) -> None:
        if self._chosen is not None and self._chosen.state is not PathState.USABLE:
            self._fall(now)
        if self._fallen is not None and self._fallen.state not in {PathState.SILENT, PathState.CONFIRMING}:
            self._fallen = None
        best = best_of((p for p in self._paths.values() if p.state is PathState.USABLE), self._chosen)
        if best is not None and best is not self._chosen:
            self._take_over(best, now)
        if self._chosen is not None:
            self._stand_down(self._chosen, now)
        elif self._round_began_at is None and self._next_round_at is None:
            self._next_round_at = now + RETRY_AFTER_S[0]

    def _fall(self, now: float) -> None:
        """The path in use no longer works: over the relay, and nothing else is trusted before it is proven again."""
        self._fallen, self._chosen, self._overlap = self._chosen, None, None
        for path in self._paths.values():
            if path.state is PathState.USABLE:
                path.confirm(now)
        self._failures = 0
        if self._round_began_at is None:
            self._begin_round(now)

    def _take_over(self, path: Path, now: float) -> None:
        old = self._chosen
        if old is not None:
            old.resting(self._flow.sent_at, self._keepalive.jittered_s(self._random))
            trip_s = max(old.round_trip.smoothed_s or 0.0, path.round_trip.smoothed_s or 0.0)
            self._overlap = (old.address, now + trip_s)
        self._chosen, self._fallen = path, None
        self._failures, self._next_round_at = 0, None
        self._flow.restart()
        if self._flow.sending(now):
            path.sending(now)

    def _stand_down(self, chosen: Path, now: float) -> None:
        """Keep a few spares alive and look only for what would be nearer than the path in use."""
        spares = sorted(
            (p for p in self._paths.values() if p.state is PathState.USABLE and p is not chosen),
            key=lambda p: (p.scope, p.round_trip.smoothed_s or 0.0),
        )
        for path in spares[SPARES:]:
            path.retire(now)
        for path in self._paths.values():
            if path.state is PathState.LOST and path.scope >= chosen.scope:
                path.retire(now)

    def _trial(self) -> Path | None:
        confirming = [p for p in self._paths.values() if p.state is PathState.CONFIRMING]
        return min(confirming, key=lambda p: (p.scope, p.round_trip.smoothed_s or 0.0), default=None)

    def _set_routes(self) -> None:
        if self._chosen is None:
            beside = self._fallen or self._trial()
            self._routes = (None,) if beside is None else (None, beside.address)
        elif self._overlap is None:
            self._routes = (self._chosen.address,)
        else:
            self._routes = (self._chosen.address, self._overlap[0])

    def _announce(self) -> None:
        before, before_bytes = self._announced
        after, after_bytes = self._announced = (self.address, self.max_datagram_bytes)
        if after != before:
            was = PathKind.RELAYED if before is None else PathKind.DIRECT
            self._events.append(PathChanged(self.kind, after, self.rtt_s, after_bytes, was, before))
        elif after_bytes != before_bytes:
            self._events.append(DatagramSizeChanged(after_bytes, before_bytes))

    def _set_timer(self, now: float) -> None:
        may_ping_at = self._exchange.may_ping_at()
        times = [self._relayed.due_at()]
        times.extend(due for path in self._paths.values() if (due := path.due_at()) is not None)
        times = [time if time > now else max(time, may_ping_at) for time in times]
        if self._overlap is not None:
            times.append(self._overlap[1])
        if self._round_began_at is not None:
            times.append(self._round_began_at + PUNCH_WINDOW_S)
        elif self._next_round_at is not None:
            times.append(self._next_round_at)
        self._timer = min(times)

    # -- the table of paths ---------------------------------------------------------------------------------------

    def _socket_of(self, address: Address | None) -> int:
        return 0 if address is None else self.socket_for(address)

    def _add(self, address: Address, kind: CandidateKind, *, advertised: bool) -> Path | None:
        """The path to ``address``, made if there is room for it."""
        path = self._paths.get(address)
        if path is not None:
            return path
        if len(self._paths) >= MAX_CANDIDATES and not self._evict():
            return None
        path = self._paths[address] = Path(address, kind, advertised=advertised)
        return path

    def _evict(self) -> bool:
        """Make room: the path heard from longest ago, learned ones first, of those that nothing is expected of."""
        idle = [path for path in self._paths.values() if path.state is PathState.IDLE]
        if not idle:
            return False
        oldest = min(idle, key=lambda p: (p.advertised, p.heard_at if p.heard_at is not None else float("-inf")))
        del self._paths[oldest.address]
        return True
