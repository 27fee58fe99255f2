"""Default gateways out of what two kinds of systems print."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.gateways import from_netstat, from_proc_net_route

LINUX = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\tFE00000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
tun0\t00000000\t00000000\t0001\t0\t0\t50\t00000080\t0\t0\t0
wlan0\t0001A8C0\t00000000\t0001\t0\t0\t600\t00FFFFFF\t0\t0\t0
"""
MACOS = """\
Routing tables

Internet:
Destination        Gateway            Flags               Netif Expire
default            192.168.1.1        UGScg                 en0
default            link#12            UCSIg             bridge1
default            10.0.0.1           UGScIg                en5
127                127.0.0.1          UCS                   lo0
192.168.1.1        aa:bb:cc:dd:ee:ff  UHLWIir               en0   1180
"""


def test_linux_routes_by_metric() -> None:
    assert from_proc_net_route(LINUX) == ["10.0.0.254", "192.168.1.1"]


def test_macos_routes_in_order() -> None:
    assert from_netstat(MACOS) == ["192.168.1.1", "10.0.0.1"]


@given(st.text(max_size=300))
def test_anything_else_is_no_gateway(text: str) -> None:
    from_proc_net_route("head\n" + text)
    from_netstat(text)
