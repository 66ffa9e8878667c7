"""The port `Evaluation`: states of the user's metrics over the minibatches of a task, and numbers of merged states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticdl.frameworks.framework import Batch, Floats, MetricState, Parameters
from elasticdl.frameworks.metrics import results_of
from elasticdl.frameworks.torch.metrics import CountingMeasure

Predict = Callable[[Batch, Parameters | None], Any]


class TorchEvaluation:
    """See `Evaluation`.  Several may be alive at once."""

    def __init__(self, measures: Sequence[CountingMeasure], predict: Predict, labels: Callable[[Batch], Any]) -> None:
        """
        Args:
            labels: of a minibatch, where the predictions are.
        """
        self._pristine = measures
        self._measures = [measure.fresh() for measure in measures]
        self._predict = predict
        self._labels = labels

    def update(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> None:
        predictions = self._predict(batch, parameters)
        labels = self._labels(batch)
        for pristine, measure in zip(self._pristine, self._measures, strict=True):
            pristine.check(labels, predictions)
            measure.update(labels, predictions)

    def states(self) -> list[MetricState]:
        return [MetricState(measure.name, measure.state(), measure.additive) for measure in self._measures]

    def results(self, merged: Sequence[MetricState]) -> dict[str, float]:
        return results_of(self._measures, merged)
