"""A gateway's answers to UPnP (WANIPConnection:1), honest or not.

Attach one with ``nat.service = server = UpnpServer()``: searches arrive as datagrams. What follows is HTTP over TCP,
which this network does not have; ``server.streams(nat)`` opens streams that the gateway answers at once, as over a LAN.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from kafila.nat.upnp_messages import SSDP_PORT, parse_xml
from kafila.types import Address
from sims.gateway import Gateway
from sims.nat import NatTable
from sims.packet import Drop
from sims.portmap_server import WRONG_HOST, Honesty

HTTP_PORT = 5000
_FOREVER_S = 10 * 365 * 86_400.0
_SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
_DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType>
<serviceList><service><serviceType>{_SERVICE}</serviceType><controlURL>/control</controlURL></service></serviceList>
</device></root>"""
_NOT_AUTHORIZED, _CONFLICT = 606, 718  # UPnP Device Architecture 1.1 section 3.2.2; WANIPConnection:1 section 2.4.16


class UpnpServer:
    """The responder of one gateway (a ``sims.gateway.GatewayService``)."""

    port = SSDP_PORT

    def __init__(self, honesty: Honesty = Honesty.HONEST) -> None:
        self.honesty = honesty
        self.requests = 0
        """HTTP exchanges: somebody found it and asked."""
        self._held: dict[int, Address] = {}

    def reboot(self, now: float) -> None:  # noqa: ARG002  - the service's signature
        """Mappings went with the table."""
        self._held.clear()

    def answer(self, request: bytes, source: Address, gateway: Gateway, now: float) -> bytes | None:  # noqa: ARG002  - as above
        """The reply to a search."""
        if self.honesty is Honesty.SILENT or not request.startswith(b"M-SEARCH"):
            return None
        host = gateway.inside_hosts(gateway.lans[0])[0]
        return f"HTTP/1.1 200 OK\r\nLOCATION: http://{host}:{HTTP_PORT}/description.xml\r\nEXT:\r\n\r\n".encode()

    def streams(self, gateway: Gateway) -> Callable[[str, int], Awaitable[trio.abc.Stream]]:
        """Opens TCP streams from a machine on the gateway's LAN to the gateway."""

        async def open_stream(host: str, port: int) -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            if host not in gateway.inside_hosts(gateway.lans[0]) or port != HTTP_PORT:
                raise ConnectionRefusedError(f"nobody listens at {host} port {port}")
            return _Exchange(lambda request: self._serve(request, gateway))

        return open_stream

    def _serve(self, request: bytes, gateway: Gateway) -> bytes:
        self.requests += 1
        head, _, body = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET "):
            return _http("200 OK", _DESCRIPTION)
        root = parse_xml(body)
        call = next((element for element in root.walk() if element.name == "Body"), None) if root is not None else None
        if call is None or not call.children:
            return _http("400 Bad Request", "")
        action = call.children[0]
        return self._act(action.name, {field.name: field.text for field in action.children}, gateway)

    def _act(self, action: str, fields: dict[str, str], gateway: Gateway) -> bytes:
        if self.honesty is Honesty.REFUSES:
            return _error(_NOT_AUTHORIZED)
        if action == "GetExternalIPAddress":
            host = WRONG_HOST if self.honesty is Honesty.WRONG_ADDRESS else gateway.external_hosts[0]
            return _done(action, f"<NewExternalIPAddress>{host}</NewExternalIPAddress>")
        port, table = int(fields["NewExternalPort"]), gateway.table
        if action == "DeletePortMapping":
            internal = self._held.pop(port, None)
            if internal is not None and isinstance(table, NatTable):
                table.close_port(internal)
            return _done(action, "")
        if self.honesty is Honesty.NO_MAPPING or not isinstance(table, NatTable):
            return _done(action, "")
        internal = Address(fields["NewInternalClient"], int(fields["NewInternalPort"]))
        lifetime_s = float(fields["NewLeaseDuration"]) or _FOREVER_S
        made = table.open_port(internal, port, lifetime_s, gateway.fabric.now)
        if isinstance(made, Drop) or made.port != port:  # unlike PCP, version 1 cannot answer with another port
            table.close_port(internal)
            return _error(_CONFLICT)
        self._held[port] = internal
        return _done(action, "")


class _Exchange(trio.abc.Stream):
    """One request and its answer, then the end."""

    def __init__(self, serve: Callable[[bytes], bytes]) -> None:
        self._serve = serve
        self._request = b""
        self._answered = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self._request += bytes(data)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:  # noqa: ARG002  - an answer is short
        await trio.lowlevel.checkpoint()
        if self._answered:
            return b""
        self._answered = True
        return self._serve(self._request)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


def _http(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nCONTENT-LENGTH: {len(body)}\r\n\r\n{body}".encode()


def _done(action: str, fields: str) -> bytes:
    response = f'<u:{action}Response xmlns:u="{_SERVICE}">{fields}</u:{action}Response>'
    return _http("200 OK", f'<s:Envelope xmlns:s="x"><s:Body>{response}</s:Body></s:Envelope>')


def _error(code: int) -> bytes:
    detail = f"<UPnPError><errorCode>{code}</errorCode></UPnPError>"
    return _http("500 Internal Server Error", f"<Envelope><Body><Fault>{detail}</Fault></Body></Envelope>")
