"""Asynchronous training on parameter servers: the pipeline, stale gradients, local updates, what is not finite."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from elasticdl.frameworks.framework import Batch
from elasticdl.ps.client import IdsOutOfRange, Pull, Push
from elasticdl.ps.server.synchronous import UpdateSettings
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.tasks import LeaseLost, NotFinite
from tests.ps.masters import OnePsMaster, serving, start_ps
from tests.ps.scenes import TOKEN as PS_TOKEN
from tests.worker.ps_job import NUM_NAMES, NUM_TRAINABLE, PsJob, Worker, name_of, ps_job

pytestmark = pytest.mark.timeout(120)


def push_of(task: int, minibatch: int, lease: int, version: int = 10**9) -> Push:
    """Return the push of another worker."""
    change = np.zeros(NUM_NAMES, np.float32)
    change[name_of(task, minibatch)] = 1.0
    row = np.array([name_of(task, minibatch)], np.int64), np.full((1, 1), -1.0, np.float32)
    gradient = np.ones(NUM_TRAINABLE, np.float32)
    return Push(lease, 0, task, minibatch, gradient, change, {"rows": row}, [version, version])


def check_exactly_once(job: PsJob, names: set[int]) -> None:
    weights, counts, rows = job.values()
    expected = np.array([float(name in names) for name in range(NUM_NAMES)])
    np.testing.assert_allclose(counts, expected)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    np.testing.assert_allclose(weights, np.full(NUM_TRAINABLE, -float(len(names))))
    assert job.applied() == [names] * job.num_ps


@pytest.mark.parametrize("num_ps", [1, 2])
def test_every_minibatch_is_in_the_model_once_and_misses_one_update_of_its_own(num_ps: int) -> None:
    with ps_job(num_ps) as job:
        worker = Worker(job)
        for task, lease in ((0, 1), (1, 2)):
            worker.train(worker.hold(task, lease), 5)
        assert worker.committed == [(task, n, 0.5) for task in (0, 1) for n in range(5)]
        assert worker.computed() == [0, 1, 2, 3, 4] * 2
        assert [int(seen.sum()) for _, _, _, seen in worker.framework.computed] == [0, 0, 1, 2, 3, 5, 5, 6, 7, 8]
        check_exactly_once(job, {name_of(task, n) for task in (0, 1) for n in range(5)})


def test_what_is_pushed_is_committed_when_the_worker_leaves() -> None:
    with ps_job(2) as job:
        worker = Worker(job)

        def leave(batch: Batch) -> None:
            worker.is_leaving = batch.n == 2

        worker.framework.before = leave
        worker.train(worker.hold(0, 1), 8)
        assert [n for _, n, _ in worker.committed] == [0, 1, 2]
        check_exactly_once(job, {name_of(0, n) for n in range(3)})


def test_a_failure_of_the_users_model_leaves_what_was_pushed_before_committed() -> None:
    with ps_job(2) as job:
        worker = Worker(job)

        def fail(batch: Batch) -> None:
            if batch.n == 3:
                raise ZeroDivisionError

        worker.framework.before = fail
        with pytest.raises(ZeroDivisionError):
            worker.train(worker.hold(0, 1), 8)
        assert [n for _, n, _ in worker.committed] == [0, 1, 2]
        check_exactly_once(job, {name_of(0, n) for n in range(3)})


def test_a_gradient_that_is_too_stale_is_computed_again_with_the_same_seed() -> None:
    with ps_job(2, UpdateSettings(max_staleness=2)) as job:
        worker, other = Worker(job), job.client()
        overtaken: list[int] = []

        def overtake(batch: Batch) -> None:
            if batch.n == 2 and not overtaken:
                overtaken.extend(range(4))
                for n in overtaken:
                    other.exchange(push_of(1, n, lease=9), None)

        worker.framework.before = overtake
        worker.train(worker.hold(0, 1), 5)
        other.close()
        assert [n for _, n, _ in worker.committed] == [0, 1, 2, 3, 4]
        computed = worker.computed()
        assert computed.count(2) == 2
        assert len({seed for _, n, seed, _ in worker.framework.computed if n == 2}) == 1
        last = [seen for _, n, _, seen in worker.framework.computed if n == 2][-1]
        assert last[name_of(1, 3)] == 1
        check_exactly_once(job, {*range(5), *(name_of(1, n) for n in range(4))})


def test_between_dense_pulls_a_worker_continues_with_its_own_updates() -> None:
    with ps_job(2) as job:
        worker, other = Worker(job, get_model_steps=4), job.client()

        def disturb(batch: Batch) -> None:
            if batch.n == 1:
                other.exchange(push_of(1, 0, lease=9), None)

        worker.framework.before = disturb
        worker.train(worker.hold(0, 1), 8)
        other.close()
        # Pulled for 0 and 4; the pull for 4 leaves out the update of 3, as every pull of a pipeline does.
        assert worker.framework.weights == [0, -1, -2, -3, -4, -5, -6, -7]
        seen = [seen[name_of(1, 0)] for _, _, _, seen in worker.framework.computed]
        assert seen == [0, 0, 0, 0, 1, 1, 1, 1]
        check_exactly_once(job, {*range(8), name_of(1, 0)})


def test_dense_values_may_last_longer_than_a_task() -> None:
    with ps_job(1) as job:
        worker = Worker(job, get_model_steps=6)
        for task in range(3):
            worker.train(worker.hold(task, task + 1), 4)
        version = job.services[0].state.applied()[2]
        assert version == 12
        # The pull for the seventh minibatch, the third of the second task, leaves out the sixth.
        assert worker.framework.weights == [0, -1, -2, -3, -4, -5, -5, -6, -7, -8, -9, -10]


def test_the_users_learning_rate_goes_with_the_push() -> None:
    with ps_job(2) as job:
        worker = Worker(job)
        worker.framework.rates = {1: 0.25}
        worker.train(worker.hold(0, 1), 2)
        worker.train(worker.hold(1, 2, epoch=1), 2)
        np.testing.assert_allclose(job.values()[0], np.full(NUM_TRAINABLE, -2.5))


@pytest.mark.parametrize("use_async", [True, False])
def test_what_is_not_finite_never_reaches_the_servers(use_async: bool) -> None:
    with ps_job(2, UpdateSettings(use_async=use_async)) as job:
        worker = Worker(job)
        worker.framework.losses = {2: math.nan}
        with pytest.raises(NotFinite, match="The loss is nan") as raised:
            worker.train(worker.hold(0, 1), 4)
        assert raised.value.minibatch == 2
        check_exactly_once(job, {0, 1})


@pytest.mark.parametrize("use_async", [True, False])
def test_a_skipped_minibatch_leaves_its_name_alone_and_is_reported_before(use_async: bool) -> None:
    with ps_job(2, UpdateSettings(use_async=use_async)) as job:
        worker = Worker(job, skips=True)
        worker.framework.not_finite = {2: "the gradient of kernel"}
        applied_when_told: list[set[int]] = []
        job.master.on_call = lambda method: applied_when_told.append(job.applied()[0])
        worker.train(worker.hold(0, 1), 4)
        (report,) = job.master.hears("progress")
        assert (list(report.skipped), list(report.committed)) == ([2], [])
        assert report.not_finite == "the gradient of kernel"
        assert [2 in applied for applied in applied_when_told] == [False]
        assert worker.committed == [(0, 0, 0.5), (0, 1, 0.5), (0, 2, None), (0, 3, 0.5)]
        weights, counts, _ = job.values()
        assert job.applied() == [{0, 1, 2, 3}] * 2
        np.testing.assert_allclose(counts[:4], [1, 1, 0, 1])
        np.testing.assert_allclose(weights, np.full(NUM_TRAINABLE, -3.0))


def test_a_skip_that_the_master_refuses_is_not_pushed() -> None:
    with ps_job(1) as job:
        worker = Worker(job, skips=True)
        worker.framework.losses = {1: math.inf}
        job.master.accepts = False
        with pytest.raises(LeaseLost):
            worker.train(worker.hold(0, 1), 4)
        assert job.applied() == [{0}]


def test_ids_out_of_range_fail_the_task_by_the_layers_name() -> None:
    with ps_job(1) as job:
        worker = Worker(job)
        lookups = worker.session.on_ps(worker.hold(0, 1), lambda ps: ps._lookups)
        lookups._input_dims["rows"] = 3
        with pytest.raises(IdsOutOfRange, match=r"'rows' .* \[0, 3\), its input_dim: 3$"):
            worker.train(worker.hold(0, 1), 8)
        assert [n for _, n, _ in worker.committed] == [0]


@pytest.mark.parametrize("ps_id", [0, 1])
def test_a_ps_in_restart_is_waited_for(ps_id: int) -> None:
    with ps_job(2) as job:
        worker = Worker(job)

        def restart(batch: Batch) -> None:
            if batch.n == 2:
                job.restart(ps_id)
                threading.Timer(0.2, job.announce).start()

        worker.framework.before = restart
        worker.train(worker.hold(0, 1), 6)
        assert [n for _, n, _ in worker.committed] == list(range(6))
        check_exactly_once(job, set(range(6)))


def test_a_newer_partition_is_learned_from_a_refusal() -> None:
    with ps_job(2) as job:
        worker = Worker(job)
        worker.train(worker.hold(0, 1), 2)
        job.workers.clear()  # the master's heartbeat does not reach it
        job.announce()
        worker.train(worker.hold(1, 2), 2)
        assert worker.link.partition().version == job.partition.version == 2
        worker.strategy.close()
        check_exactly_once(job, {0, 1, name_of(1, 0), name_of(1, 1)})


def test_a_lost_lease_ends_the_waiting_for_a_ps() -> None:
    with ps_job(2) as job:
        worker = Worker(job)
        held = worker.hold(0, 1)

        def lose(batch: Batch) -> None:
            if batch.n == 2:
                job.servers[1].stop(None).wait()
                threading.Timer(0.2, lambda: worker.link.leases.revoke([1])).start()

        worker.framework.before = lose
        with pytest.raises(LeaseLost):
            worker.train(held, 6)


class Said(logging.Handler):
    """Hears of a line of a module's log."""

    def __init__(self, logger: str, text: str) -> None:
        super().__init__()
        self.event = threading.Event()
        self._logger = logging.getLogger(logger)
        self._text = text

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.event.set()

    def __enter__(self) -> threading.Event:
        self._logger.addHandler(self)
        return self.event

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


def test_a_stopped_ps_gets_its_push_again_when_it_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    master = OnePsMaster()
    with serving(master) as port, ps_job(1) as job:
        process = start_ps(port, tmp_path)
        try:
            master.wait(lambda: master.readies)
            job.partition.CopyFrom(master.partition())
            job.partition.version = 50
            worker = Worker(job, timeout_s=0.5, token=PS_TOKEN)
            held = worker.hold(0, 1)
            worker.train(held, 2)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # some of its threads may have gone on
            with ThreadPoolExecutor(1) as threads, Said("elasticdl.worker", "Waiting for PS 0") as said:
                waiting = threads.submit(worker.session.exchange, held, push_of(0, 2, 1), None)
                assert said.wait(30)
                process.send_signal(signal.SIGCONT)
                waiting.result(timeout=30)
            check = worker.session.on_ps(held, lambda ps: ps.standing(1, 0, 0))
            assert check == {0, 1, 2}
            pulled = worker.session.exchange(held, None, Pull(dense=True))
            assert pulled.parameters is not None
            np.testing.assert_allclose(pulled.parameters.non_trainable[:4], [1, 1, 1, 0])
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_exported_tables_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticdl.worker.ps.strategy._EXPORT_BYTES", 12)
    with ps_job(2) as job:
        worker = Worker(job)
        held = worker.hold(0, 1)
        worker.train(held, 8)
        (table,) = worker.strategy.tables(worker.link.leases.add(pb.Lease(id=2, type=pb.TRAIN_END)))
        chunks = list(table.chunks)
        assert (table.name, table.num_rows) == ("rows", 8)
        assert [ids.tolist() for ids, _ in chunks] == [[0, 1, 2], [3, 4, 5], [6, 7]]
        np.testing.assert_allclose(np.concatenate([rows for _, rows in chunks])[:, 0], np.ones(8), rtol=1e-6)
