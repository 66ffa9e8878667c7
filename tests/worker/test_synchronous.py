"""Synchronous training: rounds of several workers, late gradients, servers and workers lost in a round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from elasticdl.frameworks.framework import Batch
from elasticdl.ps.server.service import PsService
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.server.synchronous import UpdateSettings
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.tasks import LeaseLost
from tests.worker.ps_job import NUM_TRAINABLE, PsJob, Worker, name_of, ps_job

pytestmark = pytest.mark.timeout(120)


def rounds_of(number: int, tolerance: int = 0) -> UpdateSettings:
    return UpdateSettings(use_async=False, grads_to_wait=number, sync_version_tolerance=tolerance)


class Hooked(PsService):
    """A PS that lets a test act at the moment when a round is asked for."""

    def __init__(self, ps_id: int, state: ServerState) -> None:
        super().__init__(ps_id, state)
        self.before_closing: Callable[[pb.CloseRoundRequest], None] = lambda request: None
        self.after_closing: Callable[[pb.CloseRoundReply], None] = lambda reply: None

    def close_round(self, request: pb.CloseRoundRequest) -> pb.CloseRoundReply:
        self.before_closing(request)
        reply = super().close_round(request)
        self.after_closing(reply)
        return reply


def together(*works: Callable[[], None]) -> list[Future[None]]:
    """Runs in a thread each, to their ends."""
    with ThreadPoolExecutor(len(works)) as threads:
        return [threads.submit(work) for work in works]


def work(worker: Worker, task: int, lease: int, num_minibatches: int) -> Callable[[], None]:
    held = worker.hold(task, lease)
    return lambda: worker.train(held, num_minibatches)


def check_all_applied(job: PsJob, names: set[int]) -> None:
    assert job.applied() == [names] * job.num_ps


@pytest.mark.parametrize("num_ps", [1, 2])
def test_one_worker_sees_all_its_own_updates(num_ps: int) -> None:
    with ps_job(num_ps, rounds_of(1)) as job:
        job.set_pushing(1)
        worker = Worker(job)
        for task in (0, 1):
            worker.train(worker.hold(task, task + 1), 4)
        assert worker.framework.weights == [-float(n) for n in range(8)]
        assert worker.committed == [(task, n, 0.5) for task in (0, 1) for n in range(4)]
        check_all_applied(job, {name_of(task, n) for task in (0, 1) for n in range(4)})


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_make_rounds_of_the_mean_of_their_gradients(num_workers: int) -> None:
    with ps_job(2, rounds_of(num_workers)) as job:
        job.set_pushing(num_workers)
        workers = [Worker(job) for _ in range(num_workers)]
        for done in together(*(work(worker, task, task + 1, 5) for task, worker in enumerate(workers))):
            done.result()
        weights, counts, rows = job.values()
        np.testing.assert_allclose(weights, np.full(NUM_TRAINABLE, -5.0), rtol=1e-6)
        names = {name_of(task, n) for task in range(num_workers) for n in range(5)}
        expected = [1 / num_workers if name in names else 0.0 for name in range(len(counts))]
        np.testing.assert_allclose(counts, expected, rtol=1e-5)
        np.testing.assert_allclose(rows, expected, rtol=1e-5)
        check_all_applied(job, names)
        for worker in workers:
            assert [n for _, n, _ in worker.committed] == worker.computed() == [0, 1, 2, 3, 4]
            np.testing.assert_allclose(worker.framework.weights, [0, -1, -2, -3, -4], rtol=1e-6)


def test_a_round_does_not_wait_for_more_workers_than_there_are() -> None:
    with ps_job(2, rounds_of(8)) as job:
        job.set_pushing(1)
        worker = Worker(job)
        worker.train(worker.hold(0, 1), 3)
        check_all_applied(job, {0, 1, 2})


def train_overtaken(worker: Worker, other: Worker) -> None:
    """While one computes the second of three minibatches, the other closes a round."""

    def overtake(batch: Batch) -> None:
        if batch.n == 1 and not other.committed:
            other.train(other.hold(1, 2), 1)

    worker.framework.before = overtake
    worker.train(worker.hold(0, 1), 3)


def test_a_late_gradient_is_refused_and_computed_again() -> None:
    with ps_job(2, rounds_of(1)) as job:
        worker, other = Worker(job), Worker(job)
        train_overtaken(worker, other)
        assert worker.computed() == [0, 1, 1, 2]
        assert [seen[name_of(1, 0)] for _, _, _, seen in worker.framework.computed] == [0, 0, 1, 1]
        assert len({seed for _, n, seed, _ in worker.framework.computed if n == 1}) == 1
        assert [n for _, n, _ in worker.committed] == [0, 1, 2]
        check_all_applied(job, {0, 1, 2, name_of(1, 0)})
        np.testing.assert_allclose(job.values()[0], np.full(NUM_TRAINABLE, -4.0))


def test_a_tolerated_late_gradient_is_taken() -> None:
    with ps_job(2, rounds_of(1, tolerance=1)) as job:
        worker, other = Worker(job), Worker(job)
        train_overtaken(worker, other)
        assert worker.computed() == [0, 1, 2]
        check_all_applied(job, {0, 1, 2, name_of(1, 0)})


def test_a_worker_that_leaves_in_the_middle_of_a_round_blocks_no_other() -> None:
    with ps_job(2, rounds_of(2)) as job:
        job.set_pushing(2)
        staying, leaving = Worker(job), Worker(job)

        def leave(batch: Batch) -> None:
            if batch.n == 2:
                leaving.link.leases.revoke([2])

        leaving.framework.before = leave
        leaves, stays = work(leaving, 1, 2, 6), work(staying, 0, 1, 6)

        def leave_and_tell() -> None:
            with pytest.raises(LeaseLost):
                leaves()
            job.set_pushing(1)

        for done in together(stays, leave_and_tell):
            done.result()
        assert [n for _, n, _ in staying.committed] == list(range(6))
        assert [n for _, n, _ in leaving.committed] == [0, 1]
        check_all_applied(job, {*range(6), name_of(1, 0), name_of(1, 1)})
        successor = Worker(job)
        successor.train(successor.hold(1, 3), 6)
        assert successor.computed() == [2, 3, 4, 5]
        check_all_applied(job, {*range(6), *(name_of(1, n) for n in range(6))})


def test_a_lease_that_is_revoked_ends_the_waiting_for_a_round() -> None:
    with ps_job(2, rounds_of(2)) as job:
        job.set_pushing(2)
        worker = Worker(job)
        with ThreadPoolExecutor(1) as threads:
            working = threads.submit(work(worker, 0, 1, 3))
            _wait_until(lambda: job.services[0].is_master_awaited)
            worker.link.leases.revoke([1])
            with pytest.raises(LeaseLost):
                working.result(timeout=30)
        assert worker.committed == []
        check_all_applied(job, set())


@pytest.mark.parametrize("ps_id", [0, 1])
@pytest.mark.parametrize("closed", [False, True])
def test_a_ps_that_dies_in_the_middle_of_a_round_gets_it_again(ps_id: int, closed: bool) -> None:
    with ps_job(2, rounds_of(1), Hooked) as job:
        job.set_pushing(1)
        worker = Worker(job)
        died: list[int] = []

        def die() -> None:
            died.append(ps_id)
            threading.Thread(target=restart).start()

        def restart() -> None:
            job.restart(ps_id)
            job.announce()
            job.set_pushing(1)

        coordinator = job.services[0]
        assert isinstance(coordinator, Hooked)
        if closed:
            coordinator.after_closing = lambda reply: die() if len(worker.committed) == 2 and not died else None
        else:
            coordinator.before_closing = lambda request: die() if request.name.n == 2 and not died else None
        worker.train(worker.hold(0, 1), 5)
        assert died == [ps_id]
        assert [n for _, n, _ in worker.committed] == list(range(5))
        check_all_applied(job, set(range(5)))
        weights, counts, rows = job.values()
        np.testing.assert_allclose(weights, np.full(NUM_TRAINABLE, -5.0))
        np.testing.assert_allclose(counts[:5], np.ones(5))
        np.testing.assert_allclose(rows[:5], np.ones(5), rtol=1e-6)


@pytest.mark.parametrize("ps_id", [0, 1])
def test_two_workers_go_on_when_a_ps_dies_while_they_wait(ps_id: int) -> None:
    with ps_job(2, rounds_of(2)) as job:
        job.set_pushing(2)
        one, other = Worker(job), Worker(job)
        may_push = threading.Event()

        def wait_for_the_death(batch: Batch) -> None:
            if batch.n == 2:
                assert may_push.wait(30)

        other.framework.before = wait_for_the_death

        def kill() -> None:
            _wait_until(lambda: len(one.committed) == 2 and job.services[0].is_master_awaited)
            job.restart(ps_id)
            job.announce()
            job.set_pushing(2)
            may_push.set()

        for done in together(work(one, 0, 1, 5), work(other, 1, 2, 5), kill):
            done.result()
        for worker in (one, other):
            assert [n for _, n, _ in worker.committed] == list(range(5))
        check_all_applied(job, {name_of(task, n) for task in (0, 1) for n in range(5)})
        np.testing.assert_allclose(job.values()[0], np.full(NUM_TRAINABLE, -5.0), rtol=1e-6)


def test_what_is_pushed_is_committed_when_the_worker_leaves() -> None:
    with ps_job(2, rounds_of(1)) as job:
        worker = Worker(job)

        def leave(batch: Batch) -> None:
            worker.is_leaving = batch.n == 1

        worker.framework.before = leave
        worker.train(worker.hold(0, 1), 8)
        assert [n for _, n, _ in worker.committed] == [0, 1]
        check_all_applied(job, {0, 1})


def _wait_until(happened: Callable[[], bool]) -> None:
    for _ in range(3000):
        if happened():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")
