"""Build the user's Keras model; its initial values depend only on the module and the seed.

Owns the content of the flat vectors and the order of variables in them; it does not train.

All random numbers in a step depend only on the step's seed: `StepSeeds` sets Keras's seed generators from it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from elasticdl.frameworks.framework import Floats, Mode, Parameters, Table, Variable
from elasticdl.frameworks.keras.compiled import (
    call_model,
    check_overrides,
    completed,
    leaves_loss_to_compile,
    may_do_without_loss,
    no_loss,
)
from elasticdl.frameworks.keras.embedding import Swap, Unmovable, describe_table
from elasticdl.frameworks.keras.input.declared_inputs import ModelInputs, nested_models_checked
from elasticdl.frameworks.keras.losses import TotalLoss
from elasticdl.frameworks.keras.operations import assigned_beside, assigned_variables, ids_function
from elasticdl.frameworks.keras.samples import Examples, zeros_like_spec
from elasticdl.frameworks.user_code import user_call
from elasticdl.layers import functions
from elasticdl.layers.placement import Placement, embedding_placement
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ElasticDLError, ModelDefinitionError

_log = logging.getLogger("elasticdl.keras")
_KNOWN_PACKAGES = frozenset({"keras", "elasticdl", "elasticdl_preprocessing"})
_FRAMEWORKS = frozenset({"tensorflow", "numpy", "ml_dtypes", "builtins"})  # their functions assign no such variable


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model with all of its variables.

    Attributes:
        definition: The module's definition, completed with the arguments of `compile`.
        inputs: The declared inputs.
        trainable: Keras variables in the trainable vector, in order.
        non_trainable: Keras variables in the non-trainable vector, in order.
        own: Other state, which never leaves the process.
        assigned: Trainable variables that the model itself assigns in a training step, as SpectralNormalization does.
        keeps_state: A training step assigns some of the state in `own`.
        loss: The loss of a minibatch; None: the module has none.
        placement: Placement of its embedding tables; None: they are ordinary variables.
    """

    definition: ModelDefinition
    model: Any
    inputs: ModelInputs
    trainable: tuple[Any, ...]
    non_trainable: tuple[Any, ...]
    own: tuple[Any, ...]
    assigned: tuple[Any, ...]
    keeps_state: bool
    loss: TotalLoss | None
    placement: Placement | None
    seeds: StepSeeds
    initial: Parameters
    _ids_functions: dict[tuple[Mode, str], Callable[[Any], dict[str, Any]]] = field(default_factory=dict)

    @property
    def changed(self) -> tuple[Any, ...]:
        """The variables that the model may assign in a training step, in the order used to sum their changes."""
        return self.non_trainable + self.assigned

    def variables(self) -> tuple[Variable, ...]:
        """The names and shapes of the trainable variables, then of the others, in order."""
        names = unique_names([*self.trainable, *self.non_trainable])
        return tuple(
            Variable(name, tuple(v.shape), k < len(self.trainable))
            for k, (name, v) in enumerate(zip(names, [*self.trainable, *self.non_trainable], strict=True))
        )

    def tables(self) -> tuple[Table, ...]:
        """The tables on the parameter servers, by name."""
        specs = {} if self.placement is None else self.placement.tables
        return tuple(describe_table(spec) for _, spec in sorted(specs.items()))

    def make_ids(self, features: Any, mode: Mode) -> Callable[[Any], dict[str, Any]]:
        """Return a function from batched features, with this spec, to the ids of each table; see `ids_function`."""
        assert self.placement is not None
        key = (mode, repr(features))
        if key not in self._ids_functions:
            changing = [*self.trainable, *self.seeds.states]
            self._ids_functions[key] = ids_function(self.model, self.placement, features, mode, changing)
        return self._ids_functions[key]


def build_model(
    definition: ModelDefinition,
    seed: int,
    threshold_bytes: int | None,
    examples: Callable[[ModelInputs], Examples],
    mode: Mode,
    minibatch_size: int,
) -> BuiltModel:
    """Build the model and its variables.

    Args:
        definition: The user's module.
        seed: Seed of the job.
        threshold_bytes: Larger tables of `keras.layers.Embedding` are placed on the parameter servers, like all tables
            of `elasticdl.layers.Embedding`; None: there are no parameter servers.
        examples: Returns the spec of a minibatch, with features matched to the model's inputs; called only if the
            model has the user's own code, or tables.
        mode: Mode of the job's tasks.
        minibatch_size: Samples per minibatch.

    Raises:
        ModelDefinitionError: The module raises, does not return a Keras model, or uses something unsupported.
    """
    if threshold_bytes is None:
        return _built(definition, seed, None, None, examples, mode, minibatch_size)
    kept: dict[str, str] = {}
    while True:
        placement = Placement()
        swap = Swap(placement, threshold_bytes, kept)
        try:
            built = _built(definition, seed, placement, swap, examples, mode, minibatch_size)
            if placement.tables:
                user_call(
                    lambda built=built: built.make_ids(examples(built.inputs).features, Mode.TRAINING),  # type: ignore[misc]
                    f"{definition.path}: {definition.symbol}.call",
                )
        except Unmovable as error:
            if error.layer in kept:
                raise
            kept[error.layer] = error.reason
        else:
            swap.log(built.model)
            return built


def _built(
    definition: ModelDefinition,
    seed: int,
    placement: Placement | None,
    swap: Swap | None,
    examples: Callable[[ModelInputs], Examples],
    mode: Mode,
    minibatch_size: int,
) -> BuiltModel:
    _begin_session(seed)
    making = swap.making() if swap is not None else nullcontext()
    with functions.accepted(), functions.inlined(), embedding_placement(placement), making:
        model = user_call(definition.model, f"{definition.path}: {definition.symbol}")
        if not isinstance(model, keras.Model):
            raise ModelDefinitionError(
                f"{definition.path}: {definition.symbol} returned a {type(model).__name__}, not a keras.Model."
            )
        check_overrides(definition.path, model, mode)
        is_of_compile = leaves_loss_to_compile(definition, model)
        definition = completed(definition, model)
        where = f"{definition.path}: {definition.symbol}"
        inputs = ModelInputs.of(where, model)
        with nested_models_checked(where):
            if not _is_built(model):
                example = zeros_like_spec(examples(inputs).features, example_size(model, minibatch_size))
                with states_kept(model):
                    user_call(lambda: call_model(model, example, training=False), f"{where}.call")
            graphs: list[Any] = []  # training graphs, in which the model may assign variables
            if has_own_code(model) or (mode is Mode.TRAINING and _may_assign(model)):
                features = examples(inputs).features
                adds_losses, graph = user_call(lambda: _trace_training(model, features), f"{where}.call")
                graphs.append(graph)
                if adds_losses and may_do_without_loss(definition, model):
                    definition = replace(definition, loss=no_loss)
            loss, of_loss = _make_loss(definition, model, placement, is_of_compile, lambda: examples(inputs))
            graphs += of_loss
        if swap is not None:
            swap.keep_frozen(model)
            swap.drop_strangers(model)
    trainable = tuple(model.trainable_variables)
    check_trainable(definition, trainable)
    others = list({id(v): v for v in model.non_trainable_weights}.values())
    non_trainable = tuple(v for v in others if v.dtype == "float32")
    own = tuple(v for v in others if v.dtype != "float32")
    changing = {id(v) for graph in graphs for v in assigned_variables(graph, [*trainable, *own])}
    assigned = tuple(v for v in trainable if id(v) in changing)
    kept = tuple(v for v in own if id(v) in changing)
    strangers = _assigned_strangers(model, graphs)
    _warn_of_state(model, kept, strangers, mode)
    initial = Parameters(flat_values(trainable), flat_values(non_trainable))
    seeds = StepSeeds(generator_states(model), seed)
    variables = (trainable, non_trainable, own, assigned)
    return BuiltModel(definition, model, inputs, *variables, bool(kept or strangers), loss, placement, seeds, initial)


def _begin_session(seed: int) -> None:
    policy = keras.config.dtype_policy()
    keras.utils.clear_session(free_memory=False)  # restarts the numbering of names
    keras.config.set_dtype_policy(policy)  # of --precision or the module; clear_session resets it
    keras.utils.set_random_seed(seed)


def _assigned_strangers(model: Any, graphs: Sequence[Any]) -> list[str]:
    """Describe variables outside of the model that training graphs assign, such as a layer's own `tf.Variable`.

    Keras's global random generator is not one of them: it is set from the seed of each step.
    """
    fallback = global_state.get_global_attribute(_FALLBACK)
    known = [*model.variables, *(variable for metric in model.metrics for variable in metric.variables)]
    known += [] if fallback is None else [fallback.state]
    return list(dict.fromkeys(_place_of(model, v) for graph in graphs for v in assigned_beside(graph, known)))


def _place_of(model: Any, variable: Any) -> str:
    """Return the attribute of a layer that holds a variable of TensorFlow's, or its name."""
    for layer in model._flatten_layers():
        for name, value in vars(layer).items():
            if value is variable:
                return f"{name} of {layer.name}"
    return str(variable.name)


def _warn_of_state(model: Any, kept: Sequence[Any], strangers: Sequence[str], mode: Mode) -> None:
    """Warn of state that depends on which worker computes a minibatch.

    Args:
        model: The model.
        kept: Variables that a training step assigns and that never leave the process.
        strangers: See `_assigned_strangers`.
        mode: Mode of the job's tasks.
    """
    if kept:
        names = ", ".join(v.path for v in kept)
        _log.warning("Each worker keeps its own value of these variables, which are not float32: %s", names)
    if strangers and mode is Mode.TRAINING:
        _log.warning(
            "A training step assigns variables that are no weights of the model: %s. Each worker keeps its own value, "
            "and no checkpoint holds it: make them by add_weight(..., trainable=False)",
            ", ".join(strangers),
        )
    stateful = [one.name for one in _stateful_layers(model)]
    if stateful and mode is Mode.TRAINING:
        _log.warning(
            "The layers %s are stateful: a state is handed on in the order in which the job computes minibatches, and "
            "where there are several workers theirs are mixed",
            ", ".join(stateful),
        )


def _stateful_layers(model: Any) -> list[Any]:
    return [one for one in model._flatten_layers() if isinstance(one, keras.layers.RNN) and one.stateful]


def example_size(model: Any, minibatch_size: int) -> int:
    """Return the number of samples to try a model with: stateful layers take minibatches of one size alone."""
    return minibatch_size if _stateful_layers(model) else 2


@contextmanager
def states_kept(model: Any) -> Iterator[None]:
    """Let stateful layers forget the calls inside; states that these make begin with zeros."""
    before = [(state, state.numpy()) for state in _states(model)]
    try:
        yield
    finally:
        for state in _states(model):
            state.assign(np.zeros_like(state.numpy()))
        for state, value in before:
            state.assign(value)


def _states(model: Any) -> list[Any]:
    states = keras.tree.flatten([layer.states for layer in _stateful_layers(model)])
    return [state for state in states if state is not None]  # None: the layer is not built


def flat_values(variables: Sequence[Any]) -> Floats:
    """Return the values of variables as one vector."""
    parts = [np.ravel(v.numpy()).astype(np.float32) for v in variables]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def flat_tensor(variables: Sequence[Any]) -> Any:
    """Return the values of variables as one vector, inside a graph."""
    parts = [tf.reshape(v.value, [-1]) for v in variables]
    return tf.concat(parts, 0) if parts else tf.zeros([0])


def assign_flat(variables: Sequence[Any], flat: Any) -> None:
    """Set variables from one vector, inside a graph or outside."""
    for variable, part in zip(variables, split_flat(variables, flat), strict=True):
        variable.assign(part)


def split_flat(variables: Sequence[Any], flat: Any) -> list[Any]:
    """Split one vector into the values of variables, inside a graph or outside."""
    if not variables:
        return []
    parts = tf.split(flat, [_size(v) for v in variables])
    return [tf.reshape(part, variable.shape) for variable, part in zip(variables, parts, strict=True)]


def unique_names(variables: Sequence[Any]) -> list[str]:
    """Return the paths of Keras variables; repeated paths get the suffixes _1, _2 …"""
    names: dict[str, None] = {}  # in order
    for variable in variables:
        name, number = variable.path, 0
        while name in names:
            number += 1
            name = f"{variable.path}_{number}"
        names[name] = None
    return list(names)


def _size(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))


def has_own_code(model: Any) -> bool:
    """Return whether the model or a layer has a class of the user."""
    return any(type(part).__module__.partition(".")[0] not in _KNOWN_PACKAGES for part in model._flatten_layers())


def _may_assign(model: Any) -> bool:
    """Return whether a model of Keras's own layers may assign trainable variables, or variables other than float32.

    The user's functions called by layers may do so, for example an activation or a regularizer of outputs.

    The count of a Normalization layer is ignored, because only `adapt` changes it, and a trace of a large model takes
    seconds.
    """
    layers = list(model._flatten_layers())
    counts = {
        id(v) for layer in layers if isinstance(layer, keras.layers.Normalization) for v in layer.non_trainable_weights
    }
    own = any(v.dtype != "float32" and id(v) not in counts for v in model.non_trainable_weights)
    return own or any(isinstance(one, keras.layers.SpectralNormalization) or _calls_own_code(one) for one in layers)


def _calls_own_code(layer: Any) -> bool:
    """Return whether an attribute of a layer is a function or callable object of the user."""
    return any(callable(value) and _is_own(value) for value in vars(layer).values())


def _is_own(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] not in _KNOWN_PACKAGES | _FRAMEWORKS


def _trace_training(model: Any, features: Any) -> tuple[bool, Any]:
    """Create the variables of layers that the user's code calls only in training, by a trace; nothing is executed.

    Returns:
        Whether `call` adds losses, apart from regularizers of variables; and the graph.
    """
    num_losses = 0

    def call(given: Any) -> Any:
        nonlocal num_losses
        outputs = call_model(model, given, training=True)
        num_losses = len(model.losses)
        return outputs

    graph = tf.function(call, autograph=False).get_concrete_function(features).graph
    num_regularized = sum(getattr(one, "regularizer", None) is not None for one in model.trainable_variables)
    return num_losses > num_regularized, graph


def _make_loss(
    definition: ModelDefinition,
    model: Any,
    placement: Placement | None,
    is_of_compile: bool,
    examples: Callable[[], Examples],
) -> tuple[TotalLoss | None, list[Any]]:
    """Return the loss, and the graphs in which it was traced.

    This creates the variables of layers that only `compute_loss` calls; without labels it is not called.
    """
    if definition.loss is None:
        return None, []
    what = f"{definition.path}: loss = {definition.loss!r}"
    given = (model, definition.loss, placement, definition.loss_weights, is_of_compile)
    loss: TotalLoss = user_call(lambda: TotalLoss(*given), what)
    if loss.is_of_model or loss.is_described:
        if loss.is_of_model:
            what = f"{definition.path}: {definition.symbol}.compute_loss"
        spec = examples()
        if spec.labels is not None:
            parts = (spec.features, spec.labels, spec.weights)
            traced = tf.function(lambda *given: loss(Examples(*given)), autograph=False)
            return loss, [user_call(lambda: traced.get_concrete_function(*parts).graph, what)]
    return loss, []


def _is_built(model: Any) -> bool:
    if isinstance(model, keras.Sequential):
        return bool(model.built)
    return bool(getattr(model, "inputs", None)) and bool(model.built)


def check_trainable(definition: ModelDefinition, variables: Sequence[Any]) -> None:
    """Check the types of trainable variables.

    Raises:
        ModelDefinitionError: A trainable variable is not float32.
    """
    for variable in variables:
        if variable.dtype != "float32":
            raise ModelDefinitionError(
                f"{definition.path}: the trainable variable {variable.path} is {variable.dtype}.",
                "Trainable variables must be float32 (a mixed_float16 policy keeps them so).",
            )


def check_assigned(built: BuiltModel, graph: Any) -> None:
    """Refuse assignments of trainable variables that were not found when the model was built, such as by a loss.

    Args:
        built: The model.
        graph: Graph of a step, before an update.

    Raises:
        ModelDefinitionError: There is such an assignment.
    """
    known = {id(variable) for variable in built.assigned}
    found = assigned_variables(graph, [variable for variable in built.trainable if id(variable) not in known])
    if found:
        raise ModelDefinitionError(
            f"{built.definition.path}: a function beside the model's call, such as loss, assigns its trainable "
            f"variable {found[0].path} in a training step.",
            "Assign it in call of the model or of a layer, with --distribution_strategy=AllReduceStrategy or Local.",
        )


_LARGEST = 2**31 - 1
_FALLBACK = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")  # Keras 3.12 lacks it


def generator_states(model: Any) -> list[Any]:
    """The states of the seed generators of a model's layers, in a fixed order."""
    weights = {id(weight) for weight in model.weights}
    states = [v for v in model.variables if id(v) not in weights and v.name == "seed_generator_state"]
    return list({id(state): state for state in states}.values())


class StepSeeds:
    """Sets the seed generators of a model, and the one that Keras falls back to, inside a compiled function."""

    def __init__(self, states: Sequence[Any], seed: int) -> None:
        self._fallback = _Fallback(seed)
        self._of_layers = tuple(states)
        self.states = (self._fallback.state, *states)

    @property
    def are_needed(self) -> bool:
        """Whether what has been traced draws numbers, or may."""
        return bool(self._of_layers) or self._fallback.is_used

    def install(self) -> None:
        """Make Keras use our global generator; call this where the function is traced.

        Raises:
            ElasticDLError: This Keras keeps its generator elsewhere, so steps would not depend on their seeds.
        """
        global_state.set_global_attribute(_FALLBACK, self._fallback)
        if seed_generator.global_seed_generator() is not self._fallback:
            raise ElasticDLError(
                f"ElasticDL cannot work with the installed keras {keras.__version__}: its global seed generator is not "
                f"the attribute {_FALLBACK} of keras.src.backend.common.global_state.",
                "Install a version that it works with: pip install 'keras>=3.5,<4'.",
            )

    def assign(self, seed: Any) -> None:
        """Call it where the function is traced; `seed` is an int64 scalar."""
        self.install()
        for index, state in enumerate(self.states):
            value = tf.random.stateless_uniform([2], tf.stack([seed, index]), 0, _LARGEST, tf.int64)
            state.assign(tf.cast(value, state.dtype))


class _Fallback(keras.random.SeedGenerator):  # type: ignore[misc]
    """Notes that it was drawn from."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_used = False

    def next(self, ordered: bool = True) -> Any:
        self.is_used = True
        return super().next(ordered)


def as_int64(seed: int) -> np.int64:
    """Return a Python integer reduced to int64, as NumPy scalar: TensorFlow caches tensors of Python's own for ever."""
    return np.int64(seed & (2**62 - 1))
