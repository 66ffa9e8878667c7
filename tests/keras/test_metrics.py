"""Metrics merged over tasks against one process, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.frameworks.framework import MetricState, Mode, TaskRecords
from elasticdl_client.errors import ModelDefinitionError


@pytest.fixture
def data() -> Any:
    random = np.random.default_rng(5)
    x = random.normal(size=(137, 3))
    return np.concatenate([x, x[:, :1] + random.normal(size=(137, 1)) > 0], axis=1).astype("f4")


def _merge(reports: Sequence[Sequence[MetricState]]) -> list[MetricState]:
    """As the master does."""
    merged = []
    for states in zip(*reports, strict=True):
        first = states[0]
        if first.additive:
            arrays = tuple(np.sum([s.arrays[k] for s in states], axis=0) for k in range(len(first.arrays)))
            merged.append(MetricState(first.name, arrays))
        else:
            arrays = tuple(array for s in states for array in s.arrays)
            merged.append(MetricState(first.name, arrays, False, len(states)))
    return merged


def _reports(tested: Any, tasks: list[list[bytes]]) -> list[list[MetricState]]:
    reports = []
    evaluation = tested.evaluation()
    batches = tested.batches(Mode.EVALUATION, iter([TaskRecords(k, 0, task) for k, task in enumerate(tasks)]))
    for batch in batches:
        if batch.end:
            reports.append(evaluation.states())
            evaluation = tested.evaluation()
        else:
            evaluation.update(batch, tested.initial(), {})
    return reports


def test_merged_metrics_are_those_of_one_process(framework: Any, rows_of: Any, data: Any) -> None:
    tested = framework("scored.custom_model", minibatch_size=16)
    records = rows_of(data)
    reports = _reports(tested, [records[:50], records[50:61], records[61:]])
    elsewhere = framework("scored.custom_model", minibatch_size=16)
    results = elsewhere.evaluation().results(_merge(reports))
    logits = tested._built().model(data[:, :3])["logits"]
    tested._steps().assign(tested.initial())
    logits = tested._built().model(data[:, :3])["logits"].numpy()
    probability, labels = 1 / (1 + np.exp(-logits)), data[:, 3:]

    def whole(metric: Any, predictions: Any) -> Any:
        metric.update_state(labels, predictions)
        return np.asarray(metric.result())

    expected = {
        "accuracy": whole(keras.metrics.BinaryAccuracy(threshold=0.0), logits),
        "logits_positives": labels.mean(),
        "per_sample": np.mean((labels > 0.5) == (logits > 0)),
        "scalar": logits.mean(),
        "in_numpy": np.square(logits).mean(),
        "auc": whole(keras.metrics.AUC(), probability),
        "largest": probability.max(),
        "probability_positives": labels.mean(),
        "r2": whole(keras.metrics.R2Score(), probability),
        "f1_0": whole(keras.metrics.F1Score(threshold=0.5), probability)[0],
    }
    expected["f1_0"] = np.float64(expected["f1_0"])
    results = {name.replace("f1", "f1_0") if name == "f1" else name: value for name, value in results.items()}
    assert set(results) == set(expected)
    for name, value in expected.items():
        assert results[name] == pytest.approx(float(value), abs=1e-6), name
    assert {s.name for s in reports[0] if not s.additive} == {"largest"}
    assert all(array.dtype == np.float64 for states in reports for s in states for array in s.arrays)


def test_two_evaluations_at_once_do_not_meddle(framework: Any, rows_of: Any, data: Any) -> None:
    tested = framework("scored.custom_model", minibatch_size=16)
    records = rows_of(data[:64])
    alone = _reports(tested, [records])[0]
    first, second = tested.evaluation(), tested.evaluation()
    for batch in tested.batches(Mode.EVALUATION, iter([TaskRecords(1, 0, records)])):
        if not batch.end:
            first.update(batch, tested.initial(), {})
            if batch.n == 0:
                second.update(batch, tested.initial(), {})
                second.results(second.states())
    for one, other in zip(first.states(), alone, strict=True):
        for a, b in zip(one.arrays, other.arrays, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_task_without_samples_has_empty_state(framework: Any, rows_of: Any, data: Any) -> None:
    tested = framework("scored.custom_model", minibatch_size=16)
    empty, full = _reports(tested, [[], rows_of(data)])
    merged = tested.evaluation().results(_merge([empty, full]))
    assert merged == pytest.approx(tested.evaluation().results(full))


def test_a_metric_whose_state_does_not_add_up_is_refused_by_name(framework: Any, rows_of: Any, data: Any) -> None:
    tested = framework("scored.custom_model", eval_metrics_fn="refused_metrics")
    with pytest.raises(ModelDefinitionError, match="'biggest' \\(Largest\\)"):
        _reports(tested, [rows_of(data)])


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("not_metrics", r"returned \['auc'\], and the model has several outputs"),
        ("strings", "returned 'accuracy', and the model has several outputs"),
        ("numbers", "gives 'accuracy' a int"),
    ],
)
def test_what_is_no_metric_is_refused(framework: Any, symbol: str, message: str) -> None:
    with pytest.raises(ModelDefinitionError, match=message):
        framework("scored.custom_model", eval_metrics_fn=symbol).report()


def test_metrics_of_an_output_that_is_not_there_are_refused(framework: Any, rows_of: Any, data: Any) -> None:
    with pytest.raises(ModelDefinitionError, match="output 'price'"):
        _reports(framework("scored.custom_model", eval_metrics_fn="wrong_output"), [rows_of(data)])
