"""Commands for members: functions of their group."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from elasticdl.collective import ElasticGroup, Peer

THREADS = 3  # of Python in a member: its main thread, that of `meanwhile`, and its rendezvous server


def pattern(size: int, rank: int) -> NDArray[np.float32]:
    """Small whole numbers, so that sums are exact in any order."""
    return ((np.arange(size) * (rank + 3) + rank) % 251).astype(np.float32)


def summed(group: ElasticGroup, rank: int, sizes: list[int]) -> list[NDArray[np.float32]]:
    buffers = [pattern(size, rank) for size in sizes]
    group.reduce(buffers)
    return buffers


def staged(group: ElasticGroup, rank: int, source: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A sum, and what the source has, by way of main memory, as of tensors on a GPU that members share."""
    import torch

    from elasticdl.collective.nccl import StagedLinks

    formed = group._formed
    assert formed is not None
    assert formed._mesh is not None
    formed._by_device["cpu"] = StagedLinks(formed._mesh)
    summed, given = (torch.from_numpy(pattern(size, rank)).reshape(3, -1) for size in (6_000_003, 6))
    group.reduce([summed])
    formed.finish(formed.begin(given, lambda links: links.broadcast(given, source)))
    return summed.numpy().ravel(), given.numpy().ravel()


def engine(group: ElasticGroup) -> str:
    return group.engine


def gathered(group: ElasticGroup, *values: int) -> list[list[int]]:
    found: list[list[int]] = group.gather(np.array(values, np.int64)).tolist()
    return found


def lost_after(group: ElasticGroup) -> tuple[float, str]:
    """Gathers until the group is lost; the time of that, and why."""
    from elasticdl.collective import GroupLost

    try:
        while True:
            group.gather(np.zeros(4, np.int64))
    except GroupLost as error:
        return time.time(), error.what


def abandon(group: ElasticGroup, reason: str, older_than: int | None = None) -> float:
    group.abandon(reason, older_than)
    return time.time()


def is_meeting(group: ElasticGroup) -> bool:
    """Whether it has come to the place of rank 0, and waits for the others."""
    formed = group._formed
    return formed is not None and formed._meeting is not None


def waiting_seconds(group: ElasticGroup) -> float:
    return group.waiting_seconds


def mixed_state() -> dict[str, NDArray[Any]]:
    """Names, types and sizes of many kinds; the large ones are sent in pieces, the small ones together."""
    random = np.random.default_rng(5)
    state: dict[str, NDArray[Any]] = {
        "kernel:0": random.random((28_000_000,), np.float32),  # 112 MB
        "a/b ü": random.random((3, 5, 7)),
        "scalar": np.array(7, np.int64),
        "nothing": np.zeros((0, 4), np.float16),
        "flags": random.random(99) > 0.5,
        "turned": np.asfortranarray(random.random((300, 200), np.float32)),
        "every_third": np.arange(3000, dtype=np.int32)[::3],
        "words": np.array(["one", "three"]),
        "brain": random.random((65, 3)).astype(ml_dtypes.bfloat16),
        "locked": np.arange(400_000, dtype=np.uint8),
    }
    state["locked"].flags.writeable = False
    state |= {f"small/{n}": np.full((n,), n, np.float32) for n in range(300)}
    return state


def give_state(group: ElasticGroup, rank: int, source: int) -> bool:
    """Whether what comes is what the source has."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = group.broadcast(mixed_state() if rank == source else None, source)
    expected = mixed_state()
    return list(found) == list(expected) and all(
        found[name].dtype == array.dtype and np.array_equal(found[name], array) and found[name].shape == array.shape
        for name, array in expected.items()
    )


def give_bytes(group: ElasticGroup, size: int, rank: int, source: int) -> bool:
    data = bytes(np.arange(size, dtype=np.uint32).view(np.uint8)[:size])
    return group.broadcast_bytes(data if rank == source else None, source) == data


def sum_behind_other_work(group: ElasticGroup, rank: int) -> list[NDArray[np.float32]]:
    buffers = [pattern(200_000 + n, rank) for n in range(5)]
    begun = [group.begin_reduce(buffer) for buffer in buffers]
    for reduction in reversed(begun):
        reduction.wait()
    return buffers


class OnlyCapsule:
    """An array of another library, known by `__dlpack__` alone."""

    def __init__(self, array: NDArray[np.float32]) -> None:
        self._array = array

    def __dlpack__(self) -> object:
        return self._array.__dlpack__()


def sum_of_many_kinds(group: ElasticGroup, rank: int) -> list[NDArray[Any]]:
    """Sums in place in the memory of numpy, of torch, and behind `__dlpack__`."""
    import torch

    own, behind, double = pattern(10, rank), pattern(11, rank), pattern(12, rank).astype(np.float64)
    tensor = torch.from_numpy(pattern(13, rank).copy()).requires_grad_()
    group.reduce([own, OnlyCapsule(behind), double, tensor])
    return [own, behind, double, tensor.detach().numpy()]


def group_after_group(group: ElasticGroup, peers: list[Peer], rank: int, count: int) -> float:
    """Forms groups by itself, each left as soon as its last collective has ended here; seconds for each."""
    began = time.monotonic()
    for version in range(1, count + 1):
        group.form(version, peers, rank, 30.0)
        buffer = pattern(200_001, rank)
        group.reduce([buffer])
        expected = sum(pattern(200_001, other) for other in range(len(peers)))
        assert np.array_equal(buffer, expected), version
        group.gather(np.array([version]))
    return (time.monotonic() - began) / count


def settled(group: ElasticGroup) -> dict[str, Any]:
    """Return `used` once the threads that form and free groups have ended; one may begin another."""
    while working := [one for one in threading.enumerate() if one.name in ("form-group", "free-group")]:
        for thread in working:
            thread.join()
    return used(group)


def used(group: ElasticGroup) -> dict[str, Any]:
    """Return the kernel resources of this process."""
    gc.collect()
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(lines["Threads"]),
        "python_threads": threading.active_count(),
        "rss_kb": int(lines["VmRSS"].split()[0]),
    }
