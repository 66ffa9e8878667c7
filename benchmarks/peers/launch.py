"""Starts torch_ddp.py with torchrun."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

HOST = "127.0.0.1"
TOKEN = "the token of the groups that are measured"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def torchrun(options: Sequence[str], script: Sequence[str]) -> list[str]:
    """Return the command line of one agent."""
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", "benchmarks.peers.torch_ddp", *script]
