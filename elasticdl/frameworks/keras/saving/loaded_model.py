"""`LoadedKeras`: an exported model (SavedModel or `.keras` file), with the feed and the metrics of the user's module.

The module's model function is called only for the metrics of a compiled model: the export is complete without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import elasticdl.layers  # noqa: F401  its layers may be in a .keras file
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.devices import DeviceMeter
from elasticdl.frameworks.framework import Batch, Evaluation, Floats, Mode, ModelReport, Parameters, TaskRecords
from elasticdl.frameworks.keras.compiled import by_output, call_model, check_complete, check_overrides, completed
from elasticdl.frameworks.keras.computation import device_meter
from elasticdl.frameworks.keras.evaluation import KerasEvaluation, Measures, arrays_of
from elasticdl.frameworks.keras.input.declared_inputs import ModelInputs
from elasticdl.frameworks.keras.input.pipeline import Pipeline
from elasticdl.frameworks.keras.input.table_feed import traced_feed
from elasticdl.frameworks.keras.metrics import Evaluated, TensorMeasure, measures_of
from elasticdl.frameworks.keras.samples import Examples, masks_of, take_apart, with_masks, zeros_like_spec
from elasticdl.frameworks.user_code import user_call
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import CheckpointError

_SIGNATURE = "serving_default"
Forward = Callable[[Any], Any]


class LoadedKeras:
    """See `Inference`."""

    def __init__(
        self, definition: ModelDefinition, path: Path, minibatch_size: int, metadata: Metadata, mode: Mode
    ) -> None:
        """
        Args:
            definition: The user's module.
            path: Directory with a SavedModel, or a `.keras` file.
            minibatch_size: Samples per minibatch.
            metadata: Passed to the user's `feed`.
            mode: Mode of the job's tasks.

        Raises:
            CheckpointError: The model cannot be loaded.
            ModelDefinitionError: The module has no feed, and the data have no columns.
        """
        self._definition = definition
        self._mode = mode
        self._feed = traced_feed(definition, mode, metadata, minibatch_size)
        self._inputs, self._forward = _keras_file(path, mode) if path.is_file() else _saved_model(path)
        self._pipeline = Pipeline(mode, self._feed, self._inputs, minibatch_size, {}, _no_ids)
        self._compiled: Any = None  # the module's model, if its metrics are used
        self._measures = Measures(self._make_measures(), self._example)
        self._meter = device_meter()

    @property
    def device_meter(self) -> DeviceMeter:
        """See `Inference.device_meter`."""
        return self._meter

    def report(self) -> ModelReport:
        """See `Inference.report`; the variables of an export are not reported."""
        self._inputs.matched(self._fed().features)
        return ModelReport((), (), "", tuple(measure.name for measure in self._measures))

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """See `Inference.batches`; only for the mode of the constructor."""
        assert mode is self._mode, mode
        return self._pipeline.batches(tasks)

    def predictions(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Any:
        """Return the model's outputs as tensors."""
        self._meter.sample()
        return self._forward(take_apart(self._mode, batch.data.element).features)

    def predict(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Any:
        """See `Inference.predict`."""
        return arrays_of(self.predictions(batch, parameters, rows))

    def evaluation(self) -> Evaluation:
        """See `Inference.evaluation`."""
        return KerasEvaluation(self._measures, self._evaluated)

    def _evaluated(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Evaluated:
        labels = take_apart(self._mode, batch.data.element).labels
        return by_output(self._compiled, Evaluated(labels, self.predictions(batch, parameters, rows)))

    def _make_measures(self) -> list[TensorMeasure]:
        if self._mode is not Mode.EVALUATION:
            return []  # the kind of "accuracy" depends on the labels
        definition = self._definition
        if definition.eval_metrics_fn is None:
            self._compiled = user_call(definition.model, f"{definition.path}: {definition.symbol}")
            definition = completed(definition, self._compiled)
        check_complete(definition, ("eval_metrics_fn",))
        assert definition.eval_metrics_fn is not None
        defined = user_call(definition.eval_metrics_fn, f"{definition.path}: eval_metrics_fn()")
        return measures_of(definition.path, defined, self._example)

    def _example(self) -> Evaluated:
        examples = self._fed(zeros_like_spec)
        predictions = self._forward(self._inputs.matched(examples.features))
        return by_output(self._compiled, Evaluated(examples.labels, predictions))

    def _fed(self, made: Callable[[Any], Any] = lambda spec: spec) -> Examples:
        """Apply `made` to the spec of a minibatch."""
        where = f"{self._definition.path}: feed(dataset, {self._mode.value!r}, metadata)"
        return take_apart(self._mode, made(user_call(self._feed.probe, where)))


def _no_ids(features: Any) -> Any:
    raise AssertionError("an export looks its ids up itself")


def _keras_file(path: Path, mode: Mode) -> tuple[ModelInputs, Forward]:
    try:
        model = keras.saving.load_model(str(path), compile=False)
    except Exception as error:
        raise _unreadable(path, error) from error
    check_overrides(str(path), model, mode)

    def call(features: Any) -> Any:
        outputs = call_model(model, features, training=False)
        return outputs, masks_of(outputs)

    forward = tf.function(call, reduce_retracing=True, autograph=False)
    return ModelInputs.of(str(path), model), lambda features: with_masks(*forward(features))


def _saved_model(path: Path) -> tuple[ModelInputs, Forward]:
    try:
        loaded = tf.saved_model.load(str(path))
    except Exception as error:
        raise _unreadable(path, error) from error
    if callable(getattr(loaded, "serve", None)):
        ((structure,), _) = loaded.serve.concrete_functions[0].structured_input_signature
        inputs = ModelInputs(str(path), structure)
        # A function does not keep its variables alive.
        if hasattr(loaded, "serve_masked"):
            return inputs, lambda features: with_masks(*loaded.serve_masked(inputs.adjusted(features)))
        return inputs, lambda features: loaded.serve(inputs.adjusted(features))
    if _SIGNATURE not in loaded.signatures:
        raise CheckpointError(f"The SavedModel in {path} has no signature {_SIGNATURE}.", "Export it with one.")
    signature = loaded.signatures[_SIGNATURE]
    inputs = ModelInputs(str(path), dict(sorted(signature.structured_input_signature[1].items())))

    def by_name(features: Any) -> Any:
        assert loaded  # a signature does not keep its variables alive
        outputs = signature(**inputs.adjusted(features))
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    return inputs, by_name


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).strip().partition("\n")[0]
    return CheckpointError(
        f"{path} cannot be loaded: {type(error).__name__}: {reason}",
        "Classes of your own must be registered (keras.saving.register_keras_serializable) in the module that "
        "--model_def names; or name a SavedModel, which needs none.",
    )
