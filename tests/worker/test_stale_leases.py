"""A lease that is not this worker's any more is not drawn again, however it ended."""

from __future__ import annotations

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.activity import ActivityClock
from elasticdl.worker.allreduce.prefetchers import LocalLeases
from elasticdl.worker.tasks import HeldLease, TaskStream
from tests.worker.counting import Numbers


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


def stream(granted: LocalLeases) -> TaskStream:
    return TaskStream(granted, lambda kind: Numbers(), lambda held: None, 0, False, ActivityClock())


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
