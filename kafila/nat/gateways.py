"""The default gateway, read from what operating systems say of their routes (pure: text in, addresses out)."""

from __future__ import annotations

from ipaddress import IPv4Address

_UP_AND_GATEWAY = 0x0003  # RTF_UP | RTF_GATEWAY, include/uapi/linux/route.h


def from_proc_net_route(text: str) -> list[str]:
    """IPv4 default gateways from Linux's ``/proc/net/route``, the preferred (lowest metric) first.

    Columns: interface, destination, gateway, flags, ..., metric (the seventh); addresses in little-endian hexadecimal.
    """
    found: list[tuple[int, str]] = []
    for line in text.splitlines()[1:]:
        columns = line.split()
        try:
            destination, gateway, flags = (int(column, 16) for column in columns[1:4])
            metric = int(columns[6])
        except (ValueError, IndexError):
            continue
        if destination == 0 and flags & _UP_AND_GATEWAY == _UP_AND_GATEWAY and gateway < 2**32:
            found.append((metric, str(IPv4Address(gateway.to_bytes(4, "little")))))
    return list(dict.fromkeys(gateway for _, gateway in sorted(found, key=lambda one: one[0])))


def from_netstat(text: str) -> list[str]:
    """IPv4 default gateways from ``netstat -rn -f inet`` of macOS and the BSDs, in its order."""
    found: list[str] = []
    for line in text.splitlines():
        columns = line.split()
        if len(columns) >= 2 and columns[0] == "default" and _is_ipv4(columns[1]):
            found.append(columns[1])
    return list(dict.fromkeys(found))


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True
