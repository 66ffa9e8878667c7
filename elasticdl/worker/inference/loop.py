"""The loop of a job that trains nothing: take a lease, work it off, say so, until the job is over.

A `PassWork` processes the minibatches of a task.  An error of user code fails its task, never the worker.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Protocol

import grpc

from elasticdl.frameworks.framework import FeedError, Inference, Mode
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.resource_use import keep_large_buffers
from elasticdl.storage.paths import path_of
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.inference.output_parts import confirmed_file
from elasticdl.worker.input.batches import LeaseLost, TaskBatches
from elasticdl.worker.input.quarantine import Quarantine, inspected
from elasticdl.worker.input.task_stream import TaskStream
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.strategy import Values
from elasticdl.worker.task_reporting import as_json, evaluate_task, merged_results, said_of
from elasticdl_client.errors import DataError, JobError

_log = logging.getLogger("elasticdl.worker")
_MODES = {pb.EVALUATION: Mode.EVALUATION, pb.PREDICTION: Mode.PREDICTION}


class PassWork(Protocol):
    """The work on each task, and at the end."""

    def run(self, held: HeldLease, values: Values, batches: TaskBatches, check: Callable[[], None]) -> None:
        """Works a task off and tells the master.

        Args:
            check: called when all minibatches are taken and before anything is final; raises if records are missing.
        """
        ...

    def end(self, held: HeldLease) -> None:
        """The last task of the job, or in an evaluation the one that computes the numbers."""
        ...


class EvaluationWork:
    """See `PassWork`."""

    def __init__(self, link: MasterLink, model: Inference, metrics_output: str, clock: ActivityClock) -> None:
        self._link = link
        self._model = model
        self._output = metrics_output
        self._clock = clock

    def run(self, held: HeldLease, values: Values, batches: TaskBatches, check: Callable[[], None]) -> None:
        with self._clock.during(Activity.EVALUATE):
            states = evaluate_task(self._model, values, held, batches)
        check()
        self._link.report_evaluation(held.id, states, {}, batches.surplus)

    def end(self, held: HeldLease) -> None:
        with self._clock.during(Activity.EVALUATE):
            results = merged_results(self._model, held.lease.merged)
        if self._output:
            with confirmed_file(held, path_of(self._output), self._link.confirm) as path:
                path.write_text(as_json(held.lease.model_version, results))
        self._link.report_evaluation(held.id, [], results)


class OnePassLoop:
    """Everything a worker of such a job does between its registration and its end."""

    def __init__(
        self,
        link: MasterLink,
        tasks: TaskStream,
        model: Inference,
        values: Callable[[HeldLease], Values],
        work: PassWork,
        quarantine: Quarantine,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            values: of the model, for a task.
            close: called at the end.
        """
        self._link, self._clock = link, link.clock
        self._tasks = tasks
        self._model = model
        self._values = values
        self._work = work
        self._quarantine = quarantine
        self._close = close

    def run(self) -> None:
        """Returns when the master says that the job is over."""
        self._clock.switch(Activity.COMPUTE)
        while (held := self._next()) is not None:
            if held.lease.type == pb.TRAIN_END or held.lease.merged:
                self._guarded(held, partial(self._end, held))
            else:
                self._work_off(held.lease.type)
        self._close()

    def leave(self, is_idle: bool) -> None:
        """After SIGTERM, in another thread: held tasks go to others at once."""
        self._link.say_farewell()

    def _next(self) -> HeldLease | None:
        with self._clock.during(Activity.IDLE):
            return self._tasks.peek()

    def _end(self, held: HeldLease) -> None:
        self._work.end(held)
        if held.lease.type == pb.TRAIN_END:
            self._link.finish(held.id, 0)

    def _work_off(self, task_type: pb.TaskType) -> None:
        """Consecutive tasks through one run of the input pipeline."""
        batches = inspected(self._model, _MODES[task_type], self._tasks.records(task_type), self._quarantine)
        try:
            for held, taken in TaskBatches.by_task(batches, self._link.leases, self._clock):
                keep_large_buffers()  # once more: TensorFlow tunes malloc when its pipeline gives the first minibatch
                self._guarded(held, partial(self._run, held, taken))
        except FeedError as error:
            self._feed_failed(error)

    def _run(self, held: HeldLease, batches: TaskBatches) -> None:
        with self._clock.during(Activity.EVALUATE):
            values = self._values(held)
        self._work.run(held, values, batches, lambda: self._check_read(held))

    def _check_read(self, held: HeldLease) -> None:
        error = self._tasks.errors.get(held.id)
        if error is not None:
            raise error

    def _guarded(self, held: HeldLease, action: Callable[[], None]) -> None:
        """Do something under a lease and close it; an error is the task's failure."""
        try:
            action()
        except LeaseLost:
            _log.info("Lease %d (%s) is lost; the task goes to another worker", held.id, held.task_name)
            self._link.leases.revoke((held.id,))
        except DataError as error:
            self._link.fail(held.id, 0, str(error), "", [])
        except (FeedError, JobError, grpc.RpcError):
            raise
        except Exception as error:  # noqa: BLE001  the user's model, metrics and processor run in here
            _log.error("%s", traceback.format_exc())
            self._link.fail(held.id, held.minibatch, *said_of(error, held), [])
        self._link.leases.remove(held.id)
        self._tasks.close(held)

    def _feed_failed(self, error: FeedError) -> None:
        _log.error("%s", error.details or error)
        held = self._link.leases.get(error.lease)
        if held is not None:
            self._link.fail(held.id, error.n, str(error), error.details, list(error.bad_records))
            self._link.leases.remove(held.id)
            self._tasks.close(held)
