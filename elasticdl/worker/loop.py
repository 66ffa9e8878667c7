"""The worker's loop: take a lease, work it off, say so, until the job is over.

User code fails the task it belongs to, never the worker; everything else that goes wrong here is a bug and ends it.
"""

from __future__ import annotations

import logging

import grpc

from elasticdl.frameworks.framework import FeedError
from elasticdl.protocol import Activity
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.resource_use import keep_large_buffers
from elasticdl.worker.task_reporting import TaskReporter
from elasticdl.worker.tasks import HeldLease, LeaseLost, NotFinite, Strategy, TaskBatches, TaskStream
from elasticdl.worker.termination import Termination
from elasticdl_client.errors import JobError

_log = logging.getLogger("elasticdl.worker")


class WorkerLoop:
    """Everything a worker does between its registration and its end."""

    def __init__(
        self,
        tasks: TaskStream,
        strategy: Strategy,
        outcomes: TaskReporter,
        termination: Termination,
    ) -> None:
        self._link, self._framework = outcomes.link, outcomes.framework
        self._reporter, self._clock = outcomes.reporter, outcomes.clock
        self._tasks = tasks
        self._strategy = strategy
        self._outcomes = outcomes
        self._termination = termination

    def run(self) -> None:
        """Returns when the master says that the job is over."""
        self._clock.switch(Activity.COMPUTE)
        while (held := self._next()) is not None:
            if held.lease.type == pb.TRAIN_END:
                self._outcomes.end_training(held, self._save_last)
                self._tasks.close(held)
            elif held.lease.type == pb.CALLBACK:
                self._outcomes.occasion(held)
                self._tasks.close(held)
            elif held.lease.merged:
                self._outcomes.merge(held, self._tasks)
            else:
                self._work_off(held.lease.type)
        self._reporter.drain()
        self._strategy.close()

    def leave(self, is_idle: bool) -> None:
        """After SIGTERM, in another thread: report the finished work first, save last.

        Args:
            is_idle: nothing is being computed, so the model is whole.
        """
        self._reporter.drain(self._termination.reports_s)
        self._link.say_farewell()
        if is_idle:
            self._strategy.close()

    def _next(self) -> HeldLease | None:
        with self._clock.during(Activity.IDLE):
            return self._tasks.peek()

    def _save_last(self) -> None:
        with self._termination.unbroken():
            self._strategy.save_last()

    def _work_off(self, task_type: pb.TaskType) -> None:
        """Consecutive tasks of a type through one run of the input pipeline."""
        is_leaving = (lambda: self._termination.is_asked) if task_type == pb.TRAINING else (lambda: False)
        try:
            for held, taken in self._tasks.by_task(self._framework, task_type, is_leaving):
                self._run_task(held, taken)
        except FeedError as error:
            self._outcomes.feed_failed(error, self._tasks)

    def _run_task(self, held: HeldLease, batches: TaskBatches) -> None:
        keep_large_buffers()  # once more: TensorFlow tunes malloc, too, when its pipeline gives the first minibatch
        try:
            if held.lease.type == pb.TRAINING:
                with self._termination.unbroken():
                    self._train(held, batches)
            else:
                self._evaluate(held, batches)
        except LeaseLost:
            _log.info("Lease %d (%s) is lost; its minibatches go to another worker", held.id, held.task_name)
            self._link.leases.revoke((held.id,))
        except NotFinite as error:
            self._outcomes.not_finite(held, error)
        except (FeedError, JobError, grpc.RpcError):
            raise
        except Exception as error:  # noqa: BLE001  the user's model, loss and metrics run in here
            self._outcomes.user_code_failed(held, error)
        self._tasks.close(held)

    def _train(self, held: HeldLease, batches: TaskBatches) -> None:
        def commit(minibatch: int, loss: float | None) -> None:
            self._reporter.committed(held.id, minibatch, loss)

        for minibatch in sorted(held.committed):
            commit(minibatch, None)
        self._strategy.train_task(held, batches, commit)
        if self._outcomes.is_unreadable(held, self._tasks):
            return
        if batches.num_minibatches is not None:
            self._reporter.finished(held.id, batches.num_minibatches, batches.surplus)
        else:
            assert batches.is_cut_short, "the strategy left minibatches of the task"

    def _evaluate(self, held: HeldLease, batches: TaskBatches) -> None:
        with self._clock.during(Activity.EVALUATE):
            values = self._strategy.values(held)
        self._outcomes.evaluate(held, values, batches, self._tasks)
