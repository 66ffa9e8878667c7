"""Metrics in all frameworks: their names, the model outputs they apply to, the results of merged states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import MetricState
from elasticdl_client.errors import ModelDefinitionError

Array = npt.NDArray[np.float64]
State = tuple[Array, ...]
M = TypeVar("M")


class Measure(Protocol):
    """One of the user's metrics; `maximize`: whether higher is better; None: unknown."""

    name: str
    additive: bool
    maximize: bool | None

    def results(self, states: Sequence[State]) -> Any:
        """Return the value of merged states: one state if additive, else one per task."""
        ...


def make_measures(path: str, defined: Any, make: Callable[[str, str, Any, str | None], M]) -> list[M]:
    """Return the metrics of `eval_metrics_fn()`.

    Args:
        path: Path of the user's module, for messages.
        defined: {name: metric or function} or {output name: {name: metric or function}}; a dictionary with a class_name
            is the Keras config of a metric.
        make: Makes a measure from (path, name, metric or function, output).

    Raises:
        ModelDefinitionError: `defined` has another form.
    """
    if not isinstance(defined, Mapping):
        raise ModelDefinitionError(f"{path}: eval_metrics_fn() returned a {type(defined).__name__}, not a dictionary.")
    flat: list[tuple[str | None, str, Any]] = []
    for key, value in defined.items():
        if isinstance(value, Mapping) and "class_name" not in value:
            flat.extend((str(key), str(name), metric) for name, metric in value.items())
        else:
            flat.append((None, str(key), value))
    names = [name for _, name, _ in flat]
    return [
        make(path, name if names.count(name) == 1 or output is None else f"{output}_{name}", metric, output)
        for output, name, metric in flat
    ]


def select(labels: Any, predictions: Any, output: str | None) -> tuple[Any, Any]:
    """Return the labels and predictions of one named output; None: all of them."""
    if output is None:
        return labels, predictions
    if not isinstance(predictions, Mapping) or output not in predictions:
        known = ", ".join(predictions) if isinstance(predictions, Mapping) else "none by name"
        raise ModelDefinitionError(f"eval_metrics_fn() has metrics of output {output!r}; the model's outputs: {known}.")
    own = labels[output] if isinstance(labels, Mapping) and output in labels else labels
    return own, predictions[output]


def results_of(measures: Iterable[Measure], merged: Sequence[MetricState]) -> dict[str, float]:
    """Return the results of merged states by name; each value of a metric with several has its own name."""
    by_name = {state.name: state for state in merged}
    results: dict[str, float] = {}
    for measure in measures:
        if measure.name in by_name:
            results.update(_named(measure.name, measure.results(_apart(by_name[measure.name]))))
    return results


def _apart(state: MetricState) -> list[State]:
    length = len(state.arrays) // state.num_states
    return [state.arrays[k * length : (k + 1) * length] for k in range(state.num_states)]


def _named(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(np.asarray(part)) for key, part in value.items()}
    numbers = np.asarray(value, np.float64)
    if numbers.ndim == 0:
        return {name: float(numbers)}
    return {f"{name}_{k}": float(number) for k, number in enumerate(numbers.ravel())}
