"""Run inside a namespace: sends one datagram, says so, and prints the port that the first to come is from.

python stranger.py LOCAL_PORT HOST PORT
"""

from __future__ import annotations

import socket
import sys


def main(local_port: int, host: str, port: int) -> None:
    """Knock and wait."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("0.0.0.0", local_port))  # noqa: S104  - the namespace has one interface
        sock.sendto(b"knock", (host, port))
        sys.stdout.write("sent\n")
        sys.stdout.flush()
        source = sock.recvfrom(100)[1]
        sys.stdout.write(f"heard from port {source[1]}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
