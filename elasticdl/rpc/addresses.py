"""Addresses of processes, `host:port` or, for IPv6, `[host]:port`: the only place that formats and parses them."""

from __future__ import annotations

import random
import socket

from elasticdl_client.errors import JobError

Address = tuple[str, int]

ANY_IPV4 = "0.0.0.0"
ANY = "::"  # both families, if the machine has both


def parse(address: str) -> Address:
    """Return the host, without brackets, and the port.

    Raises:
        ValueError: there is no port.
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def any_host() -> str:
    """Return the address to listen on to be reached at every address of this machine."""
    return ANY if socket.has_dualstack_ipv6() else ANY_IPV4


def numeric_host(host: str) -> str:
    """Return one numeric address of a host, IPv4 before IPv6.

    Raises:
        OSError: the host has no address.
    """
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return min((kind == socket.AF_INET6, str(address[0])) for kind, _, _, _, address in found)[1]


def family_of(number: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in number else socket.AF_INET


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket; on `ANY`, for both families.

    Raises:
        OSError: the host is not an address of this machine, or the port is in use.
    """
    number = host if host == ANY else numeric_host(host)
    both = number == ANY and socket.has_dualstack_ipv6()
    return socket.create_server((number, port), family=family_of(number), backlog=backlog, dualstack_ipv6=both)


def own_host(peer: str) -> str:
    """Return the local address on the route to a peer.

    Raises:
        OSError: there is no route to that address.
    """
    host, port = parse(peer)
    failure = OSError(f"{host} has no address")
    for kind, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # a datagram socket: nothing is sent
                return str(probe.getsockname()[0])
        except OSError as error:  # a name may have addresses of a family without a route from this machine
            failure = error
    raise failure


_PORTS = range(20_000, 30_000)  # below the ports for outgoing connections


def free_ports(host: str, number: int) -> list[int]:
    """Return free ports; each was tried just now.

    Args:
        host: A numeric address of this machine.

    Raises:
        JobError: fewer ports are free.
    """
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == number:
            break
        with socket.socket(family_of(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        found.append(port)
    if len(found) < number:
        raise JobError(f"there are no {number} free ports between {_PORTS.start} and {_PORTS.stop} on this machine")
    return found
