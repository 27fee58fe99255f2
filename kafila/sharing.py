"""Parts of the checkpoint from and for ring neighbours: threads that fetch on one side, links on the other (Trio).

    thread that fetches --ask--> Asker --wants--> link        link --wants--> Giver --a thread reads--> pieces --> link

A member whose owner has not allowed it (``--share-weights``) says so to whoever asks, and asks nobody.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from hashlib import sha256
from math import inf

import trio

from kafila.errors import FetchFailed, ProtocolError
from kafila.mesh import Mesh
from kafila.ring.exchange import Asker, Given, Giver
from kafila.ring.parts import MAX_ETAG_BYTES, Parts, Piece, Refuse, Want, decode_parts, encode_parts
from kafila.shard.neighbours import Nobody
from kafila.shard.patience import Patience
from kafila.types import FilePart, FilePiece, NodeId, Withheld

LINK_BYTES = 2**20
"""Pieces are given to a link that has less than this on its way: more would fill queues that answers wait in, less
would leave a line of 100 Mbit/s and 50 ms idle."""
LOOK_AGAIN_S = 0.2
"""How often a thread that waits for a piece looks whether its member is leaving."""

Read = Callable[[FilePart], FilePiece | Withheld]
"""Reads what this member holds; called in a thread, one call at a time."""


class Sharing:
    """One member's. :meth:`ask` is for threads, all else for the event loop."""

    def __init__(self) -> None:
        self._read: Read | None = None
        self._giver = Giver(willing=False)
        self._asker = Asker({})
        self._neighbours: frozenset[NodeId] = frozenset()
        self._mesh: Mesh | None = None
        self._poke: Callable[[], None] = _nothing
        self._token: trio.lowlevel.TrioToken | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[FilePiece | Nobody]] = {}
        self._stirred = trio.Event()

    def give_from(self, read: Read) -> None:
        """The owner allows it: neighbours get what ``read`` reads."""
        self._read = read
        self._giver = Giver(willing=True)

    # -- in threads that fetch -----------------------------------------------------------------------------------------

    def ask(self, part: FilePart, patience: Patience) -> FilePiece | Nobody:
        """What neighbours give of a part. Blocks; raises FetchFailed when this member is leaving."""
        if self._token is None:
            return Nobody("the ring is not formed yet", unasked=True)
        answer: Future[FilePiece | Nobody] = Future()
        try:
            self._token.run_sync_soon(self._ask, part, answer)
        except trio.RunFinishedError as error:
            raise FetchFailed("fetching was given up: this member is leaving") from error
        while True:
            try:
                return answer.result(LOOK_AGAIN_S)
            except TimeoutError:
                patience.go_on()

    # -- in the event loop ---------------------------------------------------------------------------------------------

    def begin(self, mesh: Mesh, neighbours: Mapping[NodeId, str], poke: Callable[[], None]) -> None:
        """The ring is known: its neighbours of this member that can be asked, and what people call them."""
        self._mesh, self._poke, self._token = mesh, poke, trio.lowlevel.current_trio_token()
        self._neighbours = frozenset(neighbours)
        self._asker = Asker(neighbours)
        for answer in self._waiting.values():
            answer.set_result(Nobody("the ring was formed anew"))
        self._waiting.clear()
        for peer in neighbours:
            if mesh.is_linked(peer):
                self.link_up(peer)

    async def run(self) -> None:
        """Give, and keep time, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_time)
            nursery.start_soon(self._give)

    def link_up(self, peer: NodeId) -> None:
        """A neighbour can be asked."""
        self._asker.link_up(peer, trio.current_time())
        self._move()

    def link_down(self, peer: NodeId) -> None:
        """A neighbour is gone."""
        self._giver.link_down(peer)
        self._asker.link_down(peer, trio.current_time())
        self._move()

    def batch_passed(self) -> None:
        """An answer's rows came by: pieces make room."""
        if self._giver.willing:
            self._giver.batch_passed(trio.current_time())

    def receive(self, peer: NodeId, data: bytes) -> None:
        """A message that `is_parts`, of somebody linked with this member. Never raises, whatever the bytes."""
        now = trio.current_time()
        if peer not in self._neighbours:
            return  # a guest holds nothing, and is given nothing
        try:
            message = decode_parts(data)
        except ProtocolError as error:
            self._asker.nonsense(peer, str(error), now)
        else:
            if not isinstance(message, Want):
                self._asker.receive(peer, message, now)
            elif (refusal := self._giver.receive(peer, message)) is not None:
                self._send(peer, refusal)
        self._move()

    def drain(self) -> None:
        """The node calls this around every flush: a link may have room again."""
        if self._giver.waited_for:
            self._stir()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _ask(self, part: FilePart, answer: Future[FilePiece | Nobody]) -> None:
        number = next(self._numbers)
        try:
            encode_parts(Want(number, part))
        except ProtocolError as error:
            answer.set_result(Nobody(str(error)))
            return
        self._waiting[number] = answer
        self._asker.ask(number, part, trio.current_time())
        self._move()

    def _move(self) -> None:
        while (send := self._asker.next_send()) is not None:
            self._send(*send)
        while (event := self._asker.next_event()) is not None:
            answer = self._waiting.pop(event.number)
            answer.set_result(event.piece if isinstance(event, Given) else Nobody(event.text, event.absent))
        self._stir()

    def _send(self, peer: NodeId, message: Parts) -> None:
        if self._mesh is not None:
            self._mesh.send(peer, encode_parts(message), bulk=True)
            self._poke()

    def _stir(self) -> None:
        self._stirred.set()
        self._stirred = trio.Event()

    async def _keep_time(self) -> None:
        while True:
            due = self._asker.next_timer()
            if due is not None and due <= trio.current_time():
                self._asker.handle_timer(trio.current_time())
                self._move()
                continue
            with trio.move_on_at(inf if due is None else due):
                await self._stirred.wait()

    async def _give(self) -> None:
        while True:
            now = trio.current_time()
            job = self._giver.next_job(self._has_room, now)
            if job is not None:
                await self._give_one(*job)
                continue
            pause = self._giver.not_before
            with trio.move_on_at(pause if self._giver.waited_for and pause > now else inf):
                await self._stirred.wait()

    async def _give_one(self, peer: NodeId, want: Want) -> None:
        if self._read is None:
            return
        answer = await trio.to_thread.run_sync(_answer, self._read, want, abandon_on_cancel=True)
        self._send(peer, answer)

    def _has_room(self, peer: NodeId) -> bool:
        return self._mesh is not None and self._mesh.buffered_bytes(peer) < LINK_BYTES


def _answer(read: Read, want: Want) -> Piece | Refuse:
    piece = read(want.part)
    if isinstance(piece, Withheld):
        return Refuse(want.number, piece)
    if len(piece.etag.encode("utf-8", "replace")) > MAX_ETAG_BYTES:
        piece = replace(piece, etag="")
    return Piece(want.number, piece, sha256(piece.data).digest())


def _nothing() -> None:
    pass
