"""Minibatches that a thread makes ahead: in order, two at most, and begun anew when the model is another one."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import getgeneratorlocals
from typing import Any

import pytest

from elasticdl.activities import ActivityClock
from elasticdl.frameworks.framework import Batch
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.channels import MasterGone
from elasticdl.worker.allreduce.prefetchers import (
    BatchPrefetcher,
    Broke,
    Failed,
    InterruptibleLeases,
    Item,
    LeasePrefetcher,
    LocalLeases,
    Other,
    Over,
    Unreadable,
)
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.quarantine import Quarantine
from elasticdl.worker.tasks import HeldLease, TaskStream
from tests.worker.counting import Counting, Numbers, lease
from tests.worker.scripted_master import ScriptedMaster

LONG_S = 20.0


class Fed:
    """A feeder with all that it stands on, over a real socket."""

    def __init__(self, *leases: pb.Lease, ends: bool = True, quarantine: Quarantine | None = None) -> None:
        token = secrets.token_hex()  # a feeder that still asks when its test is over gets nothing of another master
        self.master = ScriptedMaster(*leases, ends=ends, token=token)
        link = MasterLink(self.master.address, token, 0, "pod", ActivityClock(), LONG_S)
        link.register()
        self.leases = link.leases
        self.framework = Counting()
        self.reader = Numbers()
        self.requests = requests = InterruptibleLeases(link)
        tasks = TaskStream(requests, lambda kind: self.reader, lambda held: None, 1, False, ActivityClock(), quarantine)
        framework: Any = self.framework
        self.feeder = BatchPrefetcher(tasks, requests, framework)

    def take(self) -> Item:
        item = self.feeder.take(LONG_S)
        assert item is not None
        return item

    def batches(self, count: int) -> list[tuple[int, int, list[int] | None]]:
        """Lease, number and records of the next ones; a task's end has none."""
        items = [self.take() for _ in range(count)]
        assert all(isinstance(item, Batch) for item in items), items
        return [(item.lease, item.n, item.data) for item in items]  # type: ignore[union-attr]


@pytest.fixture
def fed() -> Iterator[Any]:
    made: list[Fed] = []

    def make(*leases: pb.Lease, **others: Any) -> Fed:
        made.append(Fed(*leases, **others))
        return made[-1]

    yield make
    for one in made:
        one.master.stop()


def test_tasks_come_in_order_each_with_its_end_and_then_the_jobs(fed: Any) -> None:
    one = fed(lease(0), lease(1, length=3))
    one.feeder.start()
    assert one.batches(3) == [(1000, 0, [0, 1]), (1000, 1, [2, 3]), (1000, 2, None)]
    assert one.batches(3) == [(1001, 0, [100, 101]), (1001, 1, [102]), (1001, 2, None)]
    assert isinstance(one.take(), Over)


def test_no_more_than_two_are_made_ahead_and_one_is_in_the_making(fed: Any) -> None:
    one = fed(lease(0, length=100))
    one.feeder.start()
    for taken in range(1, 30):
        one.batches(1)
        assert len(one.framework.made) <= taken + 3


def test_no_thread_waits_for_a_lease_that_is_not_there(fed: Any) -> None:
    one = fed(ends=False)
    one.feeder.start()
    one.master.hears("RequestLease")
    assert one.feeder.take(0.0) is None


def test_a_task_of_another_kind_is_handed_over_and_waited_for(fed: Any) -> None:
    one = fed(lease(0, length=2), lease(1, task_type=pb.EVALUATION), lease(2, length=2))
    one.feeder.start()
    assert one.batches(2) == [(1000, 0, [0, 1]), (1000, 1, None)]
    other = one.take()
    assert isinstance(other, Other)
    assert other.held.id == 1001
    assert one.feeder.take(0.0) is None
    assert len(one.master.leases) == 1  # the next one was not asked for
    one.feeder.resume()
    assert one.batches(2) == [(1002, 0, [200, 201]), (1002, 1, None)]


def test_user_code_that_raises_is_reported_and_the_next_task_continues(fed: Any) -> None:
    one = fed(lease(0), lease(1, length=2))
    one.framework.bad = {2}
    one.feeder.start()
    assert one.batches(1) == [(1000, 0, [0, 1])]
    failed = one.take()
    assert isinstance(failed, Failed)
    assert (failed.error.lease, failed.error.n, str(failed.error)) == (
        1000,
        1,
        "ValueError: ugly 2 (record 2 of s: '2').",
    )
    assert one.feeder.take(0.0) is None
    one.feeder.resume()
    assert one.batches(2) == [(1001, 0, [100, 101]), (1001, 1, None)]


def test_records_that_cannot_be_read_are_reported_with_their_lease(fed: Any) -> None:
    one = fed(lease(0), lease(1, length=2))
    one.reader.torn = {0}
    one.feeder.start()
    unreadable = one.take()
    assert isinstance(unreadable, Unreadable)
    assert unreadable.held.id == 1000
    assert "records from 0 on are torn" in str(unreadable.error)
    assert one.batches(1) == [(1001, 0, [100, 101])]


def test_bad_records_are_numbered_before_any_minibatch_of_their_task_is_given(fed: Any) -> None:
    one = fed(lease(0), lease(1, length=8), lease(2, length=2), quarantine=Quarantine(limit=5))
    one.framework.bad = {103, 106}
    one.feeder.start()
    assert one.batches(3)[-1] == (1000, 2, None)
    failed = one.take()
    assert isinstance(failed, Failed)
    assert failed.error.bad_records == (103, 106)
    one.feeder.resume()
    assert one.batches(1) == [(1002, 0, [200, 201])]


def test_begun_anew_everything_taken_is_given_again(fed: Any) -> None:
    one = fed(lease(0), lease(1), lease(2))
    one.feeder.start()
    assert one.batches(4)[-1] == (1001, 0, [100, 101])
    one.feeder.restart(one.leases.held)
    assert one.batches(3) == [(1000, 0, [0, 1]), (1000, 1, [2, 3]), (1000, 2, None)]
    assert one.batches(3) == [(1001, 0, [100, 101]), (1001, 1, [102, 103]), (1001, 2, None)]


def test_begun_anew_a_task_that_had_failed_meanwhile_is_given_again(fed: Any) -> None:
    one = fed(lease(0, length=2))
    one.framework.bad = {1}
    one.feeder.start()
    with one.feeder._changed:  # until its failure is there, which nothing takes
        assert one.feeder._changed.wait_for(lambda: one.feeder._items, LONG_S)
    one.feeder.restart(one.leases.held)
    failed = one.take()
    assert isinstance(failed, Failed)
    assert failed.error.lease == 1000


def test_after_a_restart_an_untaken_task_of_another_kind_is_handed_over_again(fed: Any) -> None:
    one = fed(lease(0, length=2), lease(1, task_type=pb.EVALUATION))
    one.feeder.start()
    assert one.batches(1) == [(1000, 0, [0, 1])]
    one.master.grants_all()
    one.feeder.restart(lambda: [one.leases.get(1000)])
    assert one.batches(2) == [(1000, 0, [0, 1]), (1000, 1, None)]
    other = one.take()
    assert isinstance(other, Other)
    assert other.held.id == 1001
    one.feeder.restart(list)  # this time it was taken
    one.leases.remove(1001)
    assert isinstance(one.take(), Over)


def test_begun_anew_it_does_not_wait_for_what_it_waits_for(fed: Any) -> None:
    one = fed(lease(0, length=2), ends=False)
    one.feeder.start()
    assert one.batches(2) == [(1000, 0, [0, 1]), (1000, 1, None)]
    one.master.hears("RequestLease", times=2)
    one.feeder.restart(lambda: [one.leases.get(1000)])
    assert one.batches(2) == [(1000, 0, [0, 1]), (1000, 1, None)]


class Quick(LocalLeases):
    """The interrupting thread sees the request end at once, and the prefetcher come to its new beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.cleared = threading.Event()

    def interrupt(self) -> None:
        super().interrupt()
        assert self.cleared.wait(LONG_S)

    def clear(self) -> None:
        super().clear()
        self.cleared.set()


def test_begun_anew_it_does_not_wait_for_a_thread_that_was_quicker() -> None:
    requests = Quick()
    tasks = TaskStream(requests, lambda kind: Numbers(), lambda held: None, 1, False, ActivityClock())
    framework: Any = Counting()
    feeder = BatchPrefetcher(tasks, requests, framework)
    feeder.start()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(feeder.restart, tuple).result(LONG_S)
    requests.give(requests.leases.add(lease(0)))
    assert isinstance(feeder.take(LONG_S), Batch)


class Unhurried(TaskStream):
    """A taker has dealt with its item before the prefetcher gets to its pause."""

    def __init__(self, requests: LocalLeases) -> None:
        super().__init__(requests, lambda kind: Numbers(), lambda held: None, 1, False, ActivityClock())
        self.may_close = threading.Event()

    def close(self, held: HeldLease) -> None:
        assert self.may_close.wait(LONG_S)
        super().close(held)


def test_resumed_before_its_pause_has_begun_it_does_not_pause() -> None:
    requests = LocalLeases()
    tasks = Unhurried(requests)
    framework: Any = Counting()
    feeder = BatchPrefetcher(tasks, requests, framework)
    feeder.start()
    for granted in (lease(0, task_type=pb.EVALUATION), lease(1)):
        requests.give(requests.leases.add(granted))
    assert isinstance(feeder.take(LONG_S), Other)
    feeder.resume()
    tasks.may_close.set()
    assert isinstance(feeder.take(LONG_S), Batch)


def test_a_lease_that_was_taken_back_is_not_given_again(fed: Any) -> None:
    one = fed(lease(0), lease(1, length=2))
    one.feeder.start()
    assert one.batches(1) == [(1000, 0, [0, 1])]
    one.leases.revoke([1000])
    one.feeder.restart(list)
    assert one.batches(2) == [(1001, 0, [100, 101]), (1001, 1, None)]


def test_a_mistake_of_ours_is_raised_in_the_taker(fed: Any) -> None:
    one = fed(lease(0))
    one.framework.breaks_at = 2
    one.feeder.start()
    assert one.batches(1) == [(1000, 0, [0, 1])]
    broke = one.take()
    assert isinstance(broke, Broke)
    assert isinstance(broke.error, AssertionError)
    one.feeder.restart(list)  # its thread is no more: no thread waits for it


def test_a_mistake_of_ours_that_was_not_taken_outlives_a_restart(fed: Any) -> None:
    one = fed(lease(0))
    one.framework.breaks_at = 0
    one.feeder.start()
    one.feeder._thread.join(LONG_S)
    one.feeder.restart(list)
    assert isinstance(one.take(), Broke)


def test_a_lease_that_is_drawn_ahead_is_held_at_once(fed: Any) -> None:
    """So heartbeats renew it, however long it is before it is taken."""
    one = fed(lease(0))
    drawer = LeasePrefetcher(one.requests)
    drawer.start()
    assert drawer.take(LONG_S)[:1] == one.leases.held()  # the job's end may have come, too
    assert [held.id for held in one.leases.held()] == [1000]


def test_a_reader_sees_why_nothing_comes_any_more() -> None:
    class Gone:
        def request_lease(self) -> HeldLease | None:
            raise MasterGone("127.0.0.1:1", 20.0)

    requests: Any = Gone()
    drawer = LeasePrefetcher(requests)
    drawer.start()
    for _ in range(2):
        with pytest.raises(MasterGone):
            drawer.take(LONG_S)


def test_the_records_of_a_stream_remember_open_leases_alone(fed: Any) -> None:
    one = fed(*(lease(k) for k in range(50)))
    tasks = TaskStream(one.requests, lambda kind: one.reader, lambda held: None, 1, False, ActivityClock())
    records = tasks.records(pb.TRAINING)
    for task in records:
        assert getgeneratorlocals(records)["seen"] == {task.lease}
        held = one.leases.get(task.lease)
        assert held is not None
        tasks.close(held)
