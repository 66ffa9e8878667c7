"""NCCL: collectives of arrays in the memory of GPUs.

A member's wait on the GPU is ended by `interrupt`, which aborts NCCL's communicator.  NCCL alone would wait for a dead
peer without limit; its loss is seen at the mesh's connections, which the same members hold, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from elasticdl.collective.engine import PendingCollective, Tensor
from elasticdl.collective.torch_store import engine_module
from elasticdl.rpc import addresses

_FOR_EVER = timedelta(days=7)
_LOOK_EVERY_S = 0.0002


class NcclLinks:
    """NCCL's connections to all others of a world.

    Args:
        store: of torch; not used any more once this is made.
    """

    def __init__(self, store: Any, rank: int, size: int, device: str) -> None:
        import torch

        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # or its watchdog ends the process
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"  # it asks the store without end
        c10d = engine_module()
        torch.cuda.set_device(torch.device(device))
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _FOR_EVER
        self._group = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), rank, size, options)
        self._group.eager_connect_single_device(torch.device(device))

    def all_reduce(self, tensor: Tensor) -> PendingCollective:
        return self._begun(self._group.allreduce([tensor]))

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> PendingCollective:
        return self._begun(self._group.allgather([into], [tensor]))

    def broadcast(self, tensor: Tensor, source: int) -> PendingCollective:
        return self._begun(self._group.broadcast(tensor, source))

    def interrupt(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.abort()
        self._group = None

    def _begun(self, work: Any) -> PendingCollective:
        import torch

        work.wait()  # orders the stream of this thread behind it; does not block
        done = torch.cuda.Event()
        done.record()
        return EventWork(done.query)


def use_family_of(address: str) -> None:
    """Lets NCCL's sockets be of the family of an own `host:port`: with both it would take the interface's first.

    NCCL reads the variable once in a process; one that the user has set stays.
    """
    host, _ = addresses.parse(address)
    os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6" if ":" in host else "AF_INET")


class EventWork:
    """Waits for an event of a GPU."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not self._is_done():
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True
