"""Addresses and TCP ports of this host, for peers that get one before anybody listens on it."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["default_address", "free_port"]

#: The first port that is chosen, above those of most services, and how many are tried.
_FIRST, _TRIES = 20_000, 32
#: Where Linux names the range of ports that it gives to outgoing connections, and the
#: default of that range.
_RANGE, _USUAL = Path("/proc/sys/net/ipv4/ip_local_port_range"), "32768 60999"


def default_address(towards: str = "192.0.2.1") -> str:
    """Where other hosts most likely reach this one: its address on the route to one of them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((towards, 9))  # nothing is sent; the default is a documentation address
        address: str = probe.getsockname()[0]
        return address
    return "127.0.0.1"


def free_port() -> int:
    """A TCP port on which nobody listens on any address of this host.

    It is none that the system gives to a connection of another process meanwhile, as far as there
    are such.
    """
    text = _RANGE.read_text(encoding="ascii") if _RANGE.exists() else _USUAL
    choices = max(0, int(text.split()[0]) - _FIRST)
    tried = [_FIRST + secrets.randbelow(choices) for _ in range(_TRIES)] if choices else []
    for port in tried:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        given: int = probe.getsockname()[1]
        return given
