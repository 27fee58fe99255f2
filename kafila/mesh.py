"""A member's whole network stack as one sans-IO machine: the rendezvous, and a link to each peer it was told of.

    datagram --classify--> the rendezvous' control connection | path message | QUIC | early words
    a peer  =  PeerPaths (which way)  under  QuicConnection (what, secret and in order)

QUIC begins through the relay at once, while both sides punch (DESIGN section 5). It knows nothing of addresses: what it
wants sent goes wherever the peer's paths say now, and it is told when that changes.

    link   OPENING --Established--> UP --closed by either side, or silence for GONE_AFTER_S--> gone

How long a link may be OPENING is for whoever opened it to say: the other end may not have been told of it yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kafila.errors import ProtocolError
from kafila.mesh_events import Event, Extra, LinkDown, LinkMessage, LinkState, LinkUp, PathNews
from kafila.nat import events as path_events
from kafila.nat.birthday import BirthdayRole
from kafila.nat.candidates import Candidate, canonical
from kafila.nat.messages import sender_of
from kafila.nat.paths import PeerPaths
from kafila.nat.schedule import Randomness
from kafila.ring import quic
from kafila.ring.control import MemberJoined
from kafila.ring.early import EarlyWords, Party
from kafila.ring.identity import Identity
from kafila.ring.quic import QuicConnection, Stream
from kafila.ring.rendezvous_client import Event as ControlEvent
from kafila.ring.rendezvous_client import Joined, Relayed, RendezvousClient, State
from kafila.types import Address, NodeId, Transmit
from kafila.wire import Kind, classify

__all__ = ["Event", "Extra", "LinkDown", "LinkMessage", "LinkState", "LinkUp", "Mesh", "PathNews"]

ALPN = "kafila-ring/1"

HEARTBEAT_S = 1.0
"""A link that carries nothing is pinged this often, so that a dead peer is noticed in seconds."""
GONE_AFTER_S = 6.0
"""Silence on every path after which a peer is gone while the rendezvous still answers: six heartbeats, and longer than
a direct path takes to be given up for the relay."""
GONE_WITHOUT_RENDEZVOUS_S = 30.0
"""The same while the rendezvous is away, for a relayed link can only come back with it."""
UNHEARD = "the others went on without this machine: they heard nothing of it (was it asleep, or far too busy?)"
"""What a peer that was given up for silence is told, should it come back."""
MAX_EARLY_DATAGRAMS = 32
"""Kept of a peer that dialled before this member was told of it: a handshake's first flight, early words, and pings."""
MAX_EXTRAS = 1024
"""Datagrams waiting for an extra socket; they are fetched with every flush, and the oldest are lost."""
MAX_EARLY_PEERS = 64
"""At most so many such peers; the rendezvous lets in no more members."""


@dataclass(slots=True)
class _Link:
    peer: NodeId
    paths: PeerPaths
    connection: QuicConnection
    heard_at: float
    beat_at: float


class Mesh:
    """One member's network. Drive it with :class:`kafila.endpoint.Endpoint`.

    ``link_key`` seals path messages (32 bytes, from the session code); ``random`` must be unpredictable outside
    simulations.
    """

    def __init__(self, identity: Identity, link_key: bytes, control: RendezvousClient, random: Randomness) -> None:
        self.dropped = 0
        """Datagrams from nobody we know."""
        self._identity = identity
        self._link_key = link_key
        self._control = control
        self._random = random
        self._links: dict[NodeId, _Link] = {}
        self._ready_at = float("-inf")
        self._early: dict[NodeId, list[bytes]] = {}
        self._closing: deque[Transmit] = deque(maxlen=MAX_EARLY_PEERS)
        self._extras: deque[Extra] = deque(maxlen=MAX_EXTRAS)
        self._events: deque[Event] = deque()

    def open_link(
        self,
        peer: NodeId,
        fingerprint: bytes,
        candidates: Sequence[Candidate],
        now: float,
        *,
        same_machine: bool,
        early_key: bytes = b"",
        epoch: int = 0,
    ) -> None:
        """Link with a peer, whose certificate has this fingerprint (SHA-256, 32 bytes). Opening twice is once.

        The lower node id is the QUIC client, whoever dials (DESIGN section 4). With the peer's ``early_key`` (X25519,
        32 bytes) the first words of both need not wait for the handshake; ``epoch`` is that of the assignment, and the
        same at both.
        """
        if peer in self._links:
            return
        me = self._identity.node_id
        paths = PeerPaths(me, peer, self._link_key, candidates, now, self._random, same_machine=same_machine)
        role = QuicConnection.client if me < peer else QuicConnection.server
        early = self._early_words(Party(fingerprint, early_key), epoch)
        connection = role(
            self._identity, fingerprint, now, alpn=ALPN, idle_timeout_s=2 * GONE_WITHOUT_RENDEZVOUS_S, early=early
        )
        link = self._links[peer] = _Link(peer, paths, connection, now, now + HEARTBEAT_S)
        for datagram in self._early.pop(peer, ()):
            self._from_peer(link, datagram, None, now)

    def _early_words(self, peer: Party, epoch: int) -> EarlyWords | None:
        try:
            return EarlyWords(self._identity.early, self._identity.fingerprint, peer, self._link_key, epoch)
        except ProtocolError:  # it has no key, and the link does without
            return None

    def peer_moved(self, peer: NodeId, candidates: Sequence[Candidate], now: float) -> None:
        """A peer is reached at other addresses now."""
        if (link := self._links.get(peer)) is not None:
            link.paths.set_candidates(candidates, now)

    def network_changed(self, now: float) -> None:
        """This machine's network changed: no path is proven any more, and where we are seen may be elsewhere."""
        for link in self._links.values():
            link.paths.network_changed(now)
        self._control.network_changed(now)

    def send(self, peer: NodeId, data: bytes, *, bulk: bool) -> None:
        """Queue a message; without a link it goes nowhere, and :class:`LinkDown` has been told."""
        if (link := self._links.get(peer)) is not None:
            link.connection.send(Stream.BULK if bulk else Stream.CONTROL, data)
            self._collect(link)

    def link_state(self, peer: NodeId) -> LinkState | None:
        """How a link travels now; None when there is none."""
        link = self._links.get(peer)
        if link is None or not link.connection.established:
            return None
        return LinkState(link.paths.kind, link.paths.rtt_s or link.connection.rtt_s)

    def is_linked(self, peer: NodeId) -> bool:
        """Whether the peer is authenticated and not gone."""
        link = self._links.get(peer)
        return link is not None and link.connection.established

    def buffered_bytes(self, peer: NodeId) -> int:
        """What was given to :meth:`send` for a peer and is not acknowledged yet; 0 without a link."""
        link = self._links.get(peer)
        return 0 if link is None else link.connection.buffered_bytes

    @property
    def control(self) -> RendezvousClient:
        """The connection to the rendezvous: signalling goes there."""
        return self._control

    def close(self, now: float, reason: str) -> None:
        """Say goodbye to every peer and the rendezvous; send what :meth:`datagrams_to_send` has, then stop driving."""
        for peer in list(self._links):
            self._hang_up(peer, reason, now)
        self._control.leave(now)

    def close_link(self, peer: NodeId, now: float, reason: str) -> None:
        """Say goodbye to one peer, if there is a link with it."""
        if peer in self._links:
            self._hang_up(peer, reason, now)

    def _hang_up(self, peer: NodeId, reason: str, now: float) -> None:
        link = self._links[peer]
        link.connection.close(now, reason)
        self._closing.extend(self._transmits(link, now))
        del self._links[peer]

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """One datagram. Never raises, whatever the bytes."""
        source = canonical(source) or source
        if source == self._control.server:
            self._control.receive(data, source, now)
            self._collect_control(now)
            return
        kind = classify(data)
        if kind is Kind.PATH:
            sender = sender_of(data)
            link = None if sender is None else self._links.get(sender)
        elif kind is Kind.QUIC or kind is Kind.EARLY:
            link = self._owner(source)
        else:
            link = None
        if link is None:
            self.dropped += 1
        else:
            self._from_peer(link, data, source, now)

    def _owner(self, source: Address) -> _Link | None:
        for link in self._links.values():
            if link.paths.owns(source):
                return link
        return None

    def begin_birthday(self, peer: NodeId, role: BirthdayRole, now: float, sockets: int = 0) -> bool:
        """Try birthday probing towards a peer (``nat/birthday.py``) with so many extra sockets; whether it began."""
        link = self._links.get(peer)
        return link is not None and link.paths.begin_birthday(role, now, sockets)

    def receive_extra(self, peer: NodeId, number: int, data: bytes, source: Address, now: float) -> None:
        """A datagram came in at one of ``peer``'s extra sockets. Never raises, whatever the bytes."""
        source, link = canonical(source) or source, self._links.get(peer)
        ours = link is not None and (
            sender_of(data) == peer if classify(data) is Kind.PATH else link.paths.owns(source)
        )
        if link is None or not ours:
            self.dropped += 1
        else:
            self._from_peer(link, data, source, now, number)

    def next_extra(self) -> Extra | None:
        """What leaves from an extra socket, or None."""
        return self._extras.popleft() if self._extras else None

    def extra_socket_of(self, peer: NodeId) -> int:
        """The extra socket that a link's path stands on; 0: none."""
        link = self._links.get(peer)
        return 0 if link is None else link.paths.socket_for(link.paths.address)

    def _from_peer(self, link: _Link, data: bytes, source: Address | None, now: float, number: int = 0) -> None:
        """A peer's datagram, from ``source`` or (None) out of a relay envelope."""
        kind = classify(data)
        if kind is Kind.PATH:
            link.paths.receive(data, source, now, number)
        elif kind is Kind.QUIC:
            link.connection.receive([data], now)
            link.paths.data_received(source, now)
            link.heard_at = now  # its time begins with the first thing that it can be silent after
        elif kind is Kind.EARLY:
            link.connection.receive_early(data)
        else:
            self.dropped += 1
        self._collect(link)

    def _collect(self, link: _Link) -> None:
        """Tell what a link has to tell."""
        while (event := link.connection.next_event()) is not None:
            match event:
                case quic.Message(stream, data):
                    self._events.append(LinkMessage(link.peer, stream is Stream.BULK, data))
                case quic.Established():
                    self._events.append(LinkUp(link.peer))
                case quic.Closed(reason, by_peer):
                    self._events.append(LinkDown(link.peer, reason, by_peer))

    def _collect_control(self, now: float) -> None:
        while (event := self._control.next_event()) is not None:
            if not isinstance(event, Relayed):
                self._relay_is_back(event, now)
                self._events.append(event)
            elif (link := self._links.get(event.sender)) is not None:
                self._from_peer(link, event.datagram, None, now)
            elif event.sender in self._early or len(self._early) < MAX_EARLY_PEERS:
                early = self._early.setdefault(event.sender, [])
                if len(early) < MAX_EARLY_DATAGRAMS:
                    early.append(event.datagram)

    def _relay_is_back(self, event: ControlEvent, now: float) -> None:
        """After a loss of the rendezvous, ours or a peer's, relayed links go on at once."""
        if isinstance(event, Joined):
            self._ready_at = now
            for link in self._links.values():
                link.connection.retry_now()
        elif isinstance(event, MemberJoined) and (back := self._links.get(event.member)) is not None:
            back.connection.retry_now()

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` wants to be called."""
        soonest = self._control.next_timer()
        for link in self._links.values():
            for due in (link.paths.next_timer(), link.connection.next_timer(), link.beat_at):
                if due is not None and (soonest is None or due < soonest):
                    soonest = due
        return soonest

    def handle_timer(self, now: float) -> None:
        """Call at or after :meth:`next_timer`."""
        if _due(self._control.next_timer(), now):
            self._control.handle_timer(now)
            self._collect_control(now)
        for link in list(self._links.values()):
            if _due(link.paths.next_timer(), now):
                link.paths.handle_timer(now)
            if _due(link.connection.next_timer(), now):
                link.connection.handle_timer(now)
            if _due(link.beat_at, now):
                self._beat(link, now)
            self._collect(link)

    def _beat(self, link: _Link, now: float) -> None:
        late_s = now - link.beat_at
        if late_s > HEARTBEAT_S:
            # This process stood still (a lid closed, a processor taken): what arrived meanwhile is yet to be read, and
            # our own pause must not be taken for the peer's.
            link.heard_at += late_s
        link.beat_at = now + HEARTBEAT_S
        if self._control.state is State.READY:
            # A rendezvous that just came back gives a relayed peer the same time as any other to be heard again.
            patience_s, since = GONE_AFTER_S, max(link.heard_at, self._ready_at)
        else:
            patience_s, since = GONE_WITHOUT_RENDEZVOUS_S, link.heard_at
        if not link.connection.established:
            link.heard_at = now  # its time begins with the first thing that it can be silent after
        elif now - since >= patience_s:
            self._hang_up(link.peer, UNHEARD, now)
            self._events.append(LinkDown(link.peer, f"no sign of life for {patience_s:.0f} s", by_peer=False))
        elif now - link.heard_at >= HEARTBEAT_S:
            link.connection.ping()

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        """What should leave now, data before all else; call until there is nothing."""
        for link in self._links.values():
            if not link.connection.closed and (data := self._data(link, now)):
                return data
        transmits = list(self._closing)
        self._closing.clear()
        for link in list(self._links.values()):
            transmits += self._transmits(link, now)
            if link.connection.closed:
                del self._links[link.peer]
        # What the links put into envelopes counts against the relay's quotas, so the control connection speaks last.
        transmits += self._control.datagrams_to_send(now)
        return transmits

    def _transmits(self, link: _Link, now: float) -> list[Transmit]:
        out: list[Transmit] = []
        for probe in link.paths.probes_to_send(now):
            self._address(link, probe.data, probe.to, probe.socket, now, out)
        self._path_news(link, now)
        return out + self._data(link, now)

    def _data(self, link: _Link, now: float) -> list[Transmit]:
        out: list[Transmit] = []
        if datagrams := link.connection.datagrams_to_send(now):
            if link.connection.awaits_answer:
                link.paths.data_sent(now)
            for route in link.paths.routes(now):
                number = link.paths.socket_for(route)
                for datagram in datagrams:
                    self._address(link, datagram, route, number, now, out)
        return out

    def _path_news(self, link: _Link, now: float) -> None:
        while (news := link.paths.next_event()) is not None:
            if isinstance(news, path_events.PathSilent | path_events.PathNarrowed):
                link.connection.path_silent(now)
            elif isinstance(news, path_events.PathChanged):
                link.connection.path_changed(now, link.paths.max_datagram_bytes)
            elif isinstance(news, path_events.DatagramSizeChanged):
                link.connection.datagram_size_changed(link.paths.max_datagram_bytes)
            self._events.append(PathNews(link.peer, news))

    def _address(
        self, link: _Link, datagram: bytes, route: Address | None, number: int, now: float, out: list[Transmit]
    ) -> None:
        """Put a datagram on its way: by the relay, the one socket (both in ``out``), or an extra one."""
        if route is None:
            out.append(self._control.relay(link.peer, datagram, now))
        elif number:
            self._extras.append(Extra(link.peer, number, Transmit(datagram, route)))
        else:
            out.append(Transmit(datagram, route))

    def next_event(self) -> Event | None:
        """What happened, in order, or None."""
        return self._events.popleft() if self._events else None


def _due(timer: float | None, now: float) -> bool:
    return timer is not None and timer <= now
