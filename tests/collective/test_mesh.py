"""Collectives of native code between threads of one process, over real sockets: exact, the same bits, over at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from elasticdl.kernels._native import Mesh, MeshFailure, MeshWork

WITHIN_S = 20.0
TYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]
COUNTS = [1, 2, 15, 4097, 40_000, 1_200_003]  # in one hop, and in pieces
Array = NDArray[Any]


def sockets_of(num_members: int) -> list[list[int]]:
    """Descriptors of each, by rank."""
    found = [[-1] * num_members for _ in range(num_members)]
    for one in range(num_members):
        for other in range(one):
            ends = socket.socketpair()
            found[one][other], found[other][one] = ends[0].detach(), ends[1].detach()
    return found


@contextmanager
def meshes(num_members: int) -> Iterator[list[Mesh]]:
    made = [Mesh(rank, sockets) for rank, sockets in enumerate(sockets_of(num_members))]
    try:
        yield made
    finally:
        for mesh in made:
            mesh.close()


def done(work: MeshWork) -> None:
    end = time.monotonic() + WITHIN_S
    while not work.wait(0.1):
        assert time.monotonic() < end, "it does not end"


def begin_sum(mesh: Mesh, array: Array) -> MeshWork:
    return mesh.all_reduce(array.ctypes.data, array.size, array.dtype.name, array)


def begin_gather(mesh: Mesh, array: Array, into: list[Array]) -> MeshWork:
    return mesh.all_gather(array.ctypes.data, array.nbytes, [one.ctypes.data for one in into], (array, into))


def begin_copy(mesh: Mesh, array: Array, source: int) -> MeshWork:
    return mesh.broadcast(array.ctypes.data, array.nbytes, source, array)


def all_do(made: list[Mesh], begin: Callable[[int], MeshWork]) -> None:
    with ThreadPoolExecutor(len(made)) as pool:
        for future in [pool.submit(lambda rank=rank: done(begin(rank))) for rank in range(len(made))]:
            future.result(WITHIN_S)


def values(dtype: str, count: int, rank: int) -> Array:
    drawn = np.random.default_rng(rank).integers(-9 if dtype[0] in "fb" else 0, 20, count)
    return drawn.astype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_members", [2, 3, 5])
def test_sums_of_every_type_and_size_are_exact(dtype: str, num_members: int) -> None:
    with meshes(num_members) as made:
        for count in COUNTS:
            arrays = [values(dtype, count, rank) for rank in range(num_members)]
            expected = np.sum([array.astype(np.float64) for array in arrays], axis=0).astype(arrays[0].dtype)
            all_do(made, lambda rank, arrays=arrays: begin_sum(made[rank], arrays[rank]))
            for array in arrays:
                assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [300, 1_000_000])
def test_sums_that_are_rounded_are_the_same_bits_at_all_members(count: int) -> None:
    with meshes(4) as made:
        arrays = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(4)]
        in_order = arrays[0] + arrays[1] + arrays[2] + arrays[3]
        all_do(made, lambda rank: begin_sum(made[rank], arrays[rank]))
        assert {array.tobytes() for array in arrays} == {in_order.tobytes()}


@pytest.mark.parametrize("size", [1, 5000, 2_000_001])
@pytest.mark.parametrize("source", [0, 2])
def test_bytes_are_copied_to_all_and_gathered_by_rank(size: int, source: int) -> None:
    with meshes(4) as made:
        copies = [np.full(size, rank, np.uint8) for rank in range(4)]
        all_do(made, lambda rank: begin_copy(made[rank], copies[rank], source))
        assert all((copy == source).all() for copy in copies)
        own = [np.full(size, rank + 7, np.uint8) for rank in range(4)]
        into = [[np.zeros(size, np.uint8) for _ in range(4)] for _ in range(4)]
        all_do(made, lambda rank: begin_gather(made[rank], own[rank], into[rank]))
        assert all((into[rank][other] == other + 7).all() for rank in range(4) for other in range(4))


def test_an_unknown_type_is_refused() -> None:
    with meshes(2) as made, pytest.raises(ValueError, match="complex64"):
        begin_sum(made[0], np.zeros(3, np.complex64))


@contextmanager
def waiting(made: list[Mesh], begin: Callable[[int], MeshWork], ranks: list[int]) -> Iterator[dict[int, Future[None]]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        yield {rank: pool.submit(lambda rank=rank: done(begin(rank))) for rank in ranks}


def test_members_that_make_different_calls_are_named_and_get_no_sum() -> None:
    with meshes(2) as made:
        short, long = np.zeros(4, np.float32), np.zeros(5, np.float32)
        with waiting(made, lambda rank: begin_sum(made[rank], (short, long)[rank]), [0, 1]) as calls:
            failures = [call.exception(WITHIN_S) for call in calls.values()]
        assert any("does something else" in str(failure) for failure in failures)
        assert all(isinstance(failure, MeshFailure) for failure in failures)


@pytest.mark.parametrize("count", [10, 8_000_000])
def test_an_interruption_ends_what_all_wait_for(count: int) -> None:
    with meshes(3) as made:
        arrays = [np.zeros(count, np.float32) for _ in range(3)]
        with waiting(made, lambda rank: begin_sum(made[rank], arrays[rank]), [0, 1]) as calls:
            made[0].interrupt()
            assert "closed here" in str(calls[0].exception(WITHIN_S))
            assert "rank 0 has gone" in str(calls[1].exception(WITHIN_S))
        with pytest.raises(MeshFailure):
            begin_sum(made[0], arrays[0])


def test_one_that_dies_after_it_has_sent_its_part_is_missed_while_another_is_slow() -> None:
    sockets = sockets_of(3)
    made = [Mesh(rank, sockets[rank]) for rank in range(2)]
    dying = [socket.socket(fileno=descriptor) for descriptor in sockets[2][:2]]
    array = np.arange(4, dtype=np.float32)
    with waiting(made, lambda rank: begin_sum(made[rank], array), [0]) as calls:
        header = dying[0].recv(16, socket.MSG_WAITALL)
        dying[0].sendall(header + array.tobytes())
        assert dying[0].recv(16, socket.MSG_WAITALL) == array.tobytes()
        for end in dying:
            end.close()
        assert "rank 2 has gone" in str(calls[0].exception(WITHIN_S))
    for mesh in made:
        mesh.close()


def test_one_that_leaves_in_good_order_is_not_missed_and_one_that_is_interrupted_is() -> None:
    with meshes(3) as made:
        arrays = [np.ones(4, np.float32) for _ in range(3)]
        all_do(made, lambda rank: begin_sum(made[rank], arrays[rank]))
        made[2].close()
        assert made[1].gone() == -1
        made[0].interrupt()
        assert made[1].gone() == 0
        with pytest.raises(MeshFailure, match=r"rank [02] has"):
            done(begin_sum(made[1], arrays[1]))
