"""Evaluation: a task returns the states of the metrics for its records; results come from the merged states.

Before the training begins, one worker tries the metrics on a minibatch: `MetricsTrial`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import grpc
import numpy as np

from elasticdl.activities import Activity
from elasticdl.data.reader import Reader
from elasticdl.frameworks.framework import Batch, FeedError, Framework, Inference, MetricState, Mode, TaskRecords
from elasticdl.protocol import Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, TaskBatches, Values, ValueSource, sample_batches, sample_of
from elasticdl_client.errors import DataError, ElasticDLError, ModelDefinitionError, OtherColumnsError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_WHAT = "The evaluation of the first validation minibatch, before anything is trained, raised {}"
_MOST_OF_STATES = 60 << 20  # bytes; a message to the master holds 64 MiB


class EvaluationWork:
    """The `TaskWork` of evaluations: their tasks, and the task that computes their results."""

    def __init__(
        self,
        failures: TaskFailures,
        model: Inference,
        source: ValueSource,
        on_results: Callable[[HeldLease, dict[str, float]], None],
    ) -> None:
        """
        Args:
            source: The source of the values of `model`.
            on_results: Called with the results of an evaluation, by name, before the master gets them; may run user
                code.
        """
        self.model = model
        self.failures = failures
        self._link, self._clock = failures.link, failures.clock
        self._source = source
        self._on_results = on_results

    def run(self, held: HeldLease, batches: TaskBatches) -> None:
        with self._clock.during(Activity.EVALUATE):
            states = evaluate_task(self.model, self._source.values(held), held, batches)
        held.check_read()
        self._link.report_evaluation(held.id, states, {}, batches.surplus)
        self._link.leases.remove(held.id)

    def alone(self, held: HeldLease) -> None:
        with self._clock.during(Activity.EVALUATE):
            results = self.model.evaluation().results([from_message(state) for state in held.lease.merged])
            self._on_results(held, results)
        self._link.report_evaluation(held.id, [], results)
        self._link.leases.remove(held.id)

    def close(self) -> None:
        self._source.close()


class MetricsTrial:
    """Evaluates the first minibatch of the validation data, so that errors in metrics show before the training.

    One worker of a job does it, before anything is trained.  It takes no lease and calls no callback, and drops the
    results.
    """

    def __init__(
        self,
        failures: TaskFailures,
        model: Framework,
        source: ValueSource,
        reader: Callable[[pb.TaskType], Reader],
        spec: JobSpec,
    ) -> None:
        """
        Args:
            source: The source of the values of `model`.
            reader: See `Readers.of`.
        """
        self._link, self._clock = failures.link, failures.clock
        self._model = model
        self._source = source
        self._reader = reader
        self._spec = spec

    def run(self, keeps_state: bool = False) -> None:
        """Try the metrics; return at once if there is nothing to try, or another worker does it.

        Args:
            keeps_state: Restore the state of the model afterwards, which user code may change.

        Raises:
            ModelDefinitionError: user code raised; every evaluation would raise the same.
        """
        shard = self._link.sample(of_validation=True).shard
        if shard.start == shard.end:
            return
        with self._clock.during(Activity.COMPILE):
            state = self._model.state() if keeps_state else {}
            self._evaluate(Shard(shard.name, shard.start, shard.end, shard.identity))
            if keeps_state:
                self._model.load_state(state)

    def _evaluate(self, shard: Shard) -> None:
        try:
            sample = sample_of(self._reader(pb.EVALUATION), shard, self._spec.seed)
            self._evaluate_first(sample)
        except OtherColumnsError as error:
            raise ModelDefinitionError(str(error)) from None
        except (DataError, ArithmeticError) as error:
            self._leave_to_evaluations(error)
        except (ElasticDLError, grpc.RpcError):
            raise
        except Exception as error:
            raise ModelDefinitionError(_WHAT.format(f"{type(error).__name__}: {error}")) from error

    def _evaluate_first(self, sample: TaskRecords) -> None:
        try:
            batches = sample_batches(self._model, Mode.EVALUATION, sample)
        except FeedError as error:
            if self._is_tolerable(error, sample):
                self._leave_to_evaluations(error)
                return
            raise ModelDefinitionError(_WHAT.format(error), details=error.details) from None
        held = HeldLease(pb.Lease())  # a dummy: values are read without a lease
        states = evaluate_task(self._model, self._source.values(held), held, batches[:1])
        if not batches:
            return
        try:
            self._model.evaluation().results([from_message(state) for state in states])
        except ValueError as error:  # a minibatch may be too small, for example of one class only
            self._leave_to_evaluations(error)

    def _is_tolerable(self, error: FeedError, sample: TaskRecords) -> bool:
        """Return whether single records are to blame, or all of them and --max_bad_records allows for that."""
        if not error.bad_records:
            return False
        may_all_be_bad = len(sample.records) <= self._spec.max_bad_records
        last = len(sample.records) - 1
        some = {0, last // 3, last - last // 3, last}
        return may_all_be_bad or not (last > 0 and all(self._raises_on(sample, position) for position in some))

    def _raises_on(self, sample: TaskRecords, position: int) -> bool:
        """Return whether `feed` raises on one record alone."""
        alone = replace(sample, records=sample.records[position : position + 1])
        try:
            for _ in self._model.batches(Mode.EVALUATION, iter((alone,))):
                pass
        except FeedError:
            return True
        return False

    @staticmethod
    def _leave_to_evaluations(error: Exception) -> None:
        _log.warning("The first validation minibatch cannot be evaluated: %s: %s", type(error).__name__, error)


def evaluate_task(
    framework: Inference, values: Values, held: HeldLease, batches: Iterable[Batch]
) -> list[pb.MetricState]:
    """Reset the metrics, update them with every minibatch of a task, and return their states.

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


def as_json(step: int, metrics: Mapping[str, float]) -> str:
    """Return the content of `--metrics_output`; numbers that are not finite, which JSON lacks, become null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, "metrics": finite}, allow_nan=False) + "\n"


def to_message(state: MetricState) -> pb.MetricState:
    arrays = [pb.Array(shape=a.shape, data=np.ascontiguousarray(a, "<f8").tobytes()) for a in state.arrays]
    return pb.MetricState(name=state.name, arrays=arrays, additive=state.additive, num_states=state.num_states)


def from_message(message: pb.MetricState) -> MetricState:
    return MetricState(message.name, _arrays(message.arrays), message.additive, message.num_states)


def _arrays(messages: Sequence[pb.Array]) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], ...]:
    return tuple(np.frombuffer(m.data, "<f8").reshape(tuple(m.shape)) for m in messages)
