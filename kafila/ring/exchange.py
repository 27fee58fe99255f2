"""Parts of a checkpoint's files, asked of neighbours and given to them (sans-IO).

    wish     waits --a linked neighbour has room--> asked --piece, whole and as asked for--> given
             asked --refused, damaged, 30 s of silence, link down--> waits, for those who were not tried
             waits --nobody is left who was not tried--> not given, and the reason of each

    giver    a neighbour's wants wait in its queue; one at a time, the neighbours in turn, is read and sent, and only to
             a link that has little on its way. While answers go round, little pieces with pauses between them.

What is checked: a piece is of the file, the place and at most the length that was asked for, and its data have the
SHA-256 that the holder states of what it read. That notices what is damaged between the holder's reading and the
asker's writing. It does not notice what the holder's disk had wrong before, nor a holder that lies: a file's own
digest, where a source tells one, is of the whole file and proves nothing of a part. Members of a session trust one
another; what is fetched besides passes the checkpoint's fingerprint (``shard/fingerprint.py``), which is of a few
kilobytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kafila.ring.parts import MAX_PIECE_BYTES, Piece, Refuse, Want
from kafila.types import FilePart, FilePiece, NodeId, Withheld

ASKED_AT_ONCE = 4
"""Wants on their way to one neighbour: two megabytes, a gigabit over 16 ms, and a bound on what a holder queues."""
SILENCE_S = 30.0
"""A neighbour that owes pieces and gives none for so long is not waited for. A dead link is noticed much earlier."""
QUIET_S = 1.0
"""Without a batch for so long, the ring is not answering anybody."""
BESIDE_ANSWERS_BYTES = 32 * 2**10
BESIDE_ANSWERS_EVERY_S = 0.25
"""Pieces while answers go round: 1 Mbit/s, and none that a token waits for longer than 3 ms at 100 Mbit/s."""

_REASONS = {
    Withheld.NOT_SHARING: "does not share what it has (--share-weights)",
    Withheld.NOT_HELD: "does not hold it",
    Withheld.OTHER_VERSION: "holds another version of it",
    Withheld.ABSENT: "has no such file",
    Withheld.BUSY: "was asked for too much at once",
}


@dataclass(frozen=True, slots=True)
class Given:
    """A wish's piece, or its beginning."""

    number: int
    giver: NodeId
    piece: FilePiece


@dataclass(frozen=True, slots=True)
class NotGiven:
    """Nobody gives it. ``text`` names each neighbour and its reason; ``absent``: the checkpoint has no such file."""

    number: int
    text: str
    absent: bool = False


@dataclass(slots=True)
class _Neighbour:
    name: str
    linked: bool = False
    heard_at: float = 0.0
    doubtful: bool = False
    """Whether its last word was a refusal: others are asked first."""
    out_for: str = ""
    """Why it is not asked any more."""
    owes: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Wish:
    number: int
    part: FilePart
    asked: NodeId | None = None
    asked_at: float = 0.0
    tried: dict[NodeId, str] = field(default_factory=dict)
    absent: bool = False


class Asker:
    """Wishes of this member's, and the neighbours that may fulfil them. ``names``: what people call them."""

    def __init__(self, names: Mapping[NodeId, str]) -> None:
        self._neighbours = {peer: _Neighbour(name) for peer, name in names.items()}
        self._wishes: dict[int, _Wish] = {}  # bounded by whoever asks: a wish for each thread that fetches
        self._sends: deque[tuple[NodeId, Want]] = deque()
        self._events: deque[Given | NotGiven] = deque()

    def ask(self, number: int, part: FilePart, now: float) -> None:
        """Ask for a part; ``number`` is none that is in use."""
        self._wishes[number] = _Wish(number, part)
        self._assign(now)

    def link_up(self, peer: NodeId, now: float) -> None:
        """A neighbour can be asked."""
        if (neighbour := self._neighbours.get(peer)) is not None:
            neighbour.linked = True
            self._assign(now)

    def link_down(self, peer: NodeId, now: float) -> None:
        """A neighbour is gone: what it owes is asked of others."""
        self._drop(peer, "has left", now)

    def nonsense(self, peer: NodeId, why: str, now: float) -> None:
        """A neighbour does not keep to the protocol, and is not asked any more."""
        self._drop(peer, f"sent nonsense ({why})", now)

    def receive(self, peer: NodeId, answer: Piece | Refuse, now: float) -> None:
        """A neighbour's answer. One that nobody waits for any more is passed over."""
        wish, neighbour = self._wishes.get(answer.number), self._neighbours.get(peer)
        if wish is None or neighbour is None or wish.asked != peer:
            return
        neighbour.heard_at = now
        if isinstance(answer, Refuse):
            self._refused(wish, neighbour, answer.why)
        elif (fault := _fault(wish.part, answer)) is not None:
            self._tried(wish, fault)
        else:
            neighbour.doubtful = False
            neighbour.owes.discard(wish.number)
            del self._wishes[wish.number]
            self._events.append(Given(wish.number, peer, answer.piece))
        self._assign(now)

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` wants to be called."""
        return min((self._due(wish) for wish in self._wishes.values() if wish.asked is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Call at or after :meth:`next_timer`."""
        for wish in list(self._wishes.values()):
            if wish.asked is not None and self._due(wish) <= now:
                self._tried(wish, f"did not answer for {SILENCE_S:.0f} s")
        self._assign(now)

    def next_send(self) -> tuple[NodeId, Want] | None:
        """A want for a neighbour, or None."""
        return self._sends.popleft() if self._sends else None

    def next_event(self) -> Given | NotGiven | None:
        """What became of a wish, or None."""
        return self._events.popleft() if self._events else None

    def _due(self, wish: _Wish) -> float:
        heard_at = 0.0 if wish.asked is None else self._neighbours[wish.asked].heard_at
        return max(wish.asked_at, heard_at) + SILENCE_S

    def _refused(self, wish: _Wish, neighbour: _Neighbour, why: Withheld) -> None:
        neighbour.doubtful = True
        if why is Withheld.NOT_SHARING:
            neighbour.out_for = _REASONS[why]
        wish.absent |= why is Withheld.ABSENT
        self._tried(wish, _REASONS[why])

    def _tried(self, wish: _Wish, why: str) -> None:
        if wish.asked is not None:
            self._neighbours[wish.asked].owes.discard(wish.number)
            wish.tried[wish.asked] = why
            wish.asked = None

    def _drop(self, peer: NodeId, why: str, now: float) -> None:
        if (neighbour := self._neighbours.get(peer)) is None:
            return
        neighbour.linked, neighbour.out_for = False, neighbour.out_for or why
        for number in list(neighbour.owes):
            self._tried(self._wishes[number], why)
        self._assign(now)

    def _assign(self, now: float) -> None:
        for wish in list(self._wishes.values()):
            if wish.asked is not None:
                continue
            able = [peer for peer, one in self._neighbours.items() if not one.out_for and peer not in wish.tried]
            if not able:
                self._give_up(wish)
                continue
            free = [peer for peer in able if self._neighbours[peer].linked and self._has_room(peer)]
            if free:
                self._send(wish, min(free, key=self._preference), now)

    def _has_room(self, peer: NodeId) -> bool:
        return len(self._neighbours[peer].owes) < ASKED_AT_ONCE

    def _preference(self, peer: NodeId) -> tuple[bool, int]:
        neighbour = self._neighbours[peer]
        return neighbour.doubtful, len(neighbour.owes)

    def _send(self, wish: _Wish, peer: NodeId, now: float) -> None:
        wish.asked, wish.asked_at = peer, now
        self._neighbours[peer].owes.add(wish.number)
        self._sends.append((peer, Want(wish.number, wish.part)))

    def _give_up(self, wish: _Wish) -> None:
        del self._wishes[wish.number]
        reasons = [f"{one.name} {wish.tried.get(peer, one.out_for)}" for peer, one in self._neighbours.items()]
        self._events.append(NotGiven(wish.number, ", ".join(reasons) or "this member has no neighbours", wish.absent))


class Giver:
    """What neighbours want of this member, one thing at a time."""

    def __init__(self, *, willing: bool) -> None:
        self.willing = willing
        self._queues: dict[NodeId, deque[Want]] = {}
        """In the order of their turns."""
        self._batch_at = float("-inf")
        self._gave_at = float("-inf")

    @property
    def waited_for(self) -> bool:
        """Whether anybody waits."""
        return any(self._queues.values())

    def receive(self, peer: NodeId, want: Want) -> Refuse | None:
        """Queue a want, or say no."""
        if not self.willing:
            return Refuse(want.number, Withheld.NOT_SHARING)
        queue = self._queues.setdefault(peer, deque())
        if len(queue) >= ASKED_AT_ONCE:
            return Refuse(want.number, Withheld.BUSY)
        queue.append(want)
        return None

    def link_down(self, peer: NodeId) -> None:
        """A neighbour is gone, and wants nothing any more."""
        self._queues.pop(peer, None)

    def batch_passed(self, now: float) -> None:
        """An answer's rows came by."""
        self._batch_at = now

    def next_job(self, has_room: Callable[[NodeId], bool], now: float) -> tuple[NodeId, Want] | None:
        """What to read and give now, cut to what may go at once, or None. ``has_room``: whether a link has little on
        its way."""
        if now < self.not_before:
            return None
        for peer, queue in self._queues.items():
            if queue and has_room(peer):
                self._queues[peer] = self._queues.pop(peer)  # its next turn comes last
                self._gave_at = now
                return peer, _cut(queue.popleft(), BESIDE_ANSWERS_BYTES if self._answering(now) else MAX_PIECE_BYTES)
        return None

    @property
    def not_before(self) -> float:
        """When the next piece may be given."""
        return self._gave_at + BESIDE_ANSWERS_EVERY_S if self._answering(self._gave_at) else float("-inf")

    def _answering(self, now: float) -> bool:
        return now < self._batch_at + QUIET_S


def _cut(want: Want, most_bytes: int) -> Want:
    part = want.part
    return Want(want.number, replace(part, end=min(part.end, part.start + most_bytes)))


def _fault(part: FilePart, answer: Piece) -> str | None:
    """What is wrong with a piece, in words; None: nothing."""
    piece = answer.piece
    if piece.start != part.start or len(piece.data) > part.end - part.start:
        return f"sent another part of {part.file} than it was asked for"
    if part.size and piece.size != part.size:
        return f"sent a part of another {part.file} than it was asked for"
    if not piece.data and piece.start < piece.size:
        return f"sent nothing of {part.file}"
    return (
        None if answer.whole else f"sent bytes of {part.file} that are damaged: their SHA-256 is not the one it states"
    )
