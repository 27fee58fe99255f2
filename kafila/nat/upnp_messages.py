"""What UPnP's Internet Gateway Device protocol says on the wire: SSDP, a little HTTP, a little XML.

The gateway is not trusted with more than its own ports. Sizes are bounded; XML with a document type (and so with
entities) is refused; every URL it names must lead back to the gateway's own address.

Source: UPnP Device Architecture 1.1 sections 1.3 (search), 2 (description), 3 (control); WANIPConnection:1 and :2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit
from xml.parsers import expat

from kafila.types import Address

SSDP_PORT = 1900
SSDP_GROUP = "239.255.255.250"
MAX_RESPONSE_BYTES = 128 * 1024
"""Descriptions of real gateways take 2 to 20 KiB."""
_MAX_DEPTH, _MAX_ELEMENTS = 32, 4096
_GATEWAYS = (
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",
)
_CONNECTIONS = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
"""The services that map ports, the preferred first."""


class HttpRequest(NamedTuple):
    """A whole request, for a connection of its own to ``to``."""

    to: Address
    data: bytes


class HttpResponse(NamedTuple):
    """A whole response, its body out of its transfer coding."""

    status: int
    body: bytes


class Service(NamedTuple):
    """Where port mapping is controlled."""

    kind: str
    control_url: str


@dataclass(slots=True)
class Element:
    """One XML element, its name without namespace prefix."""

    name: str
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        """This element and all within, in document order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find(self, name: str) -> str | None:
        """The text of the first element called ``name`` within."""
        return next((element.text.strip() for element in self.walk() if element.name == name), None)


def search_requests(gateway: str) -> list[tuple[bytes, Address]]:
    """Who here is a gateway? Asked of the gateway itself and, as many listen to nothing else, of the group."""
    return [
        (
            f"M-SEARCH * HTTP/1.1\r\nHOST: {to.host}:{to.port}\r\n"
            f'MAN: "ssdp:discover"\r\nMX: 1\r\nST: {target}\r\n\r\n'.encode(),
            to,
        )
        for to in (Address(gateway, SSDP_PORT), Address(SSDP_GROUP, SSDP_PORT))
        for target in _GATEWAYS
    ]


def location_of(data: bytes, gateway: str) -> str | None:
    """The URL of the description that a search response names, if it is on ``gateway``; ``None`` for all else."""
    if not data.startswith(b"HTTP/1.1 200"):
        return None
    location = _headers(data).get("location")
    return location if location is not None and _address(location, gateway) is not None else None


def description_request(location: str, gateway: str) -> HttpRequest | None:
    """A request for the description; ``None`` where ``location`` leads elsewhere than to ``gateway``."""
    return _request("GET", location, gateway, {}, b"")


def find_service(body: bytes, location: str) -> Service | None:
    """The best port-mapping service of a description; ``None`` where there is none or it is no description."""
    root = parse_xml(body)
    if root is None:
        return None
    base = root.find("URLBase") or location
    found = {
        kind: control
        for element in root.walk()
        if element.name == "service"
        and (kind := element.find("serviceType"))
        and (control := element.find("controlURL"))
    }
    return next((Service(kind, urljoin(base, found[kind])) for kind in _CONNECTIONS if kind in found), None)


def action_request(service: Service, gateway: str, action: str, arguments: dict[str, str]) -> HttpRequest | None:
    """A SOAP call; ``None`` where the service's URL leads elsewhere than to ``gateway``."""
    fields = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in arguments.items())
    body = (
        '<?xml version="1.0"?>\r\n'
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
        ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/">'
        f'<s:Body><u:{action} xmlns:u="{service.kind}">{fields}</u:{action}></s:Body></s:Envelope>'
    ).encode()
    headers = {"Content-Type": 'text/xml; charset="utf-8"', "SOAPAction": f'"{service.kind}#{action}"'}
    return _request("POST", service.control_url, gateway, headers, body)


def parse_response(data: bytes, *, is_all: bool) -> HttpResponse | None:
    """The response in ``data``; ``None`` while it is not all there (``is_all``: the connection has closed) or no HTTP.

    Status 0 stands for what will never become a response.
    """
    head, separator, body = data.partition(b"\r\n\r\n")
    if not separator:
        return HttpResponse(0, b"") if is_all or len(data) > MAX_RESPONSE_BYTES else None
    first = head.split(b"\r\n", 1)[0].split(b" ")
    if (
        len(first) < 2
        or not first[0].startswith(b"HTTP/1.")
        or not first[1].isdigit()
        or len(data) > MAX_RESPONSE_BYTES
    ):
        return HttpResponse(0, b"")
    status, headers = int(first[1][:3]), _headers(head)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        whole = _unchunked(body)
    elif (length := headers.get("content-length", "")).isdecimal() and len(length) < 8:
        whole = body[: int(length)] if len(body) >= int(length) else None
    else:
        whole = body if is_all else None
    if whole is None:
        return HttpResponse(0, b"") if is_all else None
    return HttpResponse(status, whole)


def parse_xml(data: bytes) -> Element | None:
    """A small document as a tree; ``None`` if it is not well-formed, is too deep or large, or has a document type."""
    parser = expat.ParserCreate()
    parser.buffer_text = True
    root = Element("")
    open_elements = [root]
    count = 0

    def start(name: str, _attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > _MAX_ELEMENTS or len(open_elements) > _MAX_DEPTH:
            raise ValueError("too large")
        element = Element(name.rpartition(":")[2])
        open_elements[-1].children.append(element)
        open_elements.append(element)

    def end(_name: str) -> None:
        open_elements.pop()

    def text(characters: str) -> None:
        open_elements[-1].text += characters

    def doctype(*_: object) -> None:
        raise ValueError("a document type may define entities")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, doctype
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError):  # LookupError: an encoding nobody has heard of
        return None
    return root


def _headers(data: bytes) -> dict[str, str]:
    """Header fields by lower-case name; bytes that are no Latin-1 text cannot occur."""
    lines = data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}


def _address(url: str, gateway: str) -> Address | None:
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        return None
    return Address(gateway, port) if parts.scheme == "http" and parts.hostname == gateway else None


def _request(method: str, url: str, gateway: str, headers: dict[str, str], body: bytes) -> HttpRequest | None:
    to = _address(url, gateway)
    if to is None or not url.isascii() or any(character <= " " for character in url):
        return None
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = {"Host": f"{to.host}:{to.port}", "Connection": "close", "Content-Length": str(len(body)), **headers}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return HttpRequest(to, f"{head}\r\n".encode() + body)


def _unchunked(data: bytes) -> bytes | None:
    """The body of a chunked response (RFC 9112 section 7.1); ``None`` while the last chunk is missing."""
    body, at = b"", 0
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        try:
            size = int(data[at:line_end].split(b";")[0], 16)
        except ValueError:
            return None
        if size == 0:
            return body
        at = line_end + 2
        if size < 0 or len(data) < at + size + 2:
            return None
        body += data[at : at + size]
        at += size + 2
