"""What a trace says, as lines and as pcapng parsed back by a reader written from the format's definition."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from ipaddress import ip_address

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kafila.types import Address
from sims.packet import Packet
from sims.pcapng import PcapngTrace, ip_datagram
from sims.topology import VirtualNetwork
from sims.trace import MemoryTrace, Record, TextTrace, What
from tests.sims.tools import at, reaches


@dataclass
class Capture:
    interfaces: list[str] = field(default_factory=list)
    packets: list[tuple[str, int, bytes, str, int]] = field(default_factory=list)
    """(interface, time in ns, datagram, comment, flags)"""


def read_pcapng(data: bytes) -> Capture:
    """Every block of a little-endian section, checking lengths, padding and options as it goes."""
    capture, position = Capture(), 0
    while position < len(data):
        kind, length = struct.unpack_from("<II", data, position)
        assert length % 4 == 0
        assert struct.unpack_from("<I", data, position + length - 4) == (length,)
        body = data[position + 8 : position + length - 4]
        if position == 0:
            assert kind == 0x0A0D0D0A
            assert struct.unpack("<IHHq", body) == (0x1A2B3C4D, 1, 0, -1)
        elif kind == 1:
            assert struct.unpack_from("<HHI", body) == (101, 0, 0)
            options = read_options(body[8:])
            assert options[9] == b"\x09"
            capture.interfaces.append(options[2].decode())
        else:
            assert kind == 6
            interface, high, low, captured, original = struct.unpack_from("<IIIII", body)
            assert captured == original
            options = read_options(body[20 + captured + -captured % 4 :])
            datagram = body[20 : 20 + captured]
            comment, (flags,) = options.get(1, b"").decode(), struct.unpack("<I", options[2])
            capture.packets.append((capture.interfaces[interface], high << 32 | low, datagram, comment, flags))
        position += length
    return capture


def read_options(data: bytes) -> dict[int, bytes]:
    options: dict[int, bytes] = {}
    while True:
        code, length = struct.unpack_from("<HH", data)
        if code == 0:
            assert len(data) == 4
            return options
        options[code] = data[4 : 4 + length]
        data = data[4 + length + -length % 4 :]


def read_datagram(data: bytes) -> Packet:
    """An IP datagram with its lengths and checksums verified."""
    version = data[0] >> 4
    if version == 4:
        assert struct.unpack_from("!H", data, 2) == (len(data),)
        assert ones_complement_sum(data[:20]) == 0xFFFF
        assert data[9] == 17
        source, to, udp = data[12:16], data[16:20], data[20:]
    else:
        assert struct.unpack_from("!H", data, 4) == (len(data) - 40,)
        assert data[6] == 17
        source, to, udp = data[8:24], data[24:40], data[40:]
    assert ones_complement_sum(source + to + struct.pack("!HHH", 0, 17, len(udp)) + udp) == 0xFFFF
    source_port, to_port, length, checksum = struct.unpack_from("!HHHH", udp)
    assert length == len(udp)
    assert checksum != 0
    return Packet(Address(str(ip_address(source)), source_port), Address(str(ip_address(to)), to_port), udp[8:])


def ones_complement_sum(data: bytes) -> int:
    total = 0
    for offset in range(0, len(data), 2):
        total += int.from_bytes(data[offset : offset + 2].ljust(2, b"\0"))
        total = (total & 0xFFFF) + (total >> 16)
    return total


ports = st.integers(0, 65_535)
v4 = st.ip_addresses(v=4).map(str)
v6 = st.ip_addresses(v=6).map(str)


@given(st.one_of(st.tuples(v4, v4), st.tuples(v6, v6)), ports, ports, st.binary(max_size=99))
def test_datagrams_read_back(hosts: tuple[str, str], source_port: int, to_port: int, data: bytes) -> None:
    packet = Packet(Address(hosts[0], source_port), Address(hosts[1], to_port), data)
    assert read_datagram(ip_datagram(packet)) == packet


async def scenario(net: VirtualNetwork) -> None:
    """A packet out through a NAT, the answer, a stranger's packet filtered, and a reboot before it."""
    server, stranger = await net.machine("server").bind(3478), await net.machine("stranger").bind(1)
    home = net.nat("home", lan="192.168.1.0/24")
    a = await home.machine("a").bind(5000)
    async with net.running():
        external = await reaches(a, at(server), server)
        assert external is not None
        assert await reaches(server, external, a)
        home.reboot()
        assert await reaches(stranger, external, a) is None


async def test_lines(autojump_clock: trio.testing.MockClock) -> None:
    net, text = VirtualNetwork(seed=1), io.StringIO()
    memory = net.trace(TextTrace(text))
    await scenario(net)
    assert text.getvalue().splitlines() == memory.lines()
    told = [" ".join(line.split()) for line in memory.lines()]
    lengths = [len(record.packet.data) for record in memory if record.packet]
    assert told[0] == f"0.000000 a 192.168.1.10:5000 > 11.0.0.10:3478 {lengths[0]} B sent"
    assert told[1] == (
        f"0.000000 home 11.0.0.12:5000 > 11.0.0.10:3478 {lengths[0]} B translated: from 192.168.1.10:5000"
    )
    assert told[2] == f"0.020000 server 11.0.0.12:5000 > 11.0.0.10:3478 {lengths[0]} B received"
    assert told[6] == "0.040000 home reboots, off for 0 s"
    assert told[8] == (
        f"0.060000 home 11.0.0.11:1 > 11.0.0.12:5000 {lengths[-1]} B dropped: the NAT has no mapping for the port"
    )
    assert len(told) == 9
    assert [record.where for record in memory.drops()] == ["home"]


async def test_pcapng(autojump_clock: trio.testing.MockClock) -> None:
    net, file = VirtualNetwork(seed=1), io.BytesIO()
    memory = net.trace(PcapngTrace(file))
    await scenario(net)
    capture = read_pcapng(file.getvalue())
    assert capture.interfaces == ["a", "home", "server", "stranger"]
    records = [record for record in memory if record.packet is not None]
    assert len(capture.packets) == len(records) == 8
    for (interface, time_ns, datagram, comment, flags), record in zip(capture.packets, records, strict=True):
        assert interface == record.where
        assert time_ns == round(record.time_s * 1e9)
        assert read_datagram(datagram) == record.packet
        assert record.detail in comment
        assert flags == {What.RECEIVED: 1, What.SENT: 2}.get(record.what, 0)
    assert capture.packets[6][3] == "home reboots, off for 0 s"
    assert capture.packets[7][3] == "dropped: the NAT has no mapping for the port"


@pytest.mark.parametrize("time_s", [0.0, 1e-9, 4.294967295, 4.294967296, 31_536_000.123])
def test_pcapng_times(time_s: float) -> None:
    file = io.BytesIO()
    packet = Packet(Address("2a10::1", 1), Address("2a10::2", 2), b"")
    PcapngTrace(file)(Record(time_s, "somewhere", What.SENT, packet, ""))
    ((_, time_ns, datagram, comment, _),) = read_pcapng(file.getvalue()).packets
    assert time_ns == round(time_s * 1e9)
    assert read_datagram(datagram) == packet
    assert not comment


def test_memory_is_bounded() -> None:
    trace = MemoryTrace(limit=3)
    for number in range(5):
        trace(Record(float(number), "x", What.NOTE, None, ""))
    assert [record.time_s for record in trace] == [2.0, 3.0, 4.0]
