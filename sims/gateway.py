"""The box between a LAN and the network above it: translates IPv4, guards IPv6, answers port-mapping requests."""

from __future__ import annotations

from ipaddress import IPv6Network
from typing import Protocol

from kafila.types import Address
from sims.fabric import Fabric
from sims.filtering import StatefulFirewall
from sims.lan import Attachment, Lan
from sims.link import PERFECT, Quality
from sims.nat import Hairpin, NatTable
from sims.packet import Drop, Packet, is_v6
from sims.static_nat import OneToOneTable
from sims.trace import What


class GatewayService(Protocol):
    """Something that listens on the gateway's inside address, such as a port-mapping server."""

    port: int

    def answer(self, request: bytes, source: Address, gateway: Gateway, now: float) -> bytes | None:
        """The reply to one datagram from inside, or None for silence."""
        ...

    def reboot(self, now: float) -> None:
        """The gateway has lost its memory."""
        ...


class Gateway:
    """A router with one foot in ``outside`` and LANs of its own. IPv4 goes through ``table``; IPv6, which needs no
    translation, through a stateful firewall."""

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        outside: Lan,
        table: NatTable | OneToOneTable,
        hosts: list[str],
        *,
        hairpin: Hairpin = Hairpin.OFF,
        up: Quality = PERFECT,
        down: Quality = PERFECT,
    ) -> None:
        """``hosts``: its addresses on ``outside``."""
        self.name = name
        self.table = table
        self.outside = outside.attach(self, hosts, up=up, down=down)
        self.lans: list[Lan] = []
        self.hairpin = hairpin
        self.firewall = StatefulFirewall()
        self.service: GatewayService | None = None
        self.udp_blocked = False
        """Nothing over UDP passes either way (the gateway itself still answers)."""
        self.routes_between_lans = False
        self.is_up = True
        self.fabric = fabric

    @property
    def external_hosts(self) -> list[str]:
        """Its IPv4 addresses outside."""
        return [host for host in self.outside.hosts if not is_v6(host)]

    def add_lan(self, name: str, networks: list[str], *, isolated: bool = False) -> Lan:
        """One more network inside, at best one prefix a family. An IPv6 prefix is announced to all above."""
        lan = Lan(self.fabric, name, networks, self, isolated=isolated)
        self.lans.append(lan)
        for network in lan.networks:
            if isinstance(network, IPv6Network):
                self.route_behind(network)
        return lan

    # -- the Router of its LANs ------------------------------------------------------------------------------------

    def inside_hosts(self, lan: Lan) -> list[str]:
        """The first address of each prefix."""
        return lan.first_hosts

    def joined(self, host: str) -> None:
        """A one-to-one gateway takes one more external address for each new inside one."""
        if isinstance(self.table, OneToOneTable) and not is_v6(host):
            external = self._new_external()
            self.outside.lan.add_host(self.outside, external)
            self.table.bind(host, external)

    def route_behind(self, network: IPv6Network) -> None:
        self.outside.lan.route_behind(network, self.outside)

    def from_inside(self, packet: Packet, now: float, lan: Lan) -> None:
        """Route one packet from a LAN."""
        to = packet.to
        if not self.is_up:
            self.fabric.drop(self.name, Drop.REBOOTING, packet, now)
        elif to.host in self.inside_hosts(lan):
            self._serve(packet, now, lan)
        elif self.udp_blocked:
            self.fabric.drop(self.name, Drop.UDP_BLOCKED, packet, now)
        elif self._lan_of(to.host) is not None:
            self._between_lans(packet, now)
        elif is_v6(to.host):
            self.firewall.sent(packet.source, to, now)
            self.outside.send(packet, now)
        elif to.host in self.outside.hosts:
            self._hairpin(packet, now)
        else:
            self._translate_out(packet, now)

    # -- packets from outside --------------------------------------------------------------------------------------

    def arrive(self, packet: Packet, now: float, through: Attachment) -> None:
        """Route one packet from above; ``through`` is always its one outside cable."""
        if not self.is_up:
            self.fabric.drop(self.name, Drop.REBOOTING, packet, now)
        elif self.udp_blocked:
            self.fabric.drop(self.name, Drop.UDP_BLOCKED, packet, now)
        elif not is_v6(packet.to.host):
            self._translate_in(packet, packet.source, now)
        elif packet.to.host in through.hosts:
            self.fabric.drop(self.name, Drop.NO_SERVICE, packet, now)
        elif not self.firewall.admits(packet.to, packet.source, now):
            self.fabric.drop(self.name, Drop.FIREWALL, packet, now)
        else:
            self._deliver_inside(packet, now)

    # -- faults ----------------------------------------------------------------------------------------------------

    def reboot(self, *, outage_s: float = 0.0, new_address: bool = False) -> None:
        """Lose every mapping and permission; stay off for ``outage_s``; perhaps come back under another address."""
        now = self.fabric.now
        self.fabric.note(self.name, f"reboots, off for {outage_s:g} s" + (", new address" if new_address else ""))
        self.table.flush()
        self.firewall.flush()
        if self.service is not None:
            self.service.reboot(now)
        if new_address:
            self.renumber()
        if outage_s > 0:
            self.is_up = False
            self.fabric.at(now + outage_s, self._come_up)

    def renumber(self) -> None:
        """Exchange every external IPv4 address for a new one (the provider's doing); mappings do not survive."""
        lan = self.outside.lan
        if isinstance(self.table, OneToOneTable):
            for internal, external in self.table.pairs():
                lan.remove_host(self.outside, external)
                self.joined(internal)
            return
        old = self.external_hosts
        new = [self._new_external() for _ in old]
        for host in old:
            lan.remove_host(self.outside, host)
        for host in new:
            lan.add_host(self.outside, host)
        self.table.flush(new)

    def move_mappings(self, *, keep_old: bool = False) -> None:
        """Give every mapping a new port under its owner's feet; ``keep_old``: the old one still lets packets in."""
        if isinstance(self.table, NatTable):
            self.fabric.note(self.name, "moves every mapping to a new port")
            self.table.move_mappings(self.fabric.now, keep_old=keep_old)

    def _come_up(self) -> None:
        self.is_up = True
        self.fabric.note(self.name, "is back")

    def _new_external(self) -> str:
        host = self.outside.lan.new_host(4)
        if host is None:
            raise ValueError(f"{self.outside.lan.name} has no IPv4 addresses to give {self.name}")
        return host

    # -- inside ----------------------------------------------------------------------------------------------------

    def _lan_of(self, host: str) -> Lan | None:
        return next((lan for lan in self.lans if lan.find(host) is not None), None)

    def _deliver_inside(self, packet: Packet, now: float) -> None:
        lan = self._lan_of(packet.to.host)
        if lan is None:
            self.fabric.drop(self.name, Drop.NO_ROUTE, packet, now)
        else:
            lan.forward(packet, now, None)

    def _between_lans(self, packet: Packet, now: float) -> None:
        if self.routes_between_lans:
            self._deliver_inside(packet, now)
        else:
            self.fabric.drop(self.name, Drop.ISOLATED, packet, now)

    def _translate_out(self, packet: Packet, now: float) -> None:
        source = self.table.outbound(packet.source, packet.to, now)
        if isinstance(source, Drop):
            self.fabric.drop(self.name, source, packet, now)
        else:
            translated = Packet(source, packet.to, packet.data)
            self._trace(translated, now, f"from {packet.source.host}:{packet.source.port}")
            self.outside.send(translated, now)

    def _translate_in(self, packet: Packet, shown_source: Address, now: float) -> None:
        inside = self.table.inbound(packet.source, packet.to, now)
        if isinstance(inside, Drop):
            self.fabric.drop(self.name, inside, packet, now)
        else:
            translated = Packet(shown_source, inside, packet.data)
            self._trace(translated, now, f"to {packet.to.host}:{packet.to.port}")
            self._deliver_inside(translated, now)

    def _hairpin(self, packet: Packet, now: float) -> None:
        if self.hairpin is Hairpin.OFF:
            self.fabric.drop(self.name, Drop.NO_HAIRPIN, packet, now)
            return
        source = self.table.outbound(packet.source, packet.to, now)
        if isinstance(source, Drop):
            self.fabric.drop(self.name, source, packet, now)
            return
        shown = source if self.hairpin is Hairpin.EXTERNAL_SOURCE else packet.source
        self._translate_in(Packet(source, packet.to, packet.data), shown, now)

    def _serve(self, packet: Packet, now: float, lan: Lan) -> None:
        if self.service is None or packet.to.port != self.service.port:
            self.fabric.drop(self.name, Drop.NO_SERVICE, packet, now)
            return
        reply = self.service.answer(packet.data, packet.source, self, now)
        if reply is not None:
            lan.forward(Packet(packet.to, packet.source, reply), now, None)

    def _trace(self, packet: Packet, now: float, detail: str) -> None:
        if self.fabric.sinks:
            self.fabric.record(now, self.name, What.TRANSLATED, packet, detail)
