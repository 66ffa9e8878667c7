"""The first bytes of a pod's tensor and sum connections, read off its network: whether the rest is encrypted.

    python -m tests.e2e_kubernetes.wire

prints the greeting of each connection of the network that it runs in (`elasticdl/rpc/handshake.py`); `greetings` runs
it in that of a pod.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.e2e_kubernetes.host import inside_network
from tests.e2e_kubernetes.kubectl import REPOSITORY

ENCRYPTED = "ELDX"
_ALL_PROTOCOLS = 3  # ETH_P_ALL: outgoing packets, too
_GREETINGS = (b"ELDH", ENCRYPTED.encode())
_GREETING_BYTES = 36  # which the other end answers before anything follows
_LISTENING = "listening"


@contextlib.contextmanager
def greetings(pod_uid: str) -> Iterator[list[str]]:
    """The greetings of the connections that the pod opens or accepts meanwhile; the list grows with them."""
    command = [*inside_network(pod_uid), sys.executable, "-m", __name__]
    found: list[str] = []
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        lines = map(str.strip, listening.stdout)
        reader = threading.Thread(target=lambda: [found.append(line) for line in lines])
        try:
            assert next(lines) == _LISTENING
            reader.start()
            yield found
        finally:
            listening.kill()
            reader.join()


def _listen() -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PROTOCOLS)) as network:
        print(_LISTENING, flush=True)
        while True:
            payload = _payload(network.recv(65536))
            if len(payload) == _GREETING_BYTES and payload[:4] in _GREETINGS:
                print(payload[:4].decode(), flush=True)


def _payload(packet: bytes) -> bytes:
    """Return the payload of a packet of TCP over IPv4; nothing of another one."""
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return b""
    segment = packet[4 * (packet[0] & 15) :]
    return segment[4 * (segment[12] >> 4) :]


if __name__ == "__main__":
    _listen()
