"""Run inside a namespace with two public addresses: the project's STUN server at full strength (RFC 5780).

python stun_responder.py HOST HOST PORT PORT
"""

from __future__ import annotations

import os
import socket
import sys

import trio

from kafila.nat.stun_server import Local, StunServer
from kafila.udp import UdpSocket

READY = "listening"


async def _serve(here: Local, server: StunServer, sockets: dict[Local, UdpSocket]) -> None:
    while True:
        data, source = await sockets[here].receive()
        reply = server.respond(data, source, here, trio.current_time())
        if reply is not None:
            await sockets[reply.local].send(reply.data, source)


def _bound(host: str, port: int) -> UdpSocket:
    raw = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    raw.bind((host, port))
    return UdpSocket(raw)


async def _main(hosts: tuple[str, ...], ports: tuple[int, ...]) -> None:
    server = StunServer(hosts, ports, os.urandom(16))
    sockets = {Local(h, p): _bound(host, port) for h, host in enumerate(hosts) for p, port in enumerate(ports)}
    async with trio.open_nursery() as nursery:
        for here in sockets:
            nursery.start_soon(_serve, here, server, sockets)
        sys.stderr.write(READY + "\n")


if __name__ == "__main__":
    trio.run(_main, tuple(sys.argv[1:3]), tuple(map(int, sys.argv[3:5])))
