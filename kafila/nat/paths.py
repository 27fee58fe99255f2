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

from collections.abc import Sequence

from kafila.nat import events
from kafila.nat.birthday import Birthday, BirthdayRole
from kafila.nat.candidates import Candidate, CandidateKind, canonical, choose_candidates, may_probe
from kafila.nat.choice import Selection
from kafila.nat.exchange import Exchange, Outstanding, Probe
from kafila.nat.liveness import DataFlow
from kafila.nat.messages import MIN_MESSAGE_BYTES, Ack, Ping
from kafila.nat.path import SILENCE_S, Path, PathState
from kafila.nat.relayed import RelayedPath
from kafila.nat.rounds import Rounds
from kafila.nat.schedule import MIN_KEEPALIVE_S, RETRY_AFTER_S, Keepalive, Randomness, RoundTrip, next_due, sooner
from kafila.nat.table import PathTable
from kafila.types import Address, NodeId, PathKind

__all__ = ["BirthdayRole", "Candidate", "CandidateKind", "PeerPaths", "Probe"]


class PeerPaths:
    """The path machine of one peer. ``key`` is the session's link key; ``candidates`` are the peer's addresses.

    ``same_machine``: the caller knows that the peer runs on this very machine (they told each other so under seal);
    only then are its loopback addresses probed. ``random`` must be unpredictable outside simulations
    (``random.SystemRandom()``), since nonces come from it.
    """

    def __init__(
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
        self._keepalive = Keepalive()
        self._flow = DataFlow()
        self._relayed = RelayedPath(now)
        self._events = events.EventLog(self._relayed.max_datagram_bytes)
        self._paths = PathTable()
        self._selection = Selection()
        self._routes: tuple[Address | None, ...] = (None,)
        self._max_datagram_bytes = self._relayed.max_datagram_bytes
        self._rounds = Rounds()
        self._birthday: Birthday | None = None
        self._timer = now
        self.set_candidates(candidates, now)

    # -- what the caller tells us ---------------------------------------------------------------------------------

    def set_candidates(self, candidates: Sequence[Candidate], now: float) -> None:
        """The peer's addresses changed (a new epoch of its network): punch them all, at once."""
        self._paths.advertise(choose_candidates(candidates, same_machine=self._same_machine))
        self._new_epoch(now)

    def network_changed(self, now: float) -> None:
        """This machine's network changed: nothing is proven any more, everything is tried anew."""
        self._exchange.forget()
        self._keepalive = Keepalive()
        for path in self._paths:
            path.round_trip = RoundTrip()
            if path.state is PathState.USABLE:
                path.silent(now)
        self._new_epoch(now)

    def begin_birthday(self, role: BirthdayRole, now: float, sockets: int = 0) -> bool:
        """Try birthday probing towards the peer's reflexive address; whether it was begun: once an epoch, and only
        while there is no direct path. ``sockets`` extra ones are open, numbered from 1, each delivering to
        :meth:`receive` under its number."""
        target = next((p.address for p in self._paths if p.advertised and p.kind is CandidateKind.REFLEXIVE), None)
        if target is None or self._birthday is not None or self._chosen is not None:
            return False
        self._birthday = Birthday(role, target, sockets, now, self._random)
        self._set_timer(now)
        return True

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
        """Datagrams that the peer must answer were sent along :meth:`routes`."""
        if self._flow.sent(now):
            self._busy(now)

    def data_received(self, source: Address | None, now: float) -> None:
        """A datagram of the peer arrived from ``source`` (None: through the relay)."""
        if self._flow.received(now):
            self._busy(now)
        path = None if source is None else self._paths.get(source)
        if path is not None and path.heard_at is not None:
            path.heard_at = now

    def _busy(self, now: float) -> None:
        """Data begins to move after a pause: is its path still what it was?"""
        if self._chosen is not None:
            self._chosen.busy(now)
            self._timer = now

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

    def socket_for(self, address: Address | None) -> int:
        """Which of the machine's sockets reaches ``address``; 0 unless birthday probing found another."""
        return 0 if address is None or (path := self._paths.get(address)) is None else path.socket

    def owns(self, address: Address) -> bool:
        """Whether a sealed message of the peer has come from ``address``."""
        path = self._paths.get(address)
        return path is not None and path.heard_at is not None

    @property
    def _chosen(self) -> Path | None:
        return self._selection.chosen

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
        return (self._chosen or self._relayed).round_trip.smoothed_s

    @property
    def max_datagram_bytes(self) -> int:
        """The largest QUIC datagram that fits every route in use; at least 1200."""
        return self._max_datagram_bytes

    def next_event(self) -> events.Event | None:
        """What happened, oldest first; None: no more."""
        return self._events.next()

    # -- messages -------------------------------------------------------------------------------------------------

    def _heard_from(self, source: Address | None, now: float, socket: int) -> Path | None:
        if source is None:
            return None
        path = self._paths.get(source)
        # A sealed message from a loopback address proves that the peer, or what speaks for it, is on this machine.
        if path is None and may_probe(source, same_machine=True):
            path = self._paths.add(source, CandidateKind.LEARNED)
        if path is not None:
            path.heard_at = now
            if path.state is not PathState.USABLE:
                path.socket = socket
        return path

    def _on_ping(self, ping: Ping, source: Address | None, path: Path | None, now: float) -> None:
        if path is not None:
            self._answer_with_probe(ping, path, now)
        elif source is None and ping.punching and self._chosen is None and self._rounds.may_join(now):
            self._begin_round(now)  # two that punch together open both NATs
        back: list[tuple[Address | None, int]] = []
        if path is not None:
            back.append((path.address, path.socket))
            path.sent_at = now
        if path is None or path.doubtful:
            # Whether the way back along that address works is not known: answer over the relay as well.
            back.append((None, 0))
        self._exchange.acknowledge(ping, source, back, now)

    def _answer_with_probe(self, ping: Ping, path: Path, now: float) -> None:
        """Probe back where a ping came from, if that could be of use.

        Between two NATs that give every destination its own mapping, each answer to a new source makes a newer source,
        without end. So once a direct path works, only a nearer one is worth it, or one that the peer now relies on.
        """
        chosen = self._chosen
        if path.state in (PathState.IDLE, PathState.LOST) and (
            chosen is None or ping.active or path.scope < chosen.scope
        ):
            path.punch(now)
        path.heard(now)

    def _on_ack(self, ack: Ack, now: float) -> None:
        ping = self._exchange.match(ack)
        if ping is None:
            return
        keepalive_s = self._keepalive.jittered_s(self._random)
        if ping.to is None:
            self._relayed.acked(ping.size_bytes, ping.generation, now - ping.sent_at, now, keepalive_s)
            return
        # A guessed port is no path before it answers.
        path = self._paths.get(ping.to) or self._paths.add(ping.to, CandidateKind.PREDICTED)
        if path is None:
            return
        if ack.observed is not None:
            if path.observed is not None and path.observed != ack.observed:
                if path is self._chosen:
                    self._events.append(events.MappingMoved(path.address, ack.observed, path.observed))
                self._mapping_forgotten(ping.idle_s)
            path.observed = ack.observed
        if path.state is not PathState.USABLE:
            path.socket = ping.socket
        path.acked(ping.size_bytes, ping.generation, now - ping.sent_at, now, keepalive_s)

    def _mapping_forgotten(self, idle_s: float) -> None:
        """A NAT seems to have dropped a mapping after ``idle_s``. Whose is all one: a ping refreshes ours, its ack the
        peer's."""
        if idle_s >= MIN_KEEPALIVE_S and self._keepalive.forgotten_after(idle_s):
            self._events.append(events.KeepaliveShortened(idle_s, self._keepalive.interval_s))

    # -- time -----------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        chosen = self._chosen
        if chosen is not None and chosen.busy_since is not None and not self._flow.busy(now):
            chosen.resting(self._flow.moved_at, self._keepalive.jittered_s(self._random))
        for path in self._paths:
            self._advance_path(path, now)
        self._selection.expire(now)
        self._advance_round(now)

    def _advance_path(self, path: Path, now: float) -> None:
        before = path.state
        path.advance(now)
        if before is PathState.SILENT and path.state is PathState.LOST:
            self._events.append(events.PathLost(path.address))
        if path.too_narrow(now):
            if path.hold_off(now):
                self._events.append(events.PathTooNarrow(path.address))
            return
        silence_s = path.gone_silent(now)
        if silence_s is not None:
            if path is self._chosen:
                self._events.append(events.PathSilent(path.address, silence_s, data_only=False))
            self._mapping_forgotten(path.idle_s)
            path.silent(now)
        elif path is self._chosen:
            self._check_data(path, now)

    def _check_data(self, path: Path, now: float) -> None:
        unanswered_s = self._flow.unanswered_s(now, max(SILENCE_S, 3 * path.round_trip.pto_s))
        if unanswered_s is not None:
            self._events.append(events.PathSilent(path.address, unanswered_s, data_only=True))
            self._flow.restart()
            path.data_lost(now)

    def _advance_round(self, now: float) -> None:
        if self._rounds.over(now) and self._chosen is None and self._paths.trial() is None:
            pause_s = self._rounds.failed(now)
            if self._rounds.failures <= len(RETRY_AFTER_S) and not any(path.worked for path in self._paths):
                self._events.append(events.PunchFailed(len(self._paths), pause_s))
        if self._rounds.due(now):
            self._begin_round(now)

    def _begin_round(self, now: float) -> None:
        self._rounds.begin(now)
        self._relayed.wake(now)
        for path in self._paths:
            path.punch(now)

    def _new_epoch(self, now: float) -> None:
        self._birthday = None
        for path in self._paths:
            path.forget_holds()
        self._rounds.found()
        self._begin_round(now)
        self._settle(now)

    def _send_pings(self, now: float) -> None:
        keepalive_s = self._keepalive.jittered_s(self._random)
        if now >= self._relayed.due_at() and now >= self._exchange.may_ping_at():
            for size in self._relayed.take(now, keepalive_s):
                self._ping(None, self._relayed, size, now)
        for path in sorted(self._paths, key=lambda p: (p.address not in self._routes, not p.worked, p.scope)):
            due_at = path.due_at()
            if due_at is None or now < due_at or now < self._exchange.may_ping_at():
                continue
            before_bytes = path.mtu.confirmed_bytes
            for size in path.take(now):
                self._ping(path.address, path, size, now)
            if before_bytes and not path.mtu.confirmed_bytes and path is self._chosen:
                self._events.append(events.PathNarrowed(path.address, before_bytes))
        self._send_guess(now)

    def _send_guess(self, now: float) -> None:
        if self._birthday is None or self._chosen is not None:
            return
        due_at = self._birthday.due_at()
        if due_at is not None and max(due_at, self._exchange.may_ping_at()) <= now:
            to, socket = self._birthday.take(now)
            self._exchange.ping(Outstanding(to, now, 0.0, MIN_MESSAGE_BYTES, 0, socket))

    def _ping(self, to: Address | None, path: Path | RelayedPath, size_bytes: int, now: float) -> None:
        idle_s = 0.0 if path.sent_at is None else now - path.sent_at
        ping = Outstanding(to, now, idle_s, size_bytes, path.mtu.generation, self.socket_for(to))
        active = to is not None and to in self._routes
        if self._exchange.ping(ping, active=active, punching=to is None and self._rounds.on):
            path.sent_at = now

    # -- choice ---------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """After any input: choose, say what changed, and set the timer."""
        if self._selection.fall():
            self._fell(now)
        before = self._chosen
        if self._selection.improve(self._paths, now):
            self._took_over(before, now)
        if self._chosen is not None:
            self._paths.thin_out(self._chosen, now)
        else:
            self._rounds.ensure(now)
        self._set_routes()
        self._events.path_is(self.address, self.rtt_s, self._max_datagram_bytes)
        self._set_timer(now)

    def _fell(self, now: float) -> None:
        """The path in use no longer works: nothing else is trusted before it is proven again."""
        for path in self._paths.usable():
            path.confirm(now)
        if not self._rounds.on:
            self._begin_round(now)

    def _took_over(self, before: Path | None, now: float) -> None:
        if before is not None:
            before.resting(self._flow.moved_at, self._keepalive.jittered_s(self._random))
        self._rounds.found()
        self._flow.restart()
        if self._chosen is not None and self._flow.busy(now):
            self._chosen.busy(now)

    def _set_routes(self) -> None:
        paths = self._selection.routes(self._paths)
        self._routes = tuple(None if path is None else path.address for path in paths)
        sizes = [self._relayed.max_datagram_bytes if path is None else path.mtu.confirmed_bytes for path in paths]
        # A path still being confirmed has no size of its own yet: the relay's copy is the one that counts.
        self._max_datagram_bytes = min(size for size in sizes if size)

    def _set_timer(self, now: float) -> None:
        times = [path.due_at() for path in self._paths]
        times.append(self._relayed.due_at())
        if self._birthday is not None and self._chosen is None:
            times.append(self._birthday.due_at())
        ping_at = next_due(times, now, self._exchange.may_ping_at())
        rest_at = sooner(self._selection.due_at(), self._rounds.due_at())
        self._timer = ping_at if rest_at is None else min(ping_at, rest_at)
