"""Addresses of members, as they are written and as they are numbered."""

from __future__ import annotations

import socket

Address = tuple[str, int]


def parse(address: str) -> Address:
    """`host:port` or `[host]:port`, as host and port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_name(number: str, port: int) -> str:
    """Of the Unix socket of a process that listens at this address too, in Linux's abstract namespace.

    Anybody on the machine may take the name first; the handshake finds that out.
    """
    return f"\0elasticdl-meeting-{number}-{port}"


def numeric_host(host: str) -> str:
    """One number of the host, IPv4 before IPv6.

    Raises:
        OSError: it has none.
    """
    return min(str(found[4][0]) for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))
