"""The engines of torch, imported lazily, and the store of keys that they need, on top of a `Rendezvous`."""

from __future__ import annotations

from datetime import timedelta
from operator import attrgetter
from typing import Any

from elasticdl.collective.rendezvous import Rendezvous
from elasticdl_client.errors import ElasticDLError

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
    """The engines of torch.

    Raises:
        ElasticDLError: torch is not installed, or of a version without the names that are used here.
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
    """Raise ElasticDLError if torch's module of engines lacks a non-public name that is used; NCCL only where it is."""
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
    """Raises ElasticDLError unless the engines for arrays of this device are here: `cpu`, `cuda`, `cuda:N`."""
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
    """A store of torch.  The caller keeps it for as long as the engine that uses it."""

    class MeetingStore(engine_module().Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes) -> None:
            meeting.tell(key, value)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            meeting.learn(keys, timeout_s)

        def get(self, key: str) -> bytes:
            return meeting.learn([key], timeout_s)[0]

    return MeetingStore()
