"""A gateway's answers to NAT-PMP (RFC 6886) and PCP (RFC 6887), honest or not.

Attach one with ``nat.service = PortMapServer()``. Both protocols share UDP port 5351; the first byte is the version.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum
from ipaddress import IPv6Address, ip_address

from kafila.types import Address
from sims.gateway import Gateway
from sims.nat import NatTable
from sims.packet import Drop

PORT = 5351
MAX_LIFETIME_S = 7200
"""RFC 6886 section 3.3 recommends clients ask for this; asking for more gets this."""

_NAT_PMP, _PCP = 0, 2
_RESPONSE = 0x80
_PCP_HEADER_BYTES, _PCP_MAP_BYTES, _PCP_MAX_BYTES = 24, 36, 1100  # RFC 6887 sections 7.1, 11.1 and 7
_UDP = 17


class Honesty(Enum):
    """How far the answers can be trusted; all of these have been met in the wild."""

    HONEST = "honest"
    NO_MAPPING = "says yes and does nothing"
    WRONG_ADDRESS = "maps, and reports an external address that is not its own"
    SILENT = "does not answer"
    REFUSES = "answers that it is not allowed"


class _Pmp(IntEnum):  # RFC 6886 section 3.5
    SUCCESS = 0
    UNSUPPORTED_VERSION = 1
    NOT_AUTHORIZED = 2
    OUT_OF_RESOURCES = 4
    UNSUPPORTED_OPCODE = 5


class _Pcp(IntEnum):  # RFC 6887 section 7.4
    SUCCESS = 0
    UNSUPP_VERSION = 1
    NOT_AUTHORIZED = 2
    MALFORMED_REQUEST = 3
    UNSUPP_OPCODE = 4
    UNSUPP_OPTION = 5
    NO_RESOURCES = 8
    UNSUPP_PROTOCOL = 9
    ADDRESS_MISMATCH = 12


WRONG_HOST = "11.254.254.254"
"""What a lying server says the external address is: public to look at, and nobody's."""


class PortMapServer:
    """The responder of one gateway (a ``sims.gateway.GatewayService``)."""

    port = PORT

    def __init__(self, honesty: Honesty = Honesty.HONEST, *, pcp: bool = True, nat_pmp: bool = True) -> None:
        self.honesty = honesty
        self.requests = 0
        self._pcp = pcp
        self._nat_pmp = nat_pmp
        self._epoch_began = 0.0
        self._nonces: dict[Address, bytes] = {}

    def reboot(self, now: float) -> None:
        """The epoch starts again, which is how clients learn that their mappings are gone."""
        self._epoch_began = now
        self._nonces.clear()

    def answer(self, request: bytes, source: Address, gateway: Gateway, now: float) -> bytes | None:
        """The reply to one datagram; None where a server keeps silent."""
        self.requests += 1
        if self.honesty is Honesty.SILENT or len(request) < 2 or request[1] & _RESPONSE:
            return None
        if request[0] == _PCP and self._pcp:
            return self._answer_pcp(request, source, gateway, now)
        if request[0] == _NAT_PMP and self._nat_pmp:
            return self._answer_pmp(request, source, gateway, now)
        return self._wrong_version(request, now)

    # -- shared ----------------------------------------------------------------------------------------------------

    def _epoch(self, now: float) -> int:
        return int(now - self._epoch_began)

    def _wrong_version(self, request: bytes, now: float) -> bytes:
        """Each protocol's way of naming the version it does speak."""
        opcode = request[1] | _RESPONSE
        if self._pcp:
            return struct.pack("!BBxBII12x", _PCP, opcode, _Pcp.UNSUPP_VERSION, 0, self._epoch(now))
        return struct.pack("!BBHI", _NAT_PMP, opcode, _Pmp.UNSUPPORTED_VERSION, self._epoch(now))

    def _external_host(self, gateway: Gateway) -> str:
        return WRONG_HOST if self.honesty is Honesty.WRONG_ADDRESS else gateway.external_hosts[0]

    def _map(self, gateway: Gateway, internal: Address, wanted: int, lifetime_s: int, now: float) -> Address | None:
        """Make or renew a mapping, really or only in words; None where there is no room."""
        table = gateway.table
        if self.honesty is Honesty.NO_MAPPING:
            return Address(self._external_host(gateway), wanted or internal.port)
        if not isinstance(table, NatTable):
            return internal
        made = table.open_port(internal, wanted or internal.port, lifetime_s, now)
        if isinstance(made, Drop):
            return None
        return Address(WRONG_HOST, made.port) if self.honesty is Honesty.WRONG_ADDRESS else made

    @staticmethod
    def _unmap(gateway: Gateway, host: str, port: int, now: float) -> None:
        """Delete one mapping, or all of a host where ``port`` is 0."""
        if isinstance(gateway.table, NatTable):
            ports = gateway.table.explicit_ports(host, now) if port == 0 else [Address(host, port)]
            for internal in ports:
                gateway.table.close_port(internal)

    # -- NAT-PMP ---------------------------------------------------------------------------------------------------

    def _answer_pmp(self, request: bytes, source: Address, gateway: Gateway, now: float) -> bytes | None:
        opcode = request[1]

        def head(code: _Pmp) -> bytes:
            return struct.pack("!BBHI", _NAT_PMP, opcode | _RESPONSE, code, self._epoch(now))

        if self.honesty is Honesty.REFUSES:
            return head(_Pmp.NOT_AUTHORIZED) + bytes(4 if opcode == 0 else 8)
        if opcode == 0:
            return head(_Pmp.SUCCESS) + ip_address(self._external_host(gateway)).packed
        if opcode != 1:  # 2 is TCP, of which this network has none
            return head(_Pmp.UNSUPPORTED_OPCODE)
        if len(request) != 12:
            return None
        internal_port, wanted, lifetime_s = struct.unpack_from("!HHI", request, 4)
        if lifetime_s == 0:
            self._unmap(gateway, source.host, internal_port, now)
            return head(_Pmp.SUCCESS) + struct.pack("!HHI", internal_port, 0, 0)
        lifetime_s = min(lifetime_s, MAX_LIFETIME_S)
        external = self._map(gateway, Address(source.host, internal_port), wanted, lifetime_s, now)
        if external is None:
            return head(_Pmp.OUT_OF_RESOURCES) + struct.pack("!HHI", internal_port, 0, 0)
        return head(_Pmp.SUCCESS) + struct.pack("!HHI", internal_port, external.port, lifetime_s)

    # -- PCP -------------------------------------------------------------------------------------------------------

    def _answer_pcp(self, request: bytes, source: Address, gateway: Gateway, now: float) -> bytes:
        code = self._judge_pcp(request, source)
        opcode = request[1]
        lifetime_s, external, body = 0, None, request[_PCP_HEADER_BYTES:]
        if code is _Pcp.SUCCESS and opcode == 1:
            code, lifetime_s, external = self._map_pcp(request, source, gateway, now)
        head = struct.pack("!BBxBII12x", _PCP, opcode | _RESPONSE, code, lifetime_s, self._epoch(now))
        if opcode != 1 or len(body) < _PCP_MAP_BYTES:
            return head
        if external is None:  # the request's own data comes back
            return head + body[:_PCP_MAP_BYTES]
        return head + body[:18] + external.port.to_bytes(2) + _as_v6(external.host)

    def _judge_pcp(self, request: bytes, source: Address) -> _Pcp:
        """RFC 6887 sections 8.3 and 11.3, in their order."""
        if len(request) < _PCP_HEADER_BYTES or len(request) % 4 or len(request) > _PCP_MAX_BYTES:
            return _Pcp.MALFORMED_REQUEST
        if request[1] not in {0, 1}:
            return _Pcp.UNSUPP_OPCODE
        if request[8:24] != _as_v6(source.host):
            return _Pcp.ADDRESS_MISMATCH
        if self.honesty is Honesty.REFUSES:
            return _Pcp.NOT_AUTHORIZED
        if request[1] == 0:  # ANNOUNCE
            return _Pcp.SUCCESS
        if len(request) < _PCP_HEADER_BYTES + _PCP_MAP_BYTES:
            return _Pcp.MALFORMED_REQUEST
        if any(option < 128 for option in _option_codes(request[_PCP_HEADER_BYTES + _PCP_MAP_BYTES :])):
            return _Pcp.UNSUPP_OPTION  # a code below 128 must not be ignored; this server knows none
        return _Pcp.SUCCESS

    def _map_pcp(
        self, request: bytes, source: Address, gateway: Gateway, now: float
    ) -> tuple[_Pcp, int, Address | None]:
        (lifetime_s,) = struct.unpack_from("!I", request, 4)
        nonce, protocol, internal_port, wanted = struct.unpack_from("!12sB3xHH", request, _PCP_HEADER_BYTES)
        internal = Address(source.host, internal_port)
        if protocol != _UDP:
            return _Pcp.UNSUPP_PROTOCOL, 0, None
        if self._is_held(gateway, internal, now) and self._nonces.get(internal, nonce) != nonce:
            return _Pcp.NOT_AUTHORIZED, 0, None  # another's mapping: section 11.3
        if lifetime_s == 0:
            self._nonces.pop(internal, None)
            self._unmap(gateway, source.host, internal_port, now)
            return _Pcp.SUCCESS, 0, None
        lifetime_s = min(lifetime_s, MAX_LIFETIME_S)
        external = self._map(gateway, internal, wanted, lifetime_s, now)
        if external is None:
            return _Pcp.NO_RESOURCES, 0, None
        self._nonces[internal] = nonce
        return _Pcp.SUCCESS, lifetime_s, external

    @staticmethod
    def _is_held(gateway: Gateway, internal: Address, now: float) -> bool:
        table = gateway.table
        return isinstance(table, NatTable) and internal in table.explicit_ports(internal.host, now)


def _as_v6(host: str) -> bytes:
    """The 16 bytes PCP writes an address in, IPv4 as v4-mapped (RFC 6887 section 5)."""
    address = ip_address(host)
    return address.packed if isinstance(address, IPv6Address) else b"\0" * 10 + b"\xff\xff" + address.packed


def _option_codes(options: bytes) -> list[int]:
    codes = []
    while len(options) >= 4:
        codes.append(options[0])
        length = int.from_bytes(options[2:4])
        options = options[4 + length + -length % 4 :]
    return codes
