"""`KerasFramework`: the port `Framework` on Keras 3 and TensorFlow.  It only connects the other modules."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.data_flaws import (
    ClassLabels,
    LabelFlaw,
    ProbabilityLabels,
    are_probabilities,
    data_flaws,
    label_flaw,
    labels_blamed,
)
from elasticdl.frameworks.devices import DeviceMeter
from elasticdl.frameworks.framework import (
    Batch,
    Evaluation,
    Floats,
    LocalGradient,
    Mode,
    ModelReport,
    NotFiniteStep,
    Parameters,
    Share,
    Step,
    TableRows,
    TaskRecords,
)
from elasticdl.frameworks.keras import optimizer as hooks
from elasticdl.frameworks.keras.compiled import (
    by_output,
    call_model,
    check_compiled,
    check_complete,
    normalize_by_weights,
    taken_from_compile,
)
from elasticdl.frameworks.keras.computation import build_optimizer, check_policy, device_meter, set_policy
from elasticdl.frameworks.keras.evaluation import KerasEvaluation, Measures, arrays_of, assign_all, load_weights
from elasticdl.frameworks.keras.input.declared_inputs import ModelInputs
from elasticdl.frameworks.keras.input.feed import TracedFeed
from elasticdl.frameworks.keras.input.pipeline import Pipeline
from elasticdl.frameworks.keras.input.table_feed import traced_feed
from elasticdl.frameworks.keras.metrics import Evaluated, LossMeasure, TensorMeasure, measures_of
from elasticdl.frameworks.keras.model import BuiltModel, build_model, example_size, states_kept, unique_names
from elasticdl.frameworks.keras.optimizer import (
    LearningRates,
    check_for_groups,
    check_for_parameter_server,
    describe_optimizer,
    make_optimizer,
    own_rate_at,
)
from elasticdl.frameworks.keras.samples import Examples, take_apart, zeros_like_spec
from elasticdl.frameworks.keras.saving.export import check_keras_file, export_model
from elasticdl.frameworks.keras.step.all_reduce_step import AllReduceStep
from elasticdl.frameworks.keras.step.step import CompiledSteps
from elasticdl.frameworks.user_code import user_call
from elasticdl.layers.placement import Placement
from elasticdl.model_def import ModelDefinition
from elasticdl_client.choices import Precision
from elasticdl_client.errors import ModelDefinitionError

_LOOKUP = "keras.layers.StringLookup(vocabulary={}, num_oov_indices=0)"
_log = logging.getLogger("elasticdl.keras")


@dataclass(frozen=True, slots=True)
class KerasSettings:
    """Settings that no other adapter has.

    Attributes:
        jit_compile: Try to compile gradient steps with XLA.
        embedding_threshold: Size in bytes; larger tables of `keras.layers.Embedding` are on the parameter servers.
        needed: Symbols that the module or `compile` must define: loss, optimizer, eval_metrics_fn.
        precision: Precision of the model; it becomes the dtype policy of this process.
        evaluates: There are validation data.
        in_groups: Workers train in groups and sum their gradients.
        fixed_global_batch: All steps of a group have the same number of records, so they equal the steps of `fit`.
    """

    jit_compile: bool = True
    embedding_threshold: int = 2 << 20
    needed: Collection[str] = ()
    precision: Precision = Precision.FP32
    evaluates: bool = True
    fixed_global_batch: bool = False
    in_groups: bool = False


_DEFAULTS = KerasSettings()


class KerasFramework:
    """See `Framework`.  The model is built by the first call that needs it."""

    def __init__(
        self,
        definition: ModelDefinition,
        minibatch_size: int,
        seed: int,
        metadata: Metadata,
        on_parameter_server: bool,
        mode: Mode = Mode.TRAINING,
        settings: KerasSettings = _DEFAULTS,
    ) -> None:
        """
        Args:
            definition: The user's module.
            minibatch_size: Samples per minibatch.
            seed: Seed of the job; initial values depend on it.
            metadata: Passed to the user's `feed`.
            on_parameter_server: Rows of `elasticdl.layers.Embedding`, and of large `keras.layers.Embedding`, are passed
                to each call; otherwise each such layer has an ordinary variable.
            mode: Mode of the job's tasks.
            settings: Other settings.
        """
        set_policy(settings.precision)
        self._precision = settings.precision
        self._mode = mode
        self._needed = settings.needed
        self._evaluates = settings.evaluates
        self._definition = definition
        self._minibatch_size = minibatch_size
        self._seed = seed
        self._metadata = metadata
        self._on_parameter_server = on_parameter_server
        self._in_groups = settings.in_groups
        self._jit_compile = settings.jit_compile
        self._fixed_global_batch = settings.fixed_global_batch
        self._threshold_bytes = settings.embedding_threshold if on_parameter_server else None
        self._pipelines: dict[Mode, Pipeline] = {}
        self._feeds: dict[Mode, TracedFeed] = {}
        self._model: BuiltModel | None = None
        self._made_steps: CompiledSteps | None = None
        self._made_all_reduce_step: AllReduceStep | None = None
        self._made_optimizer: Any = None
        self._made_measures: Measures | None = None
        self._made_meter: DeviceMeter | None = None
        self._made_callbacks: list[Any] | None = None
        self._made_rates: LearningRates | None = None
        self._asked_rate: tuple[int, float | None] = (0, None)  # version and scheduler's rate, as last asked for

    @property
    def device(self) -> str:
        """See `Framework.device`: TensorFlow's results on a GPU are copied to main memory first."""
        return "cpu"

    @property
    def device_meter(self) -> DeviceMeter:
        """See `Inference.device_meter`."""
        if self._made_meter is None:
            self._built()
            self._made_meter = device_meter()
        return self._made_meter

    def report(self) -> ModelReport:
        """See `Framework.report`."""
        built = self._built()
        path = self._definition.path
        check_policy(path, built.model, self._precision, lambda: self._examples(built.inputs).features)
        check_complete(built.definition, [name for name in self._needed if name != "eval_metrics_fn"])
        self._examples(built.inputs)
        optimizer = ""
        if built.definition.optimizer is not None:
            optimizer = describe_optimizer(self._optimizer())
            if self._on_parameter_server and self._mode is Mode.TRAINING:
                check_for_parameter_server(path, self._optimizer(), built.model, built.assigned)
            if self._in_groups and self._mode is Mode.TRAINING:
                check_for_groups(path, built.model)
        self._rates().at(0, 0)
        measures = list(self._measures())
        callbacks = self._callbacks() if self._mode is not Mode.PREDICTION else []  # callbacks monitor metrics
        rules = hooks.rules_of(self._definition.path, callbacks, {one.name: one.maximize for one in measures})
        if any(rule["path"].endswith(".keras") for rule in rules.saving):
            check_keras_file(self._definition.path, built.model)
        has_callbacks = hooks.has(callbacks, hooks.END) or bool(rules.export_paths)
        metrics = tuple(measure.name for measure in measures)
        if not metrics:
            check_complete(built.definition, [name for name in self._needed if name == "eval_metrics_fn"])
        if self._mode is Mode.TRAINING:
            check_compiled(self._definition, built.model, self._optimizer(), metrics)
            if taken := taken_from_compile(self._definition, built.definition):
                _log.info("The model is compiled: %s are those of compile()", ", ".join(taken))
        return ModelReport(built.variables(), built.tables(), optimizer, metrics, has_callbacks, rules)

    def initial(self) -> Parameters:
        """See `Framework.initial`."""
        return self._built().initial

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """See `Framework.batches`."""
        mode = Mode(mode)
        if mode not in self._pipelines:
            built, feed = self._built(), self._feed(mode)
            placement = built.placement or Placement()
            tables = dict(sorted(placement.tables.items()))
            self._pipelines[mode] = Pipeline(
                mode,
                feed,
                built.inputs,
                self._minibatch_size,
                tables,
                lambda features: built.make_ids(features, mode),
            )
        return self._pipelines[mode].batches(tasks)

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        """See `Framework.gradients`."""
        self.device_meter.sample()
        with self._labels_blamed(batch):
            step = self._steps().gradients(batch.data, batch.size, self._batch_spec(batch), parameters, rows, seed)
        if step.not_finite:
            step = replace(step, not_finite=step.not_finite + self._data_flaws(batch))
        return step

    def learning_rate(self, epoch: int, version: int) -> float | None:
        """See `Framework.learning_rate`."""
        rate = self._rates().at(epoch, version)
        if rate is None and self._made_all_reduce_step is not None:
            rate = self._made_all_reduce_step.scheduled_rate(version)
        self._asked_rate = version, rate
        return rate

    def rate_in_use(self) -> float | None:
        """See `Framework.rate_in_use`."""
        version, rate = self._asked_rate
        return rate if rate is not None else own_rate_at(self._made_optimizer, version)

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        """See `Framework.train`."""
        self.device_meter.sample()
        with self._labels_blamed(batch):
            loss, is_finite = self._steps().train(batch.data, self._batch_spec(batch), seed, learning_rate)
        if not is_finite or not math.isfinite(loss):
            what = "The gradient is not finite" if math.isfinite(loss) else f"The loss is {loss}"
            raise NotFiniteStep(f"{what}{self._data_flaws(batch)}")
        return loss

    def local_gradient(self, shares: Sequence[Share], ready: Callable[[Any], None]) -> LocalGradient:
        """See `Framework.local_gradient`."""
        self.device_meter.sample()
        spec = self._batch_spec(shares[0].batch) if shares else None
        with self._labels_blamed(*(share.batch for share in shares)):
            gradient = self._all_reduce_step().local_gradient(shares, spec)
        for position in gradient.not_finite:
            gradient.not_finite[position] += self._data_flaws(shares[position].batch)
        return gradient

    def sums(self) -> list[str]:
        """See `DescribesSums`: the code in `call` determines which variables a step assigns."""
        built = self._built()
        gradients = [f"the gradient of {v.path} {tuple(v.shape)}" for v in built.trainable]
        return gradients + [f"the change of {v.path} {tuple(v.shape)}" for v in built.changed]

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        """See `Framework.apply_gradient`."""
        self._all_reduce_step().apply_gradient(gradient, learning_rate)

    def predictions(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Any:
        """Return the outputs for a minibatch of any mode, as tensors; `parameters` as in `Evaluation.update`."""
        self.device_meter.sample()
        return self._steps().predictions(batch.data, self._batch_spec(batch), parameters, rows)

    def predict(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Any:
        """See `Inference.predict`."""
        return arrays_of(self.predictions(batch, parameters, rows))

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """See `Framework.state`."""
        return {name: np.array(variable.numpy()) for name, variable in self._state_variables().items()}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See `Framework.load_state`.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        whose = f"model or optimizer than {self._definition.path}"
        assign_all(self._state_variables(), state, whose, "or another --checkpoint_dir")

    def load_weights(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See `Framework.load_weights`."""
        load_weights(self._definition.path, self._built(), state)

    def evaluation(self) -> Evaluation:
        """See `Framework.evaluation`."""
        return KerasEvaluation(self._measures(), self._evaluated)

    def export(
        self, path: str, parameters: Parameters | None, tables: Iterable[TableRows], model_file: bool = True
    ) -> None:
        """See `Framework.export`."""
        built = self._built()
        if parameters is not None:
            self._steps().assign(parameters)
        spec = self._examples(built.inputs).features
        export_model(path, built.model, built.inputs, built.placement, tables, spec, model_file)

    def begin_training(self) -> None:
        """See `Framework.begin_training`."""
        user_call(lambda: self._call(hooks.BEGIN), f"{self._definition.path}: {hooks.BEGIN}")

    def end_epoch(self, parameters: Parameters | None, epoch: int, logs: Mapping[str, float]) -> str:
        """See `Framework.end_epoch`.  Rows of tables on the parameter servers are not in the model."""
        return self._call(hooks.EPOCH, (epoch, dict(logs)), parameters)

    def end_evaluation(self, step: int, results: Mapping[str, float]) -> str:
        """See `Framework.end_evaluation`."""
        called = [self._call(one, (dict(results),), params={"step": step}) for one in (hooks.EVALUATION, hooks.TEST)]
        return "; ".join(filter(None, called))

    def end_training(self, parameters: Parameters | None, output: str) -> None:
        """See `Framework.end_training`.  Rows of tables on the parameter servers are not in the model."""
        self._call(hooks.END, (), parameters, {"saved_model_path": output})

    def _call(
        self,
        hook: str,
        arguments: tuple[Any, ...] = (),
        parameters: Parameters | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> str:
        if not hooks.has(self._callbacks(), hook):
            return ""
        if parameters is not None:
            self._steps().assign(parameters)
        known = {"batch_size": self._minibatch_size, **(params or {})}
        model, optimizer = self._built().model, self._optimizer()
        normalize_by_weights(model)
        must_keep = (self._in_groups or self._on_parameter_server) and hook != hooks.END  # END: training is over
        kept = hooks.KeptModel(self._definition.path, model, optimizer) if must_keep else None
        with hooks.optimizer_within(model, optimizer):
            return hooks.call(self._callbacks(), hook, arguments, model, known, kept)

    def _callbacks(self) -> list[Any]:
        if self._made_callbacks is None:
            self._made_callbacks = hooks.make_callbacks(self._definition.path, self._definition.callbacks)
        return self._made_callbacks

    def _rates(self) -> LearningRates:
        if self._made_rates is None:
            self._made_rates = LearningRates(self._definition.path, self._callbacks(), self._optimizer)
        return self._made_rates

    def _built(self) -> BuiltModel:
        if self._model is None:
            self._model = build_model(
                self._definition, self._seed, self._threshold_bytes, self._examples, self._mode, self._minibatch_size
            )
        return self._model

    def _optimizer(self) -> Any:
        built = self._built()
        if self._made_optimizer is None and built.definition.optimizer is not None:
            self._made_optimizer = make_optimizer(built.definition, built.model, self._on_parameter_server)
        return self._made_optimizer

    def _steps(self) -> CompiledSteps:
        if self._made_steps is None:
            self._made_steps = CompiledSteps(self._built(), self._optimizer(), self._minibatch_size, self._jit_compile)
        return self._made_steps

    def _all_reduce_step(self) -> AllReduceStep:
        if self._made_all_reduce_step is None:
            self._made_all_reduce_step = AllReduceStep(
                self._built(), self._optimizer(), self._minibatch_size, self._jit_compile, self._fixed_global_batch
            )
        return self._made_all_reduce_step

    def _measures(self) -> Measures:
        if self._made_measures is None and self._mode is Mode.PREDICTION:  # there may be no labels
            self._made_measures = Measures([], self._example)
        if self._made_measures is None:
            made: list[TensorMeasure] = []
            definition = self._built().definition
            if definition.eval_metrics_fn is not None:
                defined = user_call(definition.eval_metrics_fn, f"{definition.path}: eval_metrics_fn()")
                made = measures_of(definition.path, defined, self._example)
            is_watched = hooks.watches_loss(self._callbacks()) or self._definition.loss is None  # as `evaluate` has it
            if definition.loss is not None and is_watched and all(one.name != "loss" for one in made):
                made.append(LossMeasure())
            self._made_measures = Measures(made, self._example)
        return self._made_measures

    def _example(self) -> Evaluated:
        mode = Mode.EVALUATION if self._evaluates else self._mode  # `dataset` may support no evaluation
        built = self._built()
        num_samples = example_size(built.model, self._minibatch_size)
        examples = take_apart(mode, zeros_like_spec(self._spec(mode), num_samples))
        features = built.inputs.matched(examples.features)
        what = f"{self._definition.path}: the model, called with zeros of the data's shapes,"
        with states_kept(built.model):
            predictions = user_call(lambda: call_model(built.model, features, training=False), what)
        return by_output(built.model, Evaluated(examples.labels, predictions, tf.zeros(())))

    def _evaluated(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Evaluated:
        labels, model = take_apart(Mode.EVALUATION, batch.data.element).labels, self._built().model
        if not any(isinstance(measure, LossMeasure) for measure in self._measures()):
            return by_output(model, Evaluated(labels, self.predictions(batch, parameters, rows)))
        with self._labels_blamed(batch):
            evaluated = self._steps().evaluated(batch.data, self._batch_spec(batch), parameters, rows)
        return by_output(model, Evaluated(labels, *evaluated))

    def _feed(self, mode: Mode) -> TracedFeed:
        if mode not in self._feeds:
            self._feeds[mode] = traced_feed(self._definition, mode, self._metadata, self._minibatch_size)
        return self._feeds[mode]

    def _spec(self, mode: Mode) -> Any:
        """Return the spec of a minibatch of a mode, without reading data."""
        return user_call(self._feed(mode).probe, f"{self._definition.path}: feed(dataset, {mode.value!r}, metadata)")

    def _examples(self, inputs: ModelInputs) -> Examples:
        """Return the spec of a minibatch, with features matched to the model's inputs."""
        fed = self._fed_examples()
        return replace(fed, features=inputs.matched(fed.features))

    def _fed_examples(self) -> Examples:
        """Return the spec of a minibatch, for the first mode that `feed` supports (there may be no labels)."""
        if self._mode is not Mode.TRAINING:
            return take_apart(self._mode, self._spec(self._mode))
        try:
            return take_apart(Mode.TRAINING, self._spec(Mode.TRAINING))
        except ModelDefinitionError:
            if self._definition.loss is not None and self._definition.optimizer is not None:
                raise
            return take_apart(Mode.PREDICTION, self._spec(Mode.PREDICTION))

    def _data_flaws(self, batch: Batch) -> str:
        examples = take_apart(batch.data.mode, batch.data.element)
        features = self._built().inputs.named(examples.features)
        found = data_flaws(features, examples.labels, _array, self._metadata.label_column)
        flaw = self._label_flaw(batch)
        return flaw.explained() if flaw is not None else found

    def _label_flaw(self, batch: Batch) -> LabelFlaw | None:
        loss = self._built().loss
        examples = take_apart(batch.data.mode, batch.data.element)
        taken: ClassLabels | ProbabilityLabels | None = None
        if loss is not None and loss.num_classes is not None:
            taken = ClassLabels(loss.num_classes, getattr(self._built().definition.loss, "ignore_class", None), True)
        elif loss is not None and loss.is_binary and examples.weights is None:  # a weight 0 may exclude a sample
            taken = ProbabilityLabels()
        return label_flaw(examples.labels, taken, self._metadata.label_column, _LOOKUP, _array)

    def _labels_blamed(self, *batches: Batch) -> AbstractContextManager[None]:
        samples_per_batch = self._minibatch_size if self._definition.feed is None else None
        loss = self._built().loss
        is_binary = loss is not None and loss.is_binary
        are_wrong = is_binary and not all(are_probabilities(_array(batch.data.first_label)) for batch in batches)
        return labels_blamed(batches, self._label_flaw, samples_per_batch, are_wrong)

    def _batch_spec(self, batch: Batch) -> Any:
        return self._pipelines[batch.data.mode].spec

    def _state_variables(self) -> dict[str, Any]:
        built, optimizer = self._built(), self._optimizer()
        if optimizer is None:
            raise ModelDefinitionError(f"{self._definition.path} has no optimizer.")
        build_optimizer(optimizer, built.trainable)
        weights = [*built.trainable, *built.non_trainable, *built.own]
        named = {f"model/{name}": v for name, v in zip(unique_names(weights), weights, strict=True)}
        slots = list(optimizer.variables)
        return named | {f"optimizer/{name}": v for name, v in zip(unique_names(slots), slots, strict=True)}


def _array(part: Any) -> npt.NDArray[Any] | None:
    return part.numpy() if isinstance(part, tf.Tensor) else None
