"""Find free TCP ports of this machine."""

from __future__ import annotations

import random
import socket

from elasticdl.rpc.addresses import family_of
from elasticdl_client.errors import JobError

_PORTS = range(20_000, 30_000)  # below those that the system gives to outgoing connections


def free_ports(host: str, number: int) -> list[int]:
    """Return free ports, each tried at this moment.

    Args:
        host: a number.

    Raises:
        JobError: fewer are free.
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
