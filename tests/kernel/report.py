"""Run inside a namespace: prints the NAT report of the machine it is on, from the STUN servers it is given."""

from __future__ import annotations

import json
import sys

import trio

from kafila.nat.driver import classify_network
from kafila.nat.report import to_json
from kafila.ring.invite import parse_host_port
from kafila.types import Address
from kafila.udp import TrioNetwork


def main(servers: list[str]) -> None:
    """Classify and print."""
    parsed = [parse_host_port(server) for server in servers]
    addresses = [Address(server.host, server.port) for server in parsed]
    json.dump(to_json(trio.run(classify_network, TrioNetwork(), addresses)), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
