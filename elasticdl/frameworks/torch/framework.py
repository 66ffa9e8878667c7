"""`TorchFramework`: the port `Framework` on PyTorch.  It only connects the other modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any

import numpy.typing as npt
import torch

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
from elasticdl.frameworks.metrics import make_measures
from elasticdl.frameworks.torch import optimizer as hooks
from elasticdl.frameworks.torch.computation import (
    Computation,
    LossScale,
    device_meter,
    keep_threads_here,
    limit_threads,
)
from elasticdl.frameworks.torch.gradients import ModuleGradients, finiteness_of
from elasticdl.frameworks.torch.inference import (
    CountingMeasure,
    TorchEvaluation,
    TorchFunctionMeasure,
    arrays_of,
    export_model,
    load_file,
    load_weights,
    make_measure,
)
from elasticdl.frameworks.torch.input_processes import InputProcesses
from elasticdl.frameworks.torch.losses import ModuleLoss, backward
from elasticdl.frameworks.torch.model import BuiltModule, as_array, build_model
from elasticdl.frameworks.torch.optimizer import Rates, check_shards, describe_optimizer, make_optimizer
from elasticdl.frameworks.torch.pipeline import TensorPipeline
from elasticdl.frameworks.torch.randomness import seed_step
from elasticdl.frameworks.torch.samples import Feed, moved
from elasticdl.frameworks.torch.state import ModuleState
from elasticdl.frameworks.user_code import user_call
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ModelDefinitionError

_IGNORED = -100  # default `ignore_index` of PyTorch's cross entropy
_LOOKUP = "{{text: number for number, text in enumerate({})}}"


class TorchFramework:
    """See `Framework`.  The model is built by the first call that needs it."""

    def __init__(
        self,
        definition: ModelDefinition,
        minibatch_size: int,
        seed: int,
        metadata: Metadata,
        on_parameter_server: bool = False,
        overlaps: bool = True,
        computation: Computation | None = None,
    ) -> None:
        """
        Args:
            definition: The user's module.
            minibatch_size: Samples per minibatch.
            seed: Seed of the job; initial values depend on it.
            metadata: Passed to the user's `feed`.
            on_parameter_server: The job uses parameter servers, which is not supported with PyTorch.
            overlaps: See `ModuleGradients`.
            computation: How steps are computed; None: only as the module specifies.

        Raises:
            ModelDefinitionError: The job uses parameter servers, or `loss` or `optimizer` is a name.
        """
        if on_parameter_server:
            raise ModelDefinitionError(
                f"{definition.path}: ParameterServerStrategy trains Keras models, and this one is written for PyTorch.",
                "Use --distribution_strategy=AllReduceStrategy, or Local for one worker.",
            )
        for name in ("loss", "optimizer"):
            given = getattr(definition, name)
            if given is not None and not callable(given):
                raise ModelDefinitionError(
                    f"{definition.path}: {name} is {given!r}: names and configs are taken for Keras models alone.",
                    "Give PyTorch's own: loss = torch.nn.MSELoss(), def optimizer(model): return torch.optim.Adam(…).",
                )
        limit_threads()
        keep_threads_here()
        self._definition = definition
        self._minibatch_size = minibatch_size
        self._seed = seed
        self._metadata = metadata
        self._overlaps = overlaps
        self._computation = computation or Computation()
        self._scale = LossScale(self._computation.scales_loss)
        self._input: InputProcesses | None = None
        self._model: BuiltModule | None = None
        self._made_optimizer: Any = None
        self._made_state: ModuleState | None = None
        self._made_gradients: ModuleGradients | None = None
        self._made_loss: ModuleLoss | None = None
        self._made_measures: list[CountingMeasure] | None = None
        self._made_meter: DeviceMeter | None = None
        self._made_callbacks: list[Any] | None = None
        self._rates = Rates(definition, lambda: make_optimizer(definition, self._as_built()))
        self._features: Any = None  # features of the newest minibatch: an example for the export

    @property
    def device(self) -> str:
        """See `Framework.device`."""
        return str(self._built().device)

    @property
    def device_meter(self) -> DeviceMeter:
        """See `Inference.device_meter`."""
        if self._made_meter is None:
            self._made_meter = device_meter(self._built().device)
        return self._made_meter

    def report(self) -> ModelReport:
        """See `Framework.report`."""
        built = self._built()
        optimizer = ""
        if self._definition.optimizer is not None:
            optimizer = describe_optimizer(self._optimizer())
            self._rates.check()
        measures, callbacks = self._measures(), self._callbacks()
        rules = hooks.rules_of(self._definition.path, callbacks, {one.name: one.maximize for one in measures})
        has_callbacks = hooks.has(callbacks, hooks.END) or bool(rules.export_paths)
        metrics = tuple(measure.name for measure in measures)
        return ModelReport(built.variables(), (), optimizer, metrics, has_callbacks, rules)

    def initial(self) -> Parameters:
        """See `Framework.initial`; after training has begun, the current values."""
        return self._built().values()

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """See `Framework.batches`."""
        feed = Feed.of(self._definition, Mode(mode), self._metadata, self._minibatch_size)
        return TensorPipeline(Mode(mode), feed, self._input).batches(tasks)

    def feed_in(self, processes: InputProcesses) -> None:
        """Run `feed` in separate processes from now on, instead of a thread of this process."""
        self._input = processes

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        """Raise: PyTorch models are not trained on parameter servers."""
        raise ModelDefinitionError(f"{self._definition.path}: PyTorch models are not trained on parameter servers.")

    def learning_rate(self, epoch: int, version: int) -> float | None:
        """See `Framework.learning_rate`: the first parameter group's rate; the others' are kept for the next step."""
        return self._rates.at(epoch, version)

    def rate_in_use(self) -> float | None:
        """See `Framework.rate_in_use`."""
        return None if self._made_optimizer is None else float(self._made_optimizer.param_groups[0]["lr"])

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        """See `Framework.train`."""
        self.device_meter.sample()
        optimizer, parameters = self._optimizer(), list(self._built().parameters.values())
        with self._labels_blamed(batch):
            loss, finiteness, num_repeats = self._plain_gradient(batch, seed)
        self._computation.clip(parameters)
        self._rates.set(optimizer, learning_rate)
        optimizer.step()
        self._scale.count_step(num_repeats)
        value = float(loss)
        if not (math.isfinite(value) and math.isfinite(float(finiteness))):
            what = "The gradient is not finite" if math.isfinite(value) else f"The loss is {value}"
            raise NotFiniteStep(f"{what}{self._data_flaws(batch)}")
        return value

    def local_gradient(
        self, shares: Sequence[Share], ready: Callable[[Any], None], num_repeats: int = 0
    ) -> LocalGradient:
        """See `Framework.local_gradient`.

        Args:
            shares: See `Framework.local_gradient`.
            ready: See `Framework.local_gradient`.
            num_repeats: How often the step has overflowed; see `LossScale`.
        """
        self.device_meter.sample()
        if shares:
            self._features = shares[0].batch.data.features
        with self._labels_blamed(*(share.batch for share in shares)):
            gradient = self._gradients().local_gradient(shares, ready, num_repeats)
        gradient.repeat = lambda: (
            partial(self.local_gradient, num_repeats=num_repeats + 1) if self._gradients().has_overflowed else None
        )
        explained: set[int] = set()
        # Do not capture the gradient itself: this cycle would keep its minibatch until garbage collection.
        plain_told, run_ahead, not_finite = gradient.told, gradient.run_ahead, gradient.not_finite
        computed = [share.batch for share in shares]  # by the device; its errors appear when the host waits for it
        ahead: list[Batch] = []  # minibatches begun ahead, with the same delay of errors

        def explain() -> None:
            for position in not_finite.keys() - explained:
                explained.add(position)
                not_finite[position] += self._data_flaws(shares[position].batch)

        def told() -> Floats:
            is_one_task = all(batch.lease == computed[0].lease for batch in ahead)  # else it has samples of two
            ahead_samples = self._samples_per_batch if is_one_task else None
            with (
                labels_blamed(computed, self._label_flaw, self._samples_per_batch, False),
                labels_blamed(ahead, self._label_flaw, ahead_samples, False),
            ):
                numbers = plain_told()
            explain()
            return numbers

        def run_on(learning_rate: float | None, following: Share) -> None:
            ahead.append(following.batch)
            assert run_ahead is not None
            run_ahead(learning_rate, following)

        explain()
        gradient.told = told
        gradient.run_ahead = run_on if run_ahead is not None else None
        return gradient

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        """See `Framework.apply_gradient`."""
        self._gradients().apply_gradient(gradient, learning_rate)

    def predictions(self, batch: Batch, parameters: Parameters | None) -> Any:
        """Return the model's outputs for a minibatch of any mode; `parameters` as in `Evaluation.update`."""
        built = self._built()
        if parameters is not None:
            built.assign(parameters)
        built.module.eval()
        self.device_meter.sample()
        with torch.inference_mode():
            return built.predict(self._examples(batch).features)

    def predict(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Any:
        """See `Inference.predict`."""
        return arrays_of(self.predictions(batch, parameters))

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """See `Framework.state`."""
        return {**self._state().arrays(), **self._scale.arrays()}

    def snapshot(self) -> Callable[[], dict[str, npt.NDArray[Any]]]:
        """See `TakesSnapshots`."""
        arrays, scale = self._state().snapshot(), self._scale.arrays()
        return lambda: {**arrays(), **scale}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See `Framework.load_state`.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        self._state().load(state)
        self._scale.load(state)

    def shard_sizes(self) -> list[int]:
        """See `ShardsOptimizer`; shards are in the order in which gradients are handed over."""
        parameters = self._built().parameters
        return [parameters[name].numel() for name in self._shard_names()]

    def keep_shards(self, numbers: Collection[int]) -> None:
        """See `ShardsOptimizer.keep_shards`."""
        order, names = self._gradients().order, self._shard_names()
        self._gradients().update_only({order[number] for number in numbers})
        self._state().keep({names[number] for number in numbers})

    def shard(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """See `ShardsOptimizer.shard`."""
        return self._state().slots_of(self._shard_names()[number])

    def parameter(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """See `ShardsOptimizer.parameter`."""
        return self._state().parameter(self._shard_names()[number])

    def load_shards(self, shards: Mapping[int, Mapping[str, npt.NDArray[Any]]]) -> None:
        """See `ShardsOptimizer.load_shards`."""
        self._state().load_parts(array for arrays in shards.values() for array in arrays.items())

    def shards_of(self, state: Mapping[str, npt.NDArray[Any]]) -> dict[int, dict[str, npt.NDArray[Any]]]:
        """See `ShardsOptimizer.shards_of`."""
        slots = self._state().slots_by_parameter(state)
        return {number: slots[name] for number, name in enumerate(self._shard_names()) if name in slots}

    def shard_bytes(self) -> int:
        """See `ShardsOptimizer.shard_bytes`."""
        return self._state().slot_bytes()

    def shared_state(self) -> dict[str, npt.NDArray[Any]]:
        """See `ShardsOptimizer.shared_state`."""
        return {**self._state().shared_arrays(), **self._scale.arrays()}

    def load_shared_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See `ShardsOptimizer.load_shared_state`."""
        self._state().load_shared(state)
        self._scale.load(state)

    def begin_exchange(self, owner_of: Sequence[int], rank: int) -> list[tuple[int, Any]]:
        """See `ShardsOptimizer.begin_exchange`."""
        return self._gradients().begin_exchange(owner_of, rank)

    def end_exchange(self) -> None:
        """See `ShardsOptimizer.end_exchange`."""
        self._gradients().end_exchange()

    def load_weights(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See `Framework.load_weights`."""
        load_weights(self._definition.path, self._built(), state)

    def load_file(self, path: str) -> None:
        """Load the values of a file with the module's state_dict.

        Raises:
            CheckpointError: The file is not a state_dict, or belongs to another model.
        """
        load_file(self._definition.path, self._built(), path)

    def evaluation(self) -> Evaluation:
        """See `Framework.evaluation`."""
        return TorchEvaluation(self._measures(), self.predictions, self._labels)

    def export(
        self, path: str, parameters: Parameters | None, tables: Iterable[TableRows], model_file: bool = True
    ) -> None:
        """See `Framework.export`; there are no tables."""
        built = self._built()
        if parameters is not None:
            built.assign(parameters)
        export_model(path, built, self._features)

    def end_training(self, parameters: Parameters | None, output: str) -> None:
        """See `Framework.end_training`."""
        hooks.call(self._callbacks(), hooks.END, self._module(parameters), output)

    def begin_training(self) -> None:
        """See `Framework.begin_training`."""
        module, callbacks = self._module(None), self._callbacks()
        user_call(lambda: hooks.call(callbacks, hooks.BEGIN, module), f"{self._definition.path}: {hooks.BEGIN}")

    def end_epoch(self, parameters: Parameters | None, epoch: int, logs: Mapping[str, float]) -> None:
        """See `Framework.end_epoch`."""
        hooks.call(self._callbacks(), hooks.EPOCH, self._module(parameters), epoch, dict(logs))

    def end_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """See `Framework.end_evaluation`."""
        hooks.call(self._callbacks(), hooks.EVALUATION, self._module(None), step, dict(results))

    def _plain_gradient(self, batch: Batch, seed: int) -> tuple[Any, Any, int]:
        """Compute the gradient of a minibatch in the parameters, for the Local strategy.

        Returns:
            The detached loss; the gradient's `finiteness_of`; how often it has overflowed.
        """
        built, scale = self._built(), self._scale
        starts = [buffer.tensor.clone() for buffer in built.buffers] if self._computation.scales_loss else []
        for num_repeats in count():
            loss = self._backward(batch, seed, scale.at(num_repeats))
            gradients = [p.grad for p in built.parameters.values() if p.grad is not None]
            finiteness = finiteness_of(gradients, built.device)
            # Wait here only for a loss that may overflow; otherwise the caller waits when it reads the values.
            is_over = not scale.may_overflow(num_repeats) or math.isfinite(float(finiteness))
            if is_over or not math.isfinite(float(loss)):
                break
            for buffer, start in zip(built.buffers, starts, strict=True):
                buffer.put(start)
        if self._computation.scales_loss:
            torch._foreach_div_(gradients, scale.at(num_repeats))
        return loss, finiteness, num_repeats

    def _backward(self, batch: Batch, seed: int, scale: float) -> Any:
        built = self._built()
        built.train()
        self._optimizer().zero_grad()
        seed_step(seed, built.device)
        losses = []
        for weight, samples in self._examples(batch).parts(batch.size, self._computation.part_size):
            loss = self._loss()(samples)
            losses.append(loss.detach() if weight == 1.0 else loss.detach() * weight)
            backward(loss, weight * scale)
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _module(self, parameters: Parameters | None) -> Any:
        """Return the user's module in evaluation mode, for callbacks."""
        built = self._built()
        if parameters is not None:
            built.assign(parameters)
        built.module.eval()
        return built.module

    def _built(self) -> BuiltModule:
        """Return the model as it is between two steps; the code of a step uses `_gradients`."""
        if self._made_gradients is not None:
            self._made_gradients.settle()
        return self._as_built()

    def _as_built(self) -> BuiltModule:
        """Return the model, possibly in the middle of a step."""
        if self._model is None:
            self._model = build_model(self._definition, self._seed, self._computation)
        return self._model

    def _optimizer(self) -> Any:
        if self._made_optimizer is None:
            if self._definition.optimizer is None:
                raise ModelDefinitionError(f"{self._definition.path} has no optimizer.", "Define optimizer(model).")
            made = make_optimizer(self._definition, self._built())
            if self._computation.shards_optimizer:
                check_shards(self._definition.path, self._built(), made)
            self._made_optimizer = made
        return self._made_optimizer

    def _state(self) -> ModuleState:
        built = self._built()
        if self._made_state is None:
            is_sharded = self._computation.shards_optimizer
            self._made_state = ModuleState(self._definition.path, built, self._optimizer(), is_sharded)
        return self._made_state

    def _shard_names(self) -> list[str]:
        names = list(self._built().parameters)
        return [names[number] for number in self._gradients().order]

    def _loss(self) -> ModuleLoss:
        if self._made_loss is None:
            if self._definition.loss is None:
                raise ModelDefinitionError(f"{self._definition.path} has no loss.", "Define loss(labels, predictions).")
            self._made_loss = ModuleLoss(self._definition.path, self._built(), self._definition.loss)
        return self._made_loss

    def _gradients(self) -> ModuleGradients:
        if self._made_gradients is None:
            self._made_gradients = ModuleGradients(
                self._built(), self._loss(), self._optimizer(), self._rates, self._overlaps, self._scale
            )
        return self._made_gradients

    def _measures(self) -> list[CountingMeasure]:
        if self._made_measures is None:
            made: list[CountingMeasure] = []
            if self._definition.eval_metrics_fn is not None:
                path = self._definition.path
                defined = user_call(self._definition.eval_metrics_fn, f"{path}: eval_metrics_fn()")
                made = make_measures(path, defined, make_measure)
            loss = self._definition.loss
            if loss is not None and hooks.watches_loss(self._callbacks()) and all(one.name != "loss" for one in made):
                made.append(TorchFunctionMeasure("loss", loss, None, maximize=False))
            self._made_measures = made
        return self._made_measures

    def _callbacks(self) -> list[Any]:
        if self._made_callbacks is None:
            self._made_callbacks = hooks.make_callbacks(self._definition.path, self._definition.callbacks)
        return self._made_callbacks

    def _examples(self, batch: Batch) -> Any:
        """Return the samples of a minibatch on the model's device."""
        self._features = batch.data.features
        return batch.data.on(self._built().device)

    def _labels(self, batch: Batch) -> Any:
        return moved(batch.data.labels, self._built().device)

    def _data_flaws(self, batch: Batch) -> str:
        return data_flaws(batch.data.features, batch.data.labels, _array, self._metadata.label_column)

    def _label_flaw(self, batch: Batch) -> LabelFlaw | None:
        labels, outputs = batch.data.labels, self._loss().outputs_shape
        is_of_classes = isinstance(labels, torch.Tensor) and outputs is not None and len(outputs) == labels.dim() + 1
        taken: ClassLabels | ProbabilityLabels | None = None
        if self._loss().is_binary and batch.data.weights is None:  # a weight 0 may exclude a sample
            taken = ProbabilityLabels()
        elif outputs is not None and is_of_classes:
            taken = ClassLabels(outputs[1], getattr(self._definition.loss, "ignore_index", _IGNORED), False)
        return label_flaw(labels, taken, self._metadata.label_column, _LOOKUP, _array)

    @property
    def _samples_per_batch(self) -> int | None:
        return self._minibatch_size if self._definition.feed is None else None

    def _labels_blamed(self, *batches: Batch) -> AbstractContextManager[None]:
        is_binary = self._loss().is_binary
        are_wrong = is_binary and not all(are_probabilities(_array(batch.data.labels)) for batch in batches)
        return labels_blamed(batches, self._label_flaw, self._samples_per_batch, are_wrong)


def _array(part: Any) -> npt.NDArray[Any] | None:
    return as_array(part) if isinstance(part, torch.Tensor) else None
