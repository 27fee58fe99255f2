"""What the virtual network did, record by record: kept in memory, printed as lines, or written as pcapng.

A sink is a function of one :class:`Record`. With no sink attached nothing is recorded and nothing is paid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple, TextIO

from sims.packet import Packet


class What(Enum):
    """What happened at a place."""

    SENT = "sent"
    RECEIVED = "received"
    TRANSLATED = "translated"
    DROPPED = "dropped"
    NOTE = "note"
    """Something that is no packet: a reboot, a partition, a machine falling asleep."""


class Record(NamedTuple):
    """One line of a trace. ``packet`` is None for a note only; addresses are those seen *after* the event."""

    time_s: float
    where: str
    what: What
    packet: Packet | None
    detail: str


Sink = Callable[[Record], None]

MEMORY_RECORDS = 200_000
"""About 60 MB of records of small packets: a scenario of minutes, but never the whole of a machine's memory."""


class MemoryTrace:
    """The latest ``limit`` records, for tests and for printing after a failure."""

    def __init__(self, limit: int = MEMORY_RECORDS) -> None:
        self.records: deque[Record] = deque(maxlen=limit)

    def __call__(self, record: Record) -> None:
        self.records.append(record)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def lines(self) -> list[str]:
        """Every record kept, as text."""
        return [format_record(record) for record in self.records]

    def drops(self) -> list[Record]:
        """The packets that went no further."""
        return [record for record in self.records if record.what is What.DROPPED]


class TextTrace:
    """Writes each record as a line as it happens."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, record: Record) -> None:
        self._file.write(format_record(record) + "\n")


def format_record(record: Record) -> str:
    """One line: time, place, endpoints, payload length, what happened and why."""
    head = f"{record.time_s:12.6f}  {record.where:<16}"
    if record.packet is None:
        return f"{head}  {record.detail}"
    packet = record.packet
    flow = f"{_endpoint(*packet.source)} > {_endpoint(*packet.to)}"
    detail = f": {record.detail}" if record.detail else ""
    return f"{head}  {flow:<47} {len(packet.data):>5} B  {record.what.value}{detail}"


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
