"""Reports to the master on tasks that are evaluated, done alone, or have failed.

A task of an evaluation gives the metrics' state for its records; numbers are made of the merged states.
"""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from elasticdl.frameworks.framework import FeedError, Framework, Inference, LabelError, MetricState
from elasticdl.protocol import Activity
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.export.exporter import Exporter
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import Reporter
from elasticdl.worker.tasks import (
    HeldLease,
    LeaseLost,
    NotFinite,
    ReadableModel,
    TaskBatches,
    TaskStream,
    Values,
)
from elasticdl_client.errors import DataError, JobError, LastCheckpointError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_MOST_OF_STATES = 60 << 20  # bytes; a message to the master holds 64 MiB


def evaluate_task(framework: Inference, values: Values, held: HeldLease, batches: TaskBatches) -> list[pb.MetricState]:
    """Freshly reset metrics, updated with every minibatch of the task.

    Raises:
        ValueError: their states are too large for a report.
    """
    evaluation = framework.evaluation()
    for batch in batches:
        held.minibatch = batch.n
        evaluation.update(batch, values.parameters, values.rows(batch))
    states = [to_message(state) for state in evaluation.states()]
    if (size := sum(state.ByteSize() for state in states)) > _MOST_OF_STATES:
        largest = max(states, key=pb.MetricState.ByteSize).name
        raise ValueError(
            f"the states of the metrics take {size >> 20} MiB, most of it that of {largest}; the master takes "
            f"{_MOST_OF_STATES >> 20} MiB of a task: give it fewer classes or thresholds"
        )
    return states


def merged_results(framework: Inference, merged: Iterable[pb.MetricState]) -> dict[str, float]:
    """Return the results of metrics from states that the master has merged."""
    return framework.evaluation().results([from_message(state) for state in merged])


def as_json(step: int, metrics: Mapping[str, float]) -> str:
    """The file of `--metrics_output`; a number that is not finite, which JSON does not have, is null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, "metrics": finite}, allow_nan=False) + "\n"


def to_message(state: MetricState) -> pb.MetricState:
    arrays = [pb.Array(shape=a.shape, data=np.ascontiguousarray(a, "<f8").tobytes()) for a in state.arrays]
    return pb.MetricState(name=state.name, arrays=arrays, additive=state.additive, num_states=state.num_states)


def from_message(message: pb.MetricState) -> MetricState:
    return MetricState(message.name, _arrays(message.arrays), message.additive, message.num_states)


def _arrays(messages: Sequence[pb.Array]) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], ...]:
    return tuple(np.frombuffer(m.data, "<f8").reshape(tuple(m.shape)) for m in messages)


class TaskReporter:
    """Works off what is not training, and ends tasks.

    Attributes:
        link: to the master.
        framework: of the user's module.
        reporter: of minibatches.
        clock: of the worker's activities.
    """

    def __init__(self, link: MasterLink, framework: Framework, reporter: Reporter, exporter: Exporter) -> None:
        self.link = link
        self.framework = framework
        self.reporter = reporter
        self._exporter = exporter
        self.clock = link.clock

    @classmethod
    def of(cls, spec: JobSpec, link: MasterLink, framework: Framework, model: ReadableModel) -> TaskReporter:
        """Return that of a job whose model a module defines.

        Args:
            model: that evaluations and exports read.
        """
        return cls(link, framework, Reporter(link, spec.log_loss_steps), Exporter(framework, model, link.confirm, spec))

    def evaluate(self, held: HeldLease, values: Values, batches: TaskBatches, tasks: TaskStream) -> None:
        """An EVALUATION task: the metrics' states over its records."""
        with self.clock.during(Activity.EVALUATE):
            states = evaluate_task(self.framework, values, held, batches)
        if self.is_unreadable(held, tasks):
            return
        self.link.report_evaluation(held.id, states, {}, batches.surplus)
        self.link.leases.remove(held.id)

    def merge(self, held: HeldLease, tasks: TaskStream) -> None:
        """An evaluation's numbers from the states of all its tasks."""
        with self.clock.during(Activity.EVALUATE):
            results = merged_results(self.framework, held.lease.merged)
            try:
                self.framework.end_evaluation(held.lease.model_version, results)
            except Exception as error:  # noqa: BLE001  the user's callbacks run in here
                self.user_code_failed(held, error)
                tasks.close(held)
                return
        self.link.report_evaluation(held.id, [], results)
        self.close(held, tasks)

    def end_training(self, held: HeldLease, save_last: Callable[[], None]) -> None:
        """TRAIN_END: the export and the user's callbacks.  The caller closes the lease in its stream.

        Args:
            save_last: see `Strategy.save_last`; it comes first.
        """

        def end(held: HeldLease) -> str:
            save_last()
            return self._exporter.end_training(held)

        self._do_alone(held, end)

    def occasion(self, held: HeldLease) -> None:
        """CALLBACK: saves the model, or calls the user's callbacks.  The caller closes the lease in its stream."""
        self._do_alone(held, self._exporter.occasion)

    def _do_alone(self, held: HeldLease, do: Callable[[HeldLease], str]) -> None:
        """
        Args:
            do: returns why no model was written, if one was to be.
        """
        self.reporter.drain()
        try:
            with self.clock.during(Activity.EXPORT):
                not_exported = do(held)
        except LeaseLost:
            _log.info("Lease %d (%s) is lost; another worker has it", held.id, held.task_name)
        except JobError:
            raise
        except LastCheckpointError as error:
            _log.error("%s", error)
            self.link.fail(held.id, 0, str(error), "", [])
        except Exception as error:  # noqa: BLE001  the user's model and callbacks run in here
            _log.error("%s", traceback.format_exc())
            self.link.fail(held.id, 0, f"{type(error).__name__}: {error}", traceback.format_exc(), [])
        else:
            self.link.finish(held.id, 0, not_exported=not_exported)
        self.link.leases.remove(held.id)

    def is_unreadable(self, held: HeldLease, tasks: TaskStream) -> bool:
        """Whether its records could not be read; then report that."""
        error = tasks.errors.get(held.id)
        if error is None:
            return False
        self.unreadable(held, error)
        return True

    def unreadable(self, held: HeldLease, error: DataError) -> None:
        """The records of a task cannot be read."""
        self.reporter.drain()
        self.link.fail(held.id, 0, str(error), "", [])
        self.link.leases.remove(held.id)

    def feed_failed(self, error: FeedError, tasks: TaskStream) -> None:
        """The user's `feed` raised; the task may be one whose lease is lost."""
        _log.error("%s", error.details or error)
        self.reporter.drain()
        held = self.link.leases.get(error.lease)
        if held is not None:
            self.link.fail(held.id, error.n, str(error), error.details, list(error.bad_records))
            self.close(held, tasks)

    def not_finite(self, held: HeldLease, error: NotFinite) -> None:
        """The job ends by it."""
        _log.error("Minibatch %d of %s: %s", error.minibatch, held.task_name, error)
        self.reporter.drain()
        what, arrow, advice = str(error).partition("\n  → ")
        what = f"{what}, in minibatch {error.minibatch}{arrow}{advice}"
        self.link.report_progress(held.id, [], None, not_finite=what)
        self.link.leases.remove(held.id)

    def user_code_failed(self, held: HeldLease, error: Exception) -> None:
        """The user's model, loss or metrics raised the exception being handled."""
        _log.error("%s", traceback.format_exc())
        self.reporter.drain()
        self.link.fail(held.id, held.minibatch, *said_of(error, held), [])
        self.link.leases.remove(held.id)

    def close(self, held: HeldLease, tasks: TaskStream) -> None:
        self.link.leases.remove(held.id)
        tasks.close(held)


def said_of(error: Exception, held: HeldLease | None) -> tuple[str, str]:
    """Return the text for the exception being handled, and its traceback where that helps."""
    if not isinstance(error, LabelError):
        return f"{type(error).__name__}: {error}", traceback.format_exc()
    if held is None or error.sample is None or error.sample >= len(held.record_numbers):
        return str(error), ""
    return f"Record {held.record_numbers[error.sample]} of {held.lease.shard.name}: {error}", ""
