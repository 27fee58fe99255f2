"""Asking the gateway to open a port: PCP first, NAT-PMP where that is not spoken, within a quarter of a second.

What a gateway says it has opened is a *claim*. Gateways answer yes and do nothing, name an address that is not theirs,
or sit behind another NAT that knows of nothing. So a claim becomes a candidate like any other and carries data only
after a probe came through it; claims that cannot be true are not even passed on.

    state       on                                                   goes to
    ASKING_PCP  a claim                                              MAPPED
    ASKING_PCP  version or client address refused; 100 ms of silence ASKING_PMP
    ASKING_PCP  any other refusal, a claim that cannot be true       NONE
    ASKING_PMP  a claim by either protocol                           MAPPED
    ASKING_PMP  a refusal, the budget spent, an impossible claim     NONE
    NONE        a late claim                                         MAPPED
    MAPPED      the claim renewed                                    MAPPED
    MAPPED      a refusal, or the lifetime over without an answer    NONE
    any         close()                                              CLOSED
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, ip_address
from typing import NamedTuple, Protocol

from kafila.nat import natpmp, pcp
from kafila.nat.report import PortMappingProtocol
from kafila.types import Address, Transmit

SERVER_PORT = 5351  # RFC 6887 section 19.1, RFC 6886 section 1.1
BUDGET_S = 0.25
"""A gateway is a millisecond away. One that takes longer is heard all the same, but nobody waits for it."""
_PMP_AFTER_S = 0.1
"""How long PCP has the gateway to itself. Asked at once, a gateway that speaks both would open two ports."""
_REPEAT_S = 0.05
LIFETIME_S = 7200  # RFC 6886 section 3.3 recommends two hours
_MIN_RENEWAL_INTERVAL_S = 4.0  # RFC 6887 section 11.2.1
_MIN_LIFETIME_S, _MAX_LIFETIME_S = 10, 86_400
"""A lifetime outside is taken for the nearer bound: a gateway shall neither keep us busy nor lull us for a week."""
_SHARED = (100 << 24 | 64 << 16) >> 22  # 100.64.0.0/10, RFC 6598: a carrier's inside


class State(Enum):
    """See the table above."""

    ASKING_PCP = "asking by PCP"
    ASKING_PMP = "asking by NAT-PMP"
    NONE = "none"
    MAPPED = "mapped"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class PortMapped:
    """The gateway claims that ``external`` leads to our port."""

    external: Address
    protocol: PortMappingProtocol


@dataclass(frozen=True, slots=True)
class PortNotMapped:
    """There is no such claim, or no longer; ``reason`` is for people."""

    reason: str


PortMapEvent = PortMapped | PortNotMapped


class _Claim(NamedTuple):
    external: Address
    lifetime_s: float


class _Refusal(NamedTuple):
    reason: str
    is_for_older_protocol: bool = False
    """The gateway does not speak this one, or disagrees about our address, which NAT-PMP does not mention."""


class _Dialogue(Protocol):
    """How one protocol asks, and what its answers say."""

    protocol: PortMappingProtocol

    def requests(self, lifetime_s: int, claimed: Address | None) -> list[bytes]:
        """Ask for the port, or with lifetime 0 give it back."""
        ...

    def read(self, data: bytes) -> _Claim | _Refusal | None:
        """What an answer says; ``None``: nothing yet, or not to us."""
        ...


class _Pcp:
    protocol = PortMappingProtocol.PCP

    def __init__(self, client_host: str, port: int, nonce: bytes) -> None:
        self._client_host, self._port, self._nonce = client_host, port, nonce

    def requests(self, lifetime_s: int, claimed: Address | None) -> list[bytes]:
        return [pcp.map_request(self._client_host, self._nonce, self._port, claimed, lifetime_s)]

    def read(self, data: bytes) -> _Claim | _Refusal | None:
        response = pcp.decode_response(data)
        if response is None or (response.nonce and response.nonce != self._nonce):
            return None
        if response.result:
            older = response.result in (pcp.Result.UNSUPPORTED_VERSION, pcp.Result.ADDRESS_MISMATCH)
            return _Refusal(f"the gateway refuses (PCP result {response.result})", older)
        if response.internal_port != self._port or response.external is None:
            return None
        return _Claim(response.external, response.lifetime_s)


class _NatPmp:
    """NAT-PMP tells the address and the port in two answers, in either order; both are asked for each time."""

    protocol = PortMappingProtocol.NAT_PMP

    def __init__(self, port: int) -> None:
        self._port = port
        self._address: natpmp.ExternalAddress | None = None
        self._mapped: natpmp.Mapped | None = None

    def requests(self, lifetime_s: int, claimed: Address | None) -> list[bytes]:
        if lifetime_s == 0:
            return [natpmp.map_request(self._port, 0, 0)]
        wanted = claimed.port if claimed is not None else self._port
        return [natpmp.external_address_request(), natpmp.map_request(self._port, wanted, lifetime_s)]

    def read(self, data: bytes) -> _Claim | _Refusal | None:
        answer = natpmp.decode_response(data)
        if answer is None:
            return None
        if answer.result:
            return _Refusal(f"the gateway refuses (NAT-PMP result {answer.result})")
        if isinstance(answer, natpmp.ExternalAddress):
            self._address = answer
        elif answer.internal_port == self._port:
            self._mapped = answer
        if self._address is None or self._mapped is None:
            return None
        claim = _Claim(Address(self._address.host, self._mapped.external_port), self._mapped.lifetime_s)
        self._address = self._mapped = None
        return claim


class PortMapper:
    """Keeps one UDP port open at one gateway, as far as the gateway will have it."""

    def __init__(
        self, gateway: str, client_host: str | None, port: int, now: float, random_bytes: Callable[[int], bytes]
    ) -> None:
        """``client_host``: our address on the gateway's network (:func:`client_host_for`); without one, no PCP."""
        self._server = Address(gateway, SERVER_PORT)
        self._pmp = _NatPmp(port)
        self._pcp = _Pcp(client_host, port, random_bytes(pcp.NONCE_BYTES)) if client_host is not None else None
        self._dialogue: _Dialogue = self._pmp
        self._events: deque[PortMapEvent] = deque(maxlen=8)  # one a change; a caller that sleeps loses the oldest
        self._outbox: list[tuple[float, bytes]] = []
        self._claim: PortMapped | None = None
        self._deadline = now
        """When the state's time is up."""
        self.state = State.ASKING_PMP
        if self._pcp is not None:
            self._start_asking(State.ASKING_PCP, self._pcp, now, now + _PMP_AFTER_S)
        else:
            self._start_asking(State.ASKING_PMP, self._pmp, now, now + BUDGET_S)

    # -- the machine ---------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """A datagram; only the gateway's answers to what was asked count."""
        if source != self._server or self.state is State.CLOSED:
            return
        dialogues: list[_Dialogue] = [self._pmp] if self._pcp is None else [self._pcp, self._pmp]
        for dialogue in dialogues:
            outcome = dialogue.read(data)
            if isinstance(outcome, _Claim) and self._is_heard(dialogue):
                self._claimed(outcome, dialogue, now)
            elif isinstance(outcome, _Refusal):
                self._refused(outcome, dialogue, now)

    def handle_timer(self, now: float) -> None:
        """Move on where the gateway has been silent."""
        if self.state in (State.NONE, State.CLOSED) or now < self._deadline:
            return
        if self.state is State.ASKING_PCP:
            self._fall_back(now)
        else:
            self._end("the gateway does not answer")

    def next_timer(self) -> float | None:
        """When to call :meth:`handle_timer` and :meth:`datagrams_to_send`; ``None``: never."""
        times = [time for time, _ in self._outbox]
        if self.state not in (State.NONE, State.CLOSED):
            times.append(self._deadline)
        return min(times, default=None)

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        """What is due for the gateway."""
        due = [data for time, data in self._outbox if time <= now]
        self._outbox = [(time, data) for time, data in self._outbox if time > now]
        return [Transmit(data, self._server) for data in due]

    def next_event(self) -> PortMapEvent | None:
        """What has changed, oldest first."""
        return self._events.popleft() if self._events else None

    def refresh(self, now: float) -> None:
        """Ask again at once: the gateway may have forgotten (its public address changed, paths through it died)."""
        if self.state is State.MAPPED:
            self._ask([now, *_renewals(now, self._deadline - now)])

    def close(self, now: float) -> None:
        """Give the port back: one request, to be sent and forgotten."""
        self._outbox = []
        if self._claim is not None:
            self._outbox = [(now, data) for data in self._dialogue.requests(0, self._claim.external)]
        self.state = State.CLOSED

    # -- asking --------------------------------------------------------------------------------------------------------

    def _start_asking(self, state: State, dialogue: _Dialogue, now: float, deadline: float) -> None:
        self.state, self._dialogue, self._deadline = state, dialogue, deadline
        self._ask([now, now + _REPEAT_S])

    def _ask(self, times: Iterable[float]) -> None:
        claimed = self._claim.external if self._claim is not None else None
        self._outbox = [(time, data) for time in times for data in self._dialogue.requests(LIFETIME_S, claimed)]

    def _fall_back(self, now: float) -> None:
        self._start_asking(State.ASKING_PMP, self._pmp, now, now + BUDGET_S - _PMP_AFTER_S)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _is_heard(self, dialogue: _Dialogue) -> bool:
        """Once there is a claim, only its own protocol may change it."""
        return self.state is not State.MAPPED or dialogue is self._dialogue

    def _claimed(self, claim: _Claim, dialogue: _Dialogue, now: float) -> None:
        doubt = why_doubted(claim.external)
        if doubt is not None:
            self._end(doubt)
            return
        mapped = PortMapped(claim.external, dialogue.protocol)
        if mapped != self._claim:
            self._events.append(mapped)
        lifetime_s = min(max(claim.lifetime_s, _MIN_LIFETIME_S), _MAX_LIFETIME_S)
        self.state, self._dialogue, self._claim = State.MAPPED, dialogue, mapped
        self._deadline = now + lifetime_s
        self._ask(_renewals(now, lifetime_s))

    def _refused(self, refusal: _Refusal, dialogue: _Dialogue, now: float) -> None:
        if self.state is State.ASKING_PCP and (refusal.is_for_older_protocol or dialogue is self._pmp):
            self._fall_back(now)  # a NAT-PMP server refuses PCP in its own protocol (RFC 6887 section 9)
        elif dialogue is self._dialogue:
            self._end(refusal.reason)

    def _end(self, reason: str) -> None:
        if self.state is not State.NONE:
            self.state, self._claim, self._outbox = State.NONE, None, []
            self._events.append(PortNotMapped(reason))


def why_doubted(external: Address) -> str | None:
    """Why a claim to ``external`` cannot be true, in words; ``None`` where it can."""
    try:
        ip = ip_address(external.host)
    except ValueError:
        return "the gateway does not know its own address"
    if ip.is_unspecified or ip.is_loopback or ip.is_multicast or ip.is_link_local or external.port < 1024:
        return f"the gateway claims {external.host} port {external.port}, which cannot be"
    shared = isinstance(ip, IPv4Address) and int(ip) >> 22 == _SHARED
    if ip.is_private or shared:
        return f"the gateway is itself behind another NAT (it calls {external.host} its own)"
    return None


def client_host_for(gateway: str, interfaces: Iterable[Address]) -> str | None:
    """Our own IPv4 address that is likeliest on ``gateway``'s network: it shares the longest prefix with it."""
    own = [ip for interface in interfaces if (ip := _v4(interface.host)) is not None]
    target = int(IPv4Address(gateway))
    return str(min(own, key=lambda ip: (int(ip) ^ target).bit_length())) if own else None


def _v4(host: str) -> IPv4Address | None:
    ip = ip_address(host)
    return ip if isinstance(ip, IPv4Address) and not ip.is_loopback else None


def _renewals(now: float, lifetime_s: float) -> list[float]:
    """Half way, then half way of what is left, and so on (RFC 6887 section 11.2.1)."""
    times, left = [], lifetime_s / 2
    while left >= _MIN_RENEWAL_INTERVAL_S:
        times.append(now + lifetime_s - left)
        left /= 2
    return times
