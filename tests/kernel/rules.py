"""What a home router does with packets, as nftables rules. Its interfaces are called ``wan`` and ``lan``.

Linux' ``masquerade`` keeps the inner port where that is free, and looks for a free one only among flows to the same
destination. So one inner port has one outer port towards everybody: an endpoint-independent mapping (RFC 4787 section
4.1). Connection tracking lets in the replies of known flows alone: filtering by address and port.

The mapping holds only while the router drops what is not for it. A router that accepts a stranger's datagram, if only
to say that no such port is open, remembers that flow as its own, and the inner host's datagram to that stranger then
leaves from another port: see ``ANSWERING``.
"""

from __future__ import annotations

_MASQUERADE = """
table ip home {{
  chain out {{
    type nat hook postrouting priority srcnat
    oifname "wan" masquerade {flags}
  }}
}}
"""

_CLOSED = """
table ip guard {
  chain input {
    type filter hook input priority filter
    iifname "wan" ct state new drop
  }
}
"""

RESTRICTED = _MASQUERADE.format(flags="") + _CLOSED
"""What most homes have."""

ANSWERING = _MASQUERADE.format(flags="")
"""The same on a router that answers strangers with ICMP errors: a gateway whose owner set up NAT and no firewall."""

RANDOM = _MASQUERADE.format(flags="random,fully-random") + _CLOSED
"""Another outer port for each flow."""

# Whoever may come in is a question of which key the way in is remembered under: one inner host at each outer port, for
# everybody or for the hosts that were sent to.
_REMEMBERING = """
table ip home {{
  map inside {{
    type {key_type} : ipv4_addr
    size 65535
    flags dynamic, timeout
    timeout 5m
  }}
  chain in {{
    type nat hook prerouting priority dstnat
    iifname "wan" meta l4proto udp dnat to {key_in} map @inside
  }}
  chain out {{
    type nat hook postrouting priority srcnat
    oifname "wan" meta l4proto udp update @inside {{ {key_out} : ip saddr }}
    oifname "wan" masquerade
  }}
}}
"""

CONE = _CLOSED + _REMEMBERING.format(key_type="inet_service", key_in="udp dport", key_out="udp sport")
"""A port that sent something is open to the world: a full cone. Good for one inner host: it goes by the inner port."""

ADDRESS_RESTRICTED = _CLOSED + _REMEMBERING.format(
    key_type="ipv4_addr . inet_service", key_in="ip saddr . udp dport", key_out="ip daddr . udp sport"
)
"""A port is open to all ports of the hosts it has sent to."""

BLOCKED = (
    RESTRICTED
    + """
table ip no_udp {
  chain forward {
    type filter hook forward priority filter
    meta l4proto udp drop
  }
}
"""
)
"""No UDP through this router."""

LOSSY = (
    RESTRICTED
    + """
table ip radio {
  chain forward {
    type filter hook forward priority filter
    meta l4proto udp numgen random mod 100 < 5 drop
  }
}
"""
)
"""What most homes have, over a radio that loses one datagram in twenty either way."""
