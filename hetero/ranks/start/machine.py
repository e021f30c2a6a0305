"""This machine, as ranks tell it from others, and its network interface to them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

import psutil

_INTERFACE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"  # of no machine (RFC 5737); nothing is sent there


def boot_id() -> str:
    """The kernel's random number of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_id() -> bytes:
    """A name that no other machine has, and no container with a host name of its own.

    Host names alone may be the same on several machines, as "localhost" is.
    """
    return f"{socket.gethostname()}/{boot_id()}".encode()


def choose_interface() -> None:
    """Sets GLOO_SOCKET_IFNAME if gloo would listen where other machines cannot reach it.

    Without it gloo listens at the address of the host name, and many systems have that name at the
    loopback interface (127.0.1.1), or do not know it. The interface to MASTER_ADDR is taken, or
    that of the default route, or the only one that there is. Ranks of one machine need none.

    Raises ValueError if there are several, and nothing says which.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", world_size) == world_size
    if is_one_machine or os.environ.get(_INTERFACE) or not _is_loopback(socket.gethostname()):
        return
    found = {
        str(ipaddress.ip_address(address.address.partition("%")[0])): name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and psutil.net_if_stats()[name].isup
    }
    others = {name for address, name in found.items() if not _is_loopback(address)}
    addresses = map(_address_towards, (os.environ.get("MASTER_ADDR"), _ELSEWHERE))
    name = next((found[each] for each in addresses if found.get(each) in others), None)
    if name is None and len(others) == 1:
        (name,) = others
    if name is None:
        raise ValueError(
            f"the host name {socket.gethostname()} is the loopback address or unknown, so ranks of "
            f"other machines cannot connect; set {_INTERFACE} to the interface between the "
            f"machines: one of {', '.join(sorted(others)) or 'those that ip -br addr lists'}"
        )
    os.environ[_INTERFACE] = name


def _is_loopback(host: str) -> bool:
    """Whether it is a name of the loopback address, or of none."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return True
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def _address_towards(host: str | None) -> str:
    """This machine's address on the way to a host; "" if there is no way."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # (of datagrams, so that nothing is sent)
            return str(probe.getsockname()[0])
    return ""
