"""EVALUATION tasks: metric state of a slice of the validation data, and numbers from merged states."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from elasticdl.frameworks.framework import Inference, MetricState
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.input.batches import TaskBatches
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.strategy import Values


def evaluate_task(framework: Inference, values: Values, held: HeldLease, batches: TaskBatches) -> list[pb.MetricState]:
    """Freshly reset metrics, updated with every minibatch of the task."""
    evaluation = framework.evaluation()
    for batch in batches:
        held.minibatch = batch.n
        evaluation.update(batch, values.parameters, values.rows(batch))
    return [to_message(state) for state in evaluation.states()]


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
