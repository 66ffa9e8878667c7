"""A lease that is not this worker's any more is not drawn again, however it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticdl.activities import ActivityClock
from elasticdl.protocol import Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.prefetchers import LocalLeases
from elasticdl.worker.tasks import HeldLease, TaskStream
from elasticdl_client.errors import DataError
from tests.worker.counting import Numbers, lease


class OneAfterAnother(LocalLeases):
    """Grants what it is given, then says that there is no more."""

    def __init__(self, *leases: int) -> None:
        super().__init__()
        self._ids = list(leases)

    def request_lease(self) -> HeldLease | None:
        return self.leases.add(pb.Lease(id=self._ids.pop(0), type=pb.TRAINING)) if self._ids else None


class Overtaken(LocalLeases):
    """All is taken back, and given anew in another order, just when the first request has got its lease."""

    def request_lease(self) -> HeldLease | None:
        held = super().request_lease()
        if held is not None and held.id == 3:
            self.take_all_back()
            for lease in (1, 2, 3):
                self.give(self.leases.add(pb.Lease(id=lease, type=pb.TRAINING)))
        return held


class FirstIsLate(Numbers):
    """The first attempt to read takes until it is let go on; then one of the attempts fails."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.fails = fails
        self.num_begun = 0
        self.is_begun, self.may_end = threading.Event(), threading.Event()

    def read(self, shard: Shard) -> list[bytes]:
        self.num_begun += 1
        number = self.num_begun
        if number == 1:
            self.is_begun.set()
            assert self.may_end.wait(60)
        if self.fails(number):
            raise DataError(f"attempt {number}")
        return super().read(shard)


def stream(granted: LocalLeases, reader: Numbers | None = None) -> TaskStream:
    return TaskStream(granted, lambda kind: reader or Numbers(), lambda held: None, 0, False, ActivityClock())


def test_a_task_that_failed_while_its_input_was_made_is_not_made_again() -> None:
    granted = OneAfterAnother(1, 2)
    tasks = stream(granted)
    first = tasks.peek()
    assert first is not None
    granted.leases.remove(first.id)  # its end has been told; the stream's reader had not come to it
    second = tasks.peek()
    assert second is not None
    assert second.id == 2


def test_a_lease_that_is_taken_back_while_it_is_drawn_comes_in_its_new_place_alone() -> None:
    granted = Overtaken()
    tasks = stream(granted)
    granted.give(granted.leases.add(pb.Lease(id=3, type=pb.TRAINING)))
    overtaken = tasks.peek()
    assert overtaken is not None
    assert overtaken.revoked
    records = tasks.records(pb.TRAINING)
    assert [next(records).lease for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_discarded_pipeline_that_reads_late_leaves_what_its_successor_has_read(failing: int) -> None:
    granted, reader = LocalLeases(), FirstIsLate(lambda attempt: attempt == failing)
    tasks = stream(granted, reader)
    held = granted.leases.add(lease(0))
    granted.give(held)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(next, tasks.records(pb.TRAINING))
        assert reader.is_begun.wait(60)
        read = next(tasks.records(pb.TRAINING))
        reader.may_end.set()
        assert list(late.result(60).numbers) == ([] if failing == 1 else [0, 1, 2, 3])
    if failing == 1:
        held.check_read()
    else:
        with pytest.raises(DataError, match="attempt 2"):
            held.check_read()
    assert held.record_numbers == list(read.numbers)
