"""A UPnP gateway for tests: answers searches, describes itself, maps ports, and errs on demand."""

from __future__ import annotations

from dataclasses import dataclass, field

from kafila.nat.upnp_messages import parse_xml

GATEWAY = "192.168.1.1"
WAN_IP = "urn:schemas-upnp-org:service:WANIPConnection:1"

DESCRIPTION = """<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0">
 <device>
  <deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType>
  <serviceList><service>
   <serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType><controlURL>/ctl/L3F</controlURL>
  </service></serviceList>
  <deviceList><device><deviceList><device>
   <serviceList><service>
    <serviceType>{kind}</serviceType><controlURL> {control} </controlURL>
   </service></serviceList>
  </device></deviceList></device></deviceList>
 </device>
</root>"""


def http(status: str, body: str, *, chunked: bool = False) -> bytes:
    """A response with its body in one of the two codings gateways use."""
    if chunked:
        pieces = [body[at : at + 100] for at in range(0, len(body), 100)]
        coded = "".join(f"{len(piece):x}\r\n{piece}\r\n" for piece in pieces) + "0\r\n\r\n"
        return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n{coded}".encode()
    return f"HTTP/1.1 {status}\r\nCONTENT-LENGTH: {len(body)}\r\nServer: igd\r\n\r\n{body}".encode()


@dataclass
class FakeIgd:
    """Its memory, and the ways in which it is difficult."""

    external_host: str = "11.0.0.9"
    taken_ports: set[int] = field(default_factory=set)
    only_permanent: bool = False
    refuses: bool = False
    is_silent: bool = False
    chunked: bool = False
    location: str = f"http://{GATEWAY}:5000/root.xml"
    control: str = "/ctl/IPConn"
    kind: str = WAN_IP
    mappings: dict[int, dict[str, str]] = field(default_factory=dict)

    def search(self, data: bytes) -> bytes | None:
        """The answer to a datagram."""
        if self.is_silent or not data.startswith(b"M-SEARCH"):
            return None
        return f"HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=60\r\nLocation: {self.location}\r\nEXT:\r\n\r\n".encode()

    def serve(self, data: bytes) -> bytes:
        """The answer to an HTTP request."""
        head, _, body = data.partition(b"\r\n\r\n")
        if head.startswith(b"GET /root.xml "):
            return http("200 OK", DESCRIPTION.format(kind=self.kind, control=self.control), chunked=self.chunked)
        root = parse_xml(body)
        assert root is not None
        assert head.startswith(b"POST /ctl/IPConn ")
        call = next(element for element in root.walk() if element.name == "Body").children[0]
        assert f'SOAPAction: "{self.kind}#{call.name}"'.encode() in head
        return self._act(call.name, {field.name: field.text for field in call.children})

    def _act(self, action: str, fields: dict[str, str]) -> bytes:
        if self.refuses:
            return self._error("606", "Action not authorized")
        if action == "GetExternalIPAddress":
            return self._done(action, f"<NewExternalIPAddress>{self.external_host}</NewExternalIPAddress>")
        port = int(fields["NewExternalPort"])
        if action == "DeletePortMapping":
            del self.mappings[port]
            return self._done(action, "")
        if port in self.taken_ports:
            return self._error("718", "ConflictInMappingEntry")
        if self.only_permanent and fields["NewLeaseDuration"] != "0":
            return self._error("725", "OnlyPermanentLeasesSupported")
        self.mappings[port] = fields
        return self._done(action, "")

    def _done(self, action: str, fields: str) -> bytes:
        body = f'<s:Envelope xmlns:s="x"><s:Body><u:{action}Response xmlns:u="{self.kind}">{fields}'
        return http("200 OK", f"{body}</u:{action}Response></s:Body></s:Envelope>", chunked=self.chunked)

    @staticmethod
    def _error(code: str, words: str) -> bytes:
        detail = f"<UPnPError><errorCode>{code}</errorCode><errorDescription>{words}</errorDescription></UPnPError>"
        return http("500 Internal Server Error", f"<Envelope><Body><Fault>{detail}</Fault></Body></Envelope>")
