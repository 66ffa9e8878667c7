"""The TCP sockets of this process, found by their addresses, so that what waits on them can be woken.

Gloo has no way to end a collective that waits for a silent peer.  Its connections are ordinary sockets of this
process, though: `shutdown` makes every wait on them end at once, on both sides.  Copies of the descriptors (`dup`) are
made where they are found, so nothing here depends on a number that somebody else may have reused since.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

DESCRIPTORS = "/dev/fd"
_INTERNET = (socket.AF_INET, socket.AF_INET6)

Address = tuple[str, int]


def parse(address: str) -> Address:
    """`host:port` or `[host]:port`, as host and port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric(address: Address) -> set[Address]:
    """The address with every number that its host has."""
    return {_plain(found[4]) for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)}


def numeric_host(host: str) -> str:
    """One number of the host, IPv4 before IPv6.

    Raises:
        OSError: it has none.
    """
    return min(number for number, _ in numeric((host, 0)))


def local_address(one: socket.socket) -> Address:
    return _plain(one.getsockname())


def remote_address(one: socket.socket) -> Address | None:
    """None: it is not connected."""
    try:
        return _plain(one.getpeername())
    except OSError:
        return None


def is_listening(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def copies(wanted: Callable[[socket.socket], bool]) -> list[socket.socket]:
    """Copies of those TCP sockets of this process that are wanted; the caller closes them."""
    found = []
    for one in _all():
        try:
            is_wanted = wanted(one)
        except OSError:  # its connection is gone
            is_wanted = False
        if is_wanted:
            found.append(one)
        else:
            one.close()
    return found


def shut(sockets: Iterable[socket.socket]) -> None:
    """Ends whatever waits on them, here and at their other ends."""
    for one in sockets:
        with suppress(OSError):  # not connected any more
            one.shutdown(socket.SHUT_RDWR)


def close(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def closed_from_afar(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """Those whose other end is closed, whether or not all that it sent has been read."""
    poll, by_number = select.poll(), {one.fileno(): one for one in sockets}
    for number in by_number:
        poll.register(number, getattr(select, "POLLRDHUP", 0))
    return [by_number[number] for number, _ in poll.poll(0)]


def _all() -> Iterator[socket.socket]:
    for name in os.listdir(DESCRIPTORS):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        if one.family in _INTERNET and one.type == socket.SOCK_STREAM:
            yield one
        else:
            one.close()


def _plain(name: tuple[object, ...]) -> Address:
    """Host and port; an IPv4 address in the clothes of an IPv6 one without them."""
    host, port = str(name[0]), name[1]
    assert isinstance(port, int)
    with suppress(ValueError):
        number = ipaddress.ip_address(host.partition("%")[0])
        host = str(getattr(number, "ipv4_mapped", None) or number)
    return host, port
