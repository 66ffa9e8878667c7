"""The worker's loop: request a lease, do its task, and report it, until the job is over.

User code that raises fails its task, not the worker; any other error here is a bug and ends the worker.  `TaskWork` is
the port that differs between kinds of jobs; `TrainingWork` runs training tasks one by one, with a `Strategy`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import grpc

from elasticdl.activities import Activity
from elasticdl.data.reader import Reader
from elasticdl.frameworks.framework import FeedError, Framework, Inference
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.resource_use import keep_large_buffers
from elasticdl.worker.evaluation import EvaluationWork, MetricsTrial
from elasticdl.worker.export.exporter import Exporter, ExportTasks
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, LeaseLost, ReadableModel, Strategy, TaskBatches, TaskStream
from elasticdl.worker.termination import Termination
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")


class TaskWork(Protocol):
    """The work on the tasks of a job, and the reports on it.

    `run` and `alone` report the end of the lease to the master.  They may raise `LeaseLost`, or any error of user code,
    which fails the task.

    Attributes:
        model: Makes the minibatches of tasks.
        failures: Reports tasks on which an error was raised.
    """

    @property
    def model(self) -> Inference: ...

    @property
    def failures(self) -> TaskFailures: ...

    def run(self, held: HeldLease, batches: TaskBatches) -> None:
        """Process the minibatches of a task."""
        ...

    def alone(self, held: HeldLease) -> None:
        """Run a task without minibatches: TRAIN_END, CALLBACK, or the results of an evaluation."""
        ...

    def close(self) -> None:
        """Finish: the job is over."""
        ...


class WorkerLoop:
    """Runs the tasks of a worker, from its registration to the end of the job."""

    def __init__(self, tasks: TaskStream, work: TaskWork, termination: Termination) -> None:
        self._tasks = tasks
        self._work = work
        self._failures = work.failures
        self._clock = work.failures.clock
        self._termination = termination

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        reader: Callable[[pb.TaskType], Reader],
        work: TaskWork,
        termination: Termination,
        begin: Callable[[HeldLease], None] = lambda held: None,
    ) -> WorkerLoop:
        """Return the loop of a job whose tasks come from the master.

        Args:
            reader: See `TaskStream`.
            begin: See `TaskStream`.
        """
        link = work.failures.link
        return cls(TaskStream.of(spec, link, reader, link.clock, begin), work, termination)

    def run(self) -> None:
        """Run tasks until the master says that the job is over."""
        self._clock.switch(Activity.COMPUTE)
        while (held := self._next()) is not None:
            self._begin_with(held)
        self._work.close()

    def run_at_once(self, task_type: pb.TaskType, first: HeldLease | None = None) -> None:
        """Run the tasks of a type that the master has now, without waiting for more; begin none after SIGTERM.

        Args:
            first: A lease that is already held, to begin with.
        """
        if first is not None:
            self._tasks.reopen([first])
        while not self._termination.is_asked:
            held = self._tasks.peek_at_once(task_type)
            if held is None:
                return
            self._begin_with(held, may_wait=False)

    def _next(self) -> HeldLease | None:
        with self._clock.during(Activity.IDLE):
            return self._tasks.peek()

    def _begin_with(self, held: HeldLease, may_wait: bool = True) -> None:
        """Run the task of the oldest open lease, and the following ones of the same type."""
        if held.lease.merged or held.lease.type in (pb.TRAIN_END, pb.CALLBACK):
            self._guarded(held, partial(self._work.alone, held))
        else:
            self._work_off(held.lease.type, may_wait)

    def _work_off(self, task_type: pb.TaskType, may_wait: bool) -> None:
        """Run consecutive tasks of a type with one input pipeline."""
        is_leaving = (lambda: self._termination.is_asked) if task_type == pb.TRAINING else (lambda: False)
        try:
            for held, taken in self._tasks.by_task(self._work.model, task_type, is_leaving, lambda: may_wait):
                keep_large_buffers()  # again: TensorFlow tunes malloc at the first minibatch
                self._guarded(held, partial(self._work.run, held, taken))
        except FeedError as error:
            self._failures.feed_failed(error, self._tasks)

    def _guarded(self, held: HeldLease, action: Callable[[], None]) -> None:
        """Run an action under a lease, and close the lease; an error fails the task."""
        try:
            action()
        except LeaseLost:
            _log.info("Lease %d (%s) is lost; its minibatches go to another worker", held.id, held.task_name)
            self._failures.link.leases.revoke((held.id,))
        except (FeedError, JobError, grpc.RpcError):
            raise
        except Exception as error:  # noqa: BLE001  the user's model, loss, metrics and processor run in here
            self._failures.failed(held, error)
        self._tasks.close(held)


class TrainingTasks:
    """The tasks of a training job other than the training: failures, evaluations, exports.

    Attributes:
        model: The model of the user's module.
        failures: Reports failed tasks.
        evaluation: Runs EVALUATION tasks.
        exports: Runs TRAIN_END and CALLBACK tasks.
    """

    def __init__(self, failures: TaskFailures, model: Framework, source: ReadableModel, exporter: Exporter) -> None:
        """
        Args:
            source: The model for evaluations to read.
        """
        self.model = model
        self.failures = failures
        self._source = source

        def end_evaluation(held: HeldLease, results: dict[str, float]) -> None:
            if reason := model.end_evaluation(held.lease.model_version, results):
                failures.link.stop_training(reason)

        self.evaluation = EvaluationWork(failures, model, source, end_evaluation)
        self.exports = ExportTasks(failures, exporter)

    @classmethod
    def of(cls, spec: JobSpec, failures: TaskFailures, model: Framework, source: ReadableModel) -> TrainingTasks:
        """Return the tasks of a job whose model a module defines.

        Args:
            source: The model for evaluations and exports to read.
        """
        return cls(failures, model, source, Exporter(model, source, failures.link, spec))

    def try_metrics(self, spec: JobSpec, reader: Callable[[pb.TaskType], Reader], keeps_state: bool = False) -> None:
        """Evaluate a minibatch before the training, if this worker is chosen to; see `MetricsTrial.run`.

        Args:
            reader: See `TaskStream`.
        """
        if spec.validation_data:
            MetricsTrial(self.failures, self.model, self._source, reader, spec).run(keeps_state)


class TrainingWork:
    """The `TaskWork` of a job that trains with a `Strategy`."""

    def __init__(self, tasks: TrainingTasks, strategy: Strategy, termination: Termination) -> None:
        self.model: Inference = tasks.model
        self.failures = tasks.failures
        self._reporter = tasks.failures.reporter
        self._evaluation = tasks.evaluation
        self._exports = tasks.exports
        self._strategy = strategy
        self._termination = termination

    def run(self, held: HeldLease, batches: TaskBatches) -> None:
        if held.lease.type == pb.TRAINING:
            with self._termination.unbroken():
                self._train(held, batches)
        else:
            self._evaluation.run(held, batches)

    def alone(self, held: HeldLease) -> None:
        if held.lease.type == pb.TRAIN_END:
            self._exports.end_training(held, self._save_last)
        elif held.lease.type == pb.CALLBACK:
            self._exports.occasion(held)
        else:
            self._evaluation.alone(held)

    def close(self) -> None:
        self._reporter.drain()
        self._strategy.close()

    def leave(self, is_idle: bool) -> None:
        """Report the finished work after SIGTERM, then save.  In another thread.

        Args:
            is_idle: Whether nothing is being computed, so that the model is consistent.
        """
        self._reporter.drain(self._termination.reports_s)
        self.failures.link.say_farewell()
        if is_idle:
            self._strategy.close()

    def _save_last(self) -> None:
        with self._termination.unbroken():
            self._strategy.save_last()

    def _train(self, held: HeldLease, batches: TaskBatches) -> None:
        def commit(minibatch: int, loss: float | None) -> None:
            self._reporter.committed(held.id, minibatch, loss)

        for minibatch in sorted(held.committed):
            commit(minibatch, None)
        self._strategy.train_task(held, batches, commit)
        held.check_read()
        if batches.num_minibatches is not None:
            self._reporter.finished(held.id, batches.num_minibatches, batches.surplus)
        else:
            assert batches.is_cut_short, "the strategy left minibatches of the task"
