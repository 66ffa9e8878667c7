"""The engines of torch: NCCL for arrays in GPU memory, or staging through the mesh (shared GPUs, encryption).

`interrupt` ends a member's wait on the GPU by aborting NCCL's communicator.  NCCL alone would wait for a dead peer
without limit; the loss is noticed at the connections of the mesh, which the same members have as well.

The engines are imported lazily; the key-value store that they need is built on a `Rendezvous`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from threading import Lock, Thread
from typing import Any

from elasticdl.collective.engine import Links, PendingCollective, Tensor
from elasticdl.collective.rendezvous import Rendezvous
from elasticdl.rpc import addresses
from elasticdl_client.errors import ElasticDLError

_FOR_EVER = timedelta(days=7)
_LOOK_EVERY_S = 0.0002


class NcclLinks:
    """NCCL's connections to all other members of a group.

    Args:
        store: A store of torch; used only by the constructor.
    """

    def __init__(self, store: Any, rank: int, size: int, device: str) -> None:
        import torch

        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # otherwise its watchdog ends the process
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"  # it polls the store forever
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # an abort needs no dump
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"  # otherwise `wait` blocks the thread
        c10d = engine_module()
        torch.cuda.set_device(torch.device(device))
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _FOR_EVER
        self._group = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), rank, size, options)
        self._group.eager_connect_single_device(torch.device(device))
        self._behind = torch.cuda.Stream(device)  # waits for collectives, instead of the stream that computes
        self._lock = Lock()
        self._abort: Thread | None = None

    def all_reduce(self, tensor: Tensor) -> PendingCollective:
        return self._begun(self._group.allreduce([tensor]))

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> PendingCollective:
        return self._begun(self._group.allgather([into], [tensor]))

    def broadcast(self, tensor: Tensor, source: int) -> PendingCollective:
        return self._begun(self._group.broadcast(tensor, source))

    def interrupt(self) -> None:
        with self._lock:
            if self._abort is None:  # set before aborted kernels return, whose results are invalid
                self._abort = Thread(target=self._group.abort, name="nccl-abort", daemon=True)
                self._abort.start()  # kernels return at once; freeing all takes longer

    def close(self) -> None:
        self.interrupt()
        assert self._abort is not None
        self._abort.join()
        self._group = None

    def check(self) -> None:
        """Raise RuntimeError if ended operations on the GPU may have been aborted."""
        if self._abort is not None:
            raise RuntimeError("NCCL was interrupted")

    def _begun(self, work: Any) -> PendingCollective:
        import torch

        done = torch.cuda.Event()
        with torch.cuda.stream(self._behind):
            work.wait()  # makes the stream wait; does not block the thread
            done.record()
        return NcclWork(self, done)


def use_family_of(address: str) -> None:
    """Make NCCL use the address family of this process's `host:port`: with both, it would use the interface's first.

    NCCL reads the variable once per process; a value set by the user is kept.
    """
    host, _ = addresses.parse(address)
    os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6" if ":" in host else "AF_INET")


class NcclWork:
    """A collective of NCCL: waits until the GPU has completed it."""

    def __init__(self, links: NcclLinks, done: Any) -> None:
        self._links = links
        self._done = done

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not self._done.query():
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_EVERY_S)
        self._links.check()
        return True


def version() -> str:
    """Return the version of the NCCL in use."""
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def identity(device: str) -> bytes:
    """Return the id of a GPU, with NCCL_HOSTID if the user has set it: NCCL wants one member per id."""
    import torch

    return f"{os.environ.get('NCCL_HOSTID', '')}/{torch.cuda.get_device_properties(device).uuid}".encode()


def can_join(identities: Sequence[bytes]) -> bool:
    """Return whether NCCL can connect members with these GPUs.

    Args:
        identities: `identity` of each member's GPU; empty for a member that computes on the CPU.
    """
    return all(identities) and len(set(identities)) == len(identities)


class StagedLinks:
    """Collectives of arrays in a GPU's memory, through pinned main memory and the mesh.

    Each collective first waits until the GPU has computed its input.
    """

    def __init__(self, mesh: Links) -> None:
        self._mesh = mesh

    def all_reduce(self, tensor: Tensor) -> PendingCollective:
        copy = _pinned(tensor).copy_(tensor)
        return StagedWork(self._mesh.all_reduce(copy), [(tensor, copy)])

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> PendingCollective:
        copy = _pinned(tensor).copy_(tensor)
        copies = [_pinned(one) for one in into]
        return StagedWork(self._mesh.all_gather(copies, copy), list(zip(into, copies, strict=True)))

    def broadcast(self, tensor: Tensor, source: int) -> PendingCollective:
        copy = _pinned(tensor).copy_(tensor)
        return StagedWork(self._mesh.broadcast(copy, source), [(tensor, copy)])

    def interrupt(self) -> None:
        """Do nothing: the group interrupts and closes its mesh."""

    def close(self) -> None:
        """See `interrupt`."""


class StagedWork:
    """A collective of the mesh, whose results are copied back to the GPU."""

    def __init__(self, work: PendingCollective, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._work = work
        self._copies = copies

    def wait(self, timeout_s: float) -> bool:
        if not self._work.wait(timeout_s):
            return False
        for tensor, copy in self._copies:
            tensor.copy_(copy, non_blocking=True)
        return True


def _pinned(tensor: Tensor) -> Tensor:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


STORE = ("Store.get", "Store.set", "Store.wait", "PrefixStore")
NCCL = (
    "ProcessGroupNCCL.Options._timeout",
    "ProcessGroupNCCL.abort",
    "ProcessGroupNCCL.allgather",
    "ProcessGroupNCCL.allreduce",
    "ProcessGroupNCCL.broadcast",
    "ProcessGroupNCCL.eager_connect_single_device",
)


def engine_module() -> Any:
    """Import and return torch's module of engines.

    Raises:
        ElasticDLError: torch is not installed, or its version lacks names that are used here.
    """
    try:
        from torch._C import _distributed_c10d
    except ImportError as error:
        raise ElasticDLError(
            f"The collectives of AllReduce need PyTorch, and it cannot be imported: {error}.",
            "Install it: pip install torch.",
        ) from None
    check_engines(_distributed_c10d)
    return _distributed_c10d


def check_engines(engines: Any) -> None:
    """Raise ElasticDLError if torch's module of engines lacks a non-public name that is used here."""
    needed = STORE + (NCCL if hasattr(engines, "ProcessGroupNCCL") else ())
    absent = [name for name in needed if not _has(engines, name)]
    if absent:
        import torch

        raise ElasticDLError(
            f"The collectives of AllReduce cannot work with the installed torch {torch.__version__}: "
            f"its torch._C._distributed_c10d has no {', '.join(absent)}.",
            "Install a version that they work with: pip install 'torch>=2.6,<3'.",
        )


def _has(engines: Any, name: str) -> bool:
    try:
        attrgetter(name)(engines)
    except AttributeError:
        return False
    return True


def check_device(device: str) -> None:
    """Raise ElasticDLError unless there are engines for this device: `cpu`, `cuda`, or `cuda:N`."""
    engines = engine_module()
    if device == "cpu":
        return
    import torch

    if not device.startswith("cuda"):
        raise ElasticDLError(f"There are no collectives for the device '{device}'.", "Known are cpu, cuda and cuda:N.")
    number = int(device.partition(":")[2] or 0)
    if not (torch.cuda.device_count() > number and hasattr(engines, "ProcessGroupNCCL")):
        raise ElasticDLError(
            f"The device '{device}' needs a GPU, and a PyTorch with CUDA; torch {torch.__version__} sees none.",
            "Install a build of PyTorch for the GPU, or compute on the CPU.",
        )


def store_of(meeting: Rendezvous, timeout_s: float) -> Any:
    """Return a store of torch.  The caller must keep it as long as the engine that uses it."""

    class MeetingStore(engine_module().Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes) -> None:
            meeting.publish(key, value)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            meeting.wait_for(keys, timeout_s)

        def get(self, key: str) -> bytes:
            return meeting.wait_for([key], timeout_s)[0]

    return MeetingStore()
