"""Writes a trace as a pcapng file, which Wireshark and tcpdump read.

Format: draft-ietf-opsawg-pcapng. One interface for each place of the network, so that a NAT's two sides can be told
apart by filter; what was dropped, translated or noted stands in the packet's comment.
"""

from __future__ import annotations

import struct
from ipaddress import ip_address
from typing import BinaryIO

from sims.packet import UDP_HEADER_BYTES, Packet, is_v6
from sims.trace import Record, What

_SECTION_HEADER, _INTERFACE, _ENHANCED_PACKET = 0x0A0D0D0A, 1, 6
_BYTE_ORDER_MAGIC = 0x1A2B3C4D
_UNKNOWN_LENGTH = 0xFFFF_FFFF_FFFF_FFFF
_LINKTYPE_RAW = 101  # the packet begins with its IP header; the version nibble tells which
_NO_SNAP_LENGTH = 0

_OPTION_END, _OPTION_COMMENT = 0, 1
_OPTION_INTERFACE_NAME, _OPTION_TIME_RESOLUTION = 2, 9
_OPTION_PACKET_FLAGS = 2
_NANOSECONDS = 9  # 10 to the minus this
_DIRECTION = {What.RECEIVED: 1, What.SENT: 2}  # inbound, outbound; anything else is unknown

_UDP = 17
_HOP_LIMIT = 64


class PcapngTrace:
    """A trace sink that writes to an open binary file as packets happen."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._interfaces: dict[str, int] = {}
        self._notes: list[str] = []
        body = struct.pack("<IHHQ", _BYTE_ORDER_MAGIC, 1, 0, _UNKNOWN_LENGTH)
        file.write(_block(_SECTION_HEADER, body))

    def __call__(self, record: Record) -> None:
        """Write one record. The format has no place for a note but a packet's comment: it goes to the next one."""
        if record.packet is None:
            self._notes.append(f"{record.where} {record.detail}")
            return
        interface = self._interfaces.get(record.where)
        if interface is None:
            interface = self._interfaces[record.where] = len(self._interfaces)
            self._file.write(_interface(record.where))
        said = f"{record.what.value}: {record.detail}" if record.detail else ""
        comment = "; ".join([*self._notes, said] if said else self._notes)
        self._notes.clear()
        self._file.write(_packet(record, interface, comment))


def ip_datagram(packet: Packet) -> bytes:
    """The packet as it would be on the wire: IPv4 (RFC 791) or IPv6 (RFC 8200) header, UDP header, payload."""
    source, to = ip_address(packet.source.host).packed, ip_address(packet.to.host).packed
    length = UDP_HEADER_BYTES + len(packet.data)
    pseudo_header = source + to + struct.pack("!II", length, _UDP)
    ports = struct.pack("!HHH", packet.source.port, packet.to.port, length)
    # A computed zero is sent as all ones, for zero means "no checksum" (RFC 768).
    checksum = _checksum(pseudo_header + ports + b"\0\0" + packet.data) or 0xFFFF
    udp = ports + checksum.to_bytes(2) + packet.data
    if is_v6(packet.to.host):
        return struct.pack("!IHBB", 6 << 28, length, _UDP, _HOP_LIMIT) + source + to + udp
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0, _HOP_LIMIT, _UDP, 0) + source + to
    return header[:10] + _checksum(header).to_bytes(2) + header[12:] + udp


def _checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _packet(record: Record, interface: int, comment: str) -> bytes:
    assert record.packet is not None  # noqa: S101 - the caller has looked; this tells the type checker
    data = ip_datagram(record.packet)
    when = round(record.time_s * 10**_NANOSECONDS)
    head = struct.pack("<IIIII", interface, when >> 32, when & 0xFFFF_FFFF, len(data), len(data))
    options = _option(_OPTION_COMMENT, comment.encode()) if comment else b""
    options += _option(_OPTION_PACKET_FLAGS, struct.pack("<I", _DIRECTION.get(record.what, 0)))
    return _block(_ENHANCED_PACKET, head + _padded(data) + options + _option(_OPTION_END, b""))


def _interface(name: str) -> bytes:
    options = _option(_OPTION_INTERFACE_NAME, name.encode())
    options += _option(_OPTION_TIME_RESOLUTION, bytes([_NANOSECONDS])) + _option(_OPTION_END, b"")
    return _block(_INTERFACE, struct.pack("<HHI", _LINKTYPE_RAW, 0, _NO_SNAP_LENGTH) + options)


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("<HH", code, len(value)) + _padded(value)


def _block(kind: int, body: bytes) -> bytes:
    length = struct.pack("<I", 12 + len(body))
    return struct.pack("<I", kind) + length + body + length


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
