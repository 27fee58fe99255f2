"""Asking a gateway to open a port by UPnP, for those that speak neither PCP nor NAT-PMP.

    state        on                                        goes to
    SEARCHING    the gateway says where its description is DESCRIBING
    SEARCHING    the budget spent                          NONE (a late answer is still taken)
    DESCRIBING   the description names a service           ADDRESS
    ADDRESS      the external address, if it can be true   MAPPING
    MAPPING      done                                      MAPPED
    MAPPING      the port is another's (718)               MAPPING, another port, a few times
    MAPPING      no limited leases here (725)              MAPPING, without end
    MAPPED       half the lease over, refresh()            ADDRESS
    ADDRESS ...  a failed exchange while a lease lasts     MAPPED, to try again half way to its end
    any of these a failed or refused exchange otherwise    NONE
    MAPPED       close()                                   CLOSING, then CLOSED
    any          close()                                   CLOSED

Datagrams go by ``datagrams_to_send``; an HTTP exchange is taken with ``request_to_make`` and answered, once, with
``response_received``. What a gateway says it has opened is a claim, no more (see :mod:`kafila.nat.portmap`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from kafila.nat.portmap import PortMapEvent, PortMapped, PortNotMapped, why_doubted
from kafila.nat.report import PortMappingProtocol
from kafila.nat.upnp_messages import (
    HttpRequest,
    Service,
    action_request,
    description_request,
    find_service,
    location_of,
    parse_response,
    parse_xml,
    search_requests,
)
from kafila.types import Address, Transmit

BUDGET_S = 0.25
"""For the search. A gateway may take the second that MX allows it; it is heard then, but nobody waits for it."""
_SEARCH_AGAIN_S = 0.1
LEASE_S = 3600
_MIN_RETRY_S = 30.0  # not worth another try: most of a short lease would be gone
_MAX_OTHER_PORTS = 3
_CONFLICT, _ONLY_PERMANENT = "718", "725"  # WANIPConnection:1 section 2.4.16
_OTHER_PORTS = range(20_000, 60_000)


class State(Enum):
    """See the table above."""

    SEARCHING = "searching"
    DESCRIBING = "describing"
    ADDRESS = "asking the address"
    MAPPING = "mapping"
    MAPPED = "mapped"
    NONE = "none"
    CLOSING = "closing"
    CLOSED = "closed"


class UpnpMapper:
    """Keeps one UDP port open at one gateway, as far as the gateway will have it."""

    def __init__(
        self, gateway: str, client_host: str, port: int, now: float, random_bytes: Callable[[int], bytes]
    ) -> None:
        """``client_host``: our address on the gateway's network, where the gateway shall send what comes in."""
        self._gateway, self._client_host, self._port = gateway, client_host, port
        self._random_bytes = random_bytes
        self._events: deque[PortMapEvent] = deque(maxlen=8)  # one a change; a caller that sleeps loses the oldest
        self._searches = [now, now + _SEARCH_AGAIN_S]
        self._deadline = now + BUDGET_S
        self._request: HttpRequest | None = None
        self._location = ""
        self._service = Service("", "")
        self._external_host = ""
        self._external_port = port
        self._lease_s = LEASE_S
        self._other_ports = 0
        self._lease_ends = now
        self._claim: PortMapped | None = None
        self.state = State.SEARCHING

    # -- the machine ---------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """A datagram; only the gateway's answers to the search count."""
        is_searching = self.state is State.SEARCHING or (self.state is State.NONE and not self._location)
        location = location_of(data, self._gateway)
        if source.host == self._gateway and is_searching and location is not None:
            self._location = location
            self._go(State.DESCRIBING, description_request(location, self._gateway), now)

    def handle_timer(self, now: float) -> None:
        """Give up the search, and renew."""
        if self.state is State.SEARCHING and now >= self._deadline:
            self._end("no gateway answers to UPnP")
        elif self.state is State.MAPPED and now >= self._deadline:
            self.refresh(now)

    def next_timer(self) -> float | None:
        """When to call :meth:`handle_timer` and :meth:`datagrams_to_send`; ``None``: never."""
        if self.state is State.SEARCHING:
            return min([*self._searches, self._deadline])
        return self._deadline if self.state is State.MAPPED else None

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        """Searches that are due."""
        if self.state is not State.SEARCHING or not self._searches or now < self._searches[0]:
            return []
        self._searches = [time for time in self._searches if time > now]
        return [Transmit(data, to) for data, to in search_requests(self._gateway)]

    def request_to_make(self) -> HttpRequest | None:
        """An HTTP exchange to make now; each is given out once."""
        request, self._request = self._request, None
        return request

    def response_received(self, data: bytes | None, now: float) -> None:
        """All that came back from the exchange given out last; ``None`` where it could not be made."""
        response = parse_response(data, is_all=True) if data is not None else None
        status, body = response if response is not None else (0, b"")
        match self.state:
            case State.DESCRIBING:
                self._described(status, body, now)
            case State.ADDRESS:
                self._address_told(status, body, now)
            case State.MAPPING:
                self._answered(status, body, now)
            case State.CLOSING:
                self.state = State.CLOSED
            case _:
                pass  # closed meanwhile

    def next_event(self) -> PortMapEvent | None:
        """What has changed, oldest first."""
        return self._events.popleft() if self._events else None

    def refresh(self, now: float) -> None:
        """Ask again at once: the lease is half over, or the gateway may have forgotten."""
        if self.state is State.MAPPED:
            self._go(State.ADDRESS, self._action("GetExternalIPAddress", {}), now)

    def close(self) -> None:
        """Give the port back, by one more exchange where there is one to give back."""
        self._request = None
        if self._claim is None:
            self.state = State.CLOSED
            return
        self._claim = None
        fields = {"NewRemoteHost": "", "NewExternalPort": str(self._external_port), "NewProtocol": "UDP"}
        self.state, self._request = State.CLOSING, self._action("DeletePortMapping", fields)

    # -- step by step --------------------------------------------------------------------------------------------------

    def _described(self, status: int, body: bytes, now: float) -> None:
        service = find_service(body, self._location) if status == 200 else None
        if service is None:
            self._failed("the gateway describes no port mapping", now)
            return
        self._service = service
        self._go(State.ADDRESS, self._action("GetExternalIPAddress", {}), now)

    def _address_told(self, status: int, body: bytes, now: float) -> None:
        root = parse_xml(body) if status == 200 else None
        host = root.find("NewExternalIPAddress") if root is not None else None
        if host is None:
            self._failed("the gateway does not tell its address", now)
            return
        doubt = why_doubted(Address(host, self._external_port))
        if doubt is not None:
            self._failed(doubt, now)
            return
        self._external_host = host
        self._map(now)

    def _map(self, now: float) -> None:
        fields = {
            "NewRemoteHost": "",
            "NewExternalPort": str(self._external_port),
            "NewProtocol": "UDP",
            "NewInternalPort": str(self._port),
            "NewInternalClient": self._client_host,
            "NewEnabled": "1",
            "NewPortMappingDescription": "kafila",
            "NewLeaseDuration": str(self._lease_s),
        }
        self._go(State.MAPPING, self._action("AddPortMapping", fields), now)

    def _answered(self, status: int, body: bytes, now: float) -> None:
        root = parse_xml(body)
        code = root.find("errorCode") if root is not None else None
        if status == 200 and code is None:
            self._mapped(now)
        elif code == _ONLY_PERMANENT and self._lease_s:
            self._lease_s = 0
            self._map(now)
        elif code == _CONFLICT and self._other_ports < _MAX_OTHER_PORTS:
            self._other_ports += 1
            self._external_port = _OTHER_PORTS[int.from_bytes(self._random_bytes(2), "big") % len(_OTHER_PORTS)]
            self._map(now)
        else:
            self._failed(f"the gateway refuses (UPnP error {code or status})", now)

    def _mapped(self, now: float) -> None:
        claim = PortMapped(Address(self._external_host, self._external_port), PortMappingProtocol.UPNP)
        if claim != self._claim:
            self._events.append(claim)
        self._claim = claim
        # A mapping without end is looked after as well: a gateway that restarts forgets it.
        self._lease_ends = now + LEASE_S
        self.state, self._deadline = State.MAPPED, now + LEASE_S / 2

    def _action(self, action: str, fields: dict[str, str]) -> HttpRequest | None:
        return action_request(self._service, self._gateway, action, fields)

    def _go(self, state: State, request: HttpRequest | None, now: float) -> None:
        self.state, self._request = state, request
        if request is None:
            self._failed("the gateway names addresses that are not its own", now)

    def _failed(self, reason: str, now: float) -> None:
        left = self._lease_ends - now
        if self._claim is not None and left > _MIN_RETRY_S:
            self.state, self._deadline = State.MAPPED, now + left / 2
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.state, self._claim, self._request = State.NONE, None, None
        self._events.append(PortNotMapped(reason))
