"""Threads that fetch, the event loop, and links between them: parts of files from member to member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import trio
import trio.testing

from kafila.errors import FetchFailed
from kafila.mesh import Mesh
from kafila.ring.exchange import BESIDE_ANSWERS_BYTES
from kafila.ring.parts import Piece, decode_parts, encode_parts, is_parts
from kafila.shard.neighbours import Nobody
from kafila.shard.patience import Patience
from kafila.sharing import LINK_BYTES, Sharing
from kafila.types import FilePart, FilePiece, NodeId, Withheld

FILE = bytes(range(256)) * 4096
PART = FilePart("model.safetensors", 0, len(FILE))


def whole(part: FilePart) -> FilePiece:
    return FilePiece(part.start, len(FILE), "", FILE[part.start : part.end])


def nothing(part: FilePart) -> Withheld:
    return Withheld.NOT_HELD


class Wire:
    """What a `Sharing` asks of a mesh; messages arrive at once, unless somebody does something to them."""

    def __init__(self, me: NodeId, ring: dict[NodeId, Sharing]) -> None:
        self.me = me
        self.ring = ring
        self.full: set[NodeId] = set()
        self.change: Callable[[bytes], bytes | None] = lambda data: data

    def is_linked(self, peer: NodeId) -> bool:
        return peer in self.ring

    def buffered_bytes(self, peer: NodeId) -> int:
        return LINK_BYTES if peer in self.full else 0

    def send(self, peer: NodeId, data: bytes, *, bulk: bool) -> None:
        assert bulk
        assert is_parts(data)
        if (changed := self.change(data)) is not None:
            trio.lowlevel.current_trio_token().run_sync_soon(self.ring[peer].receive, self.me, changed)


class Ring:
    """Members by name, each a neighbour of every other; those with a ``read`` share."""

    def __init__(self, nursery: trio.Nursery, **reads: Callable[[FilePart], FilePiece | Withheld] | None) -> None:
        self.ids = {name: NodeId(name.encode().ljust(8)) for name in reads}
        self.sharing = {name: Sharing() for name in reads}
        by_id = {self.ids[name]: sharing for name, sharing in self.sharing.items()}
        self.wires = {name: Wire(self.ids[name], by_id) for name in reads}
        for name, read in reads.items():
            if read is not None:
                self.sharing[name].give_from(read)
            others = {peer: other for other, peer in self.ids.items() if other != name}
            self.sharing[name].begin(cast("Mesh", self.wires[name]), others, lambda: None)
            nursery.start_soon(self.sharing[name].run)

    async def fetch(self, name: str, part: FilePart = PART) -> bytes | Nobody:
        """All of a part, as a thread of a member's gets it."""
        sharing = self.sharing[name]

        def fetch() -> bytes | Nobody:
            data = b""
            while len(data) < part.end:
                piece = sharing.ask(replace(part, start=len(data)), Patience())
                if isinstance(piece, Nobody):
                    return piece
                data += piece.data
            return data

        return await trio.to_thread.run_sync(fetch)


def damaged(data: bytes) -> bytes:
    message = decode_parts(data)
    if not isinstance(message, Piece):
        return data
    broken = bytes((message.piece.data[0] ^ 1,)) + message.piece.data[1:]
    return encode_parts(replace(message, piece=replace(message.piece, data=broken)))


async def test_who_holds_a_file_gives_it_in_pieces() -> None:
    async with trio.open_nursery() as nursery:
        ring = Ring(nursery, me=nothing, ada=whole, ben=nothing)
        assert await ring.fetch("me") == FILE
        nursery.cancel_scope.cancel()


async def test_while_answers_go_round_pieces_are_small() -> None:
    async with trio.open_nursery() as nursery:
        ring = Ring(nursery, me=None, ada=whole)
        ring.sharing["ada"].batch_passed()
        piece = await trio.to_thread.run_sync(ring.sharing["me"].ask, PART, Patience())
        assert isinstance(piece, FilePiece)
        assert len(piece.data) == BESIDE_ANSWERS_BYTES
        nursery.cancel_scope.cancel()


async def test_what_one_sends_damaged_another_gives_whole() -> None:
    async with trio.open_nursery() as nursery:
        ring = Ring(nursery, me=nothing, ada=whole, ben=whole)
        ring.wires["ada"].change = damaged
        assert await ring.fetch("me") == FILE
        ring.wires["ben"].change = damaged
        nobody = await ring.fetch("me")
        assert isinstance(nobody, Nobody)
        for name in ("ada", "ben"):
            assert f"{name} sent bytes of model.safetensors that are damaged" in nobody.reasons
        nursery.cancel_scope.cancel()


async def test_what_a_holder_owes_when_it_is_gone_another_gives() -> None:
    async with trio.open_nursery() as nursery:
        ring = Ring(nursery, me=nothing, ada=whole, ben=whole)
        gone = trio.Event()

        def leave_at_the_second_piece(data: bytes) -> bytes | None:
            message = decode_parts(data)
            if isinstance(message, Piece) and message.piece.start and not gone.is_set():
                gone.set()
                ring.sharing["me"].link_down(ring.ids["ada"])
            return None if gone.is_set() else data

        ring.wires["ada"].change = leave_at_the_second_piece
        ring.wires["ben"].full.add(ring.ids["me"])

        async def make_room() -> None:
            await gone.wait()
            ring.wires["ben"].full.clear()
            ring.sharing["ben"].drain()

        nursery.start_soon(make_room)
        assert await ring.fetch("me") == FILE
        assert gone.is_set()
        nursery.cancel_scope.cancel()


async def test_a_holder_waits_for_a_link_that_is_full() -> None:
    async with trio.open_nursery() as nursery:
        ring = Ring(nursery, me=nothing, ada=whole)
        reading: list[FilePart] = []

        def read(part: FilePart) -> FilePiece:
            reading.append(part)
            return whole(part)

        ring.sharing["ada"].give_from(read)
        wire = ring.wires["ada"]
        wire.full.add(ring.ids["me"])
        asked = trio.Event()

        def hear(data: bytes) -> bytes:
            asked.set()
            return data

        ring.wires["me"].change = hear
        async with trio.open_nursery() as fetching:

            async def fetch() -> None:
                assert await ring.fetch("me") == FILE

            fetching.start_soon(fetch)
            await asked.wait()
            await trio.testing.wait_all_tasks_blocked()
            ring.sharing["ada"].drain()
            await trio.testing.wait_all_tasks_blocked()
            assert not reading
            wire.full.clear()
            ring.sharing["ada"].drain()
        assert reading
        nursery.cancel_scope.cancel()


async def test_who_does_not_share_says_so_and_garbage_ends_nothing() -> None:
    async with trio.open_nursery() as nursery:
        ring = Ring(nursery, me=nothing, ada=None, ben=whole)
        ring.wires["ben"].change = lambda data: b"\x03garbage"
        nobody = await ring.fetch("me")
        assert isinstance(nobody, Nobody)
        assert "ada does not share what it has (--share-weights)" in nobody.reasons
        assert "ben sent nonsense" in nobody.reasons
        ring.sharing["me"].receive(NodeId(b"stranger"), b"\x03garbage")
        nursery.cancel_scope.cancel()


async def test_before_the_ring_and_after_the_member_nobody_is_asked() -> None:
    sharing = Sharing()
    assert sharing.ask(PART, Patience()) == Nobody("the ring is not formed yet", unasked=True)
    async with trio.open_nursery() as nursery:
        ring = Ring(nursery, me=nothing, ada=nothing)
        ring.wires["ada"].change = lambda data: None
        patience = Patience()
        patience.stopping.set()
        with pytest.raises(FetchFailed, match="leaving"):
            await trio.to_thread.run_sync(ring.sharing["me"].ask, PART, patience)
        too_long = await ring.fetch("me", replace(PART, file="x" * 300))
        assert isinstance(too_long, Nobody)
        assert "longer than" in too_long.reasons
        nursery.cancel_scope.cancel()
