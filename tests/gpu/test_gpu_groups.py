"""Groups of members that compute on one GPU: each with NCCL, or by way of main memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from elasticdl.collective import GroupLost
from tests.collective import verbs
from tests.collective.members import Member, Told, all_do, ending, form, until
from tests.gpu import gpu_verbs

pytestmark = pytest.mark.gpu

SIZES = [1, 1000, 3_000_001]
OF_USERS = {"TORCH_NCCL_BLOCKING_WAIT": "1"}  # as scripts with a group of PyTorch's own set it
OWN, SHARED, MIXED = "a GPU for each", "one GPU for all", "one member on the CPU"


@contextmanager
def made(kind: str, count: int) -> Iterator[list[Member]]:
    devices = ["cpu" if kind == MIXED and number == 1 else "cuda:0" for number in range(count)]
    hosts = [OF_USERS | ({"NCCL_HOSTID": f"host {number}"} if kind == OWN else {}) for number in range(count)]
    with ending([Member(k, device, host) for k, (device, host) in enumerate(zip(devices, hosts, strict=True))]) as all_:
        yield all_


def expected(count: int) -> list[NDArray[np.float32]]:
    return [sum(verbs.pattern(size, rank) for rank in range(count)) for size in SIZES]  # type: ignore[misc]


def summed(group: list[Member]) -> list[list[NDArray[np.float32]]]:
    told = [member.tell(gpu_verbs.summed, rank, SIZES) for rank, member in enumerate(group)]
    return [one.result() for one in told]


def is_right(group: list[Member]) -> bool:
    right = expected(len(group))
    return all(np.array_equal(a, b) for sums in summed(group) for a, b in zip(sums, right, strict=True))


@pytest.mark.parametrize(("kind", "engine"), [(OWN, "NCCL"), (SHARED, "main memory"), (MIXED, "native mesh")])
def test_sums_are_exact_also_after_a_member_is_killed(kind: str, engine: str) -> None:
    with made(kind, 3) as three:
        form(three, 1)
        assert all(engine in told for told in all_do(three, verbs.engine))
        assert is_right(three)
        told = [member.tell(gpu_verbs.wrong_sums_until_lost, rank, 3) for rank, member in enumerate(three)]
        until(lambda: all(member.meanwhile(gpu_verbs.num_sums) > 2 for member in three))
        three[2].kill()
        for one in told[:2]:
            assert one.result() == 0  # no sum that is none was taken for one
        form(three[:2], 2)
        assert is_right(three[:2])


def test_a_sum_that_is_abandoned_is_an_error_though_the_gpu_comes_to_its_end() -> None:
    with made(OWN, 2) as two:
        form(two, 1)
        assert is_right(two)
        waiting: Told = two[0].tell(gpu_verbs.summed, 0, SIZES)
        until(lambda: two[0].meanwhile(verbs.waiting_seconds) > 0.3)
        two[0].meanwhile(verbs.abandon, "it takes too long")
        assert isinstance(waiting.error(), GroupLost)
        form(two, 2)
        assert is_right(two)


def test_bytes_and_arrays_of_main_memory_go_beside_them() -> None:
    with made(OWN, 2) as two:
        form(two, 1)
        assert all_do(two, verbs.gathered, 7) == [[[7], [7]]] * 2
        told = [member.tell(verbs.give_state, rank, 1) for rank, member in enumerate(two)]
        assert all(one.result() for one in told)
