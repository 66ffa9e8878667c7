"""Evaluation: a task gives the metrics' states for its records; numbers are made of the merged states of all tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from elasticdl.activities import Activity
from elasticdl.frameworks.framework import Inference, MetricState
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, TaskBatches, Values, ValueSource

_MOST_OF_STATES = 60 << 20  # bytes; a message to the master holds 64 MiB


class EvaluationWork:
    """See `TaskWork`: tasks of evaluations, and their results."""

    def __init__(
        self,
        failures: TaskFailures,
        model: Inference,
        source: ValueSource,
        on_results: Callable[[HeldLease, dict[str, float]], None],
    ) -> None:
        """
        Args:
            source: of the values of that model.
            on_results: called with the results of an evaluation by name, before the master has them; may run user code.
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
