"""Inspect traced functions: their operations (random ones, Python ones), look-ups of ids, and compilation by XLA.

`IdWatch` finds ids without a row in the embedding layers that have their own variables.  XLA silently uses the nearest
row for such an id, and TensorFlow's error is a page long.  For tables on the parameter servers the pipeline checks ids.

`first_run`: tries XLA once, and does without it if it cannot compile a step or would be slower.

The ids of a minibatch are found by a trace of the model in which embedding layers only record their ids.  The trace is
pruned to the ids and runs inside tf.data, without Python and without writing a variable.
"""

from __future__ import annotations

import inspect
import logging
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

from elasticdl.frameworks.framework import Ids, Mode
from elasticdl.frameworks.keras.compiled import call_model
from elasticdl.layers.embedding import Embedding
from elasticdl.layers.placement import Placement, Recorded, TableSpec
from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.keras")

_STATEFUL_RANDOM = re.compile(
    r"Random(?!Dataset)|Rng|Multinomial|TruncatedNormal|SampleDistortedBoundingBox|Stateful(Uniform|Standard|Truncated)"
)
_ASSIGNMENT = re.compile(r"Assign\w*VariableOp$|Resource(Scatter|Strided)\w+")
_PYTHON = re.compile(r"PyFunc")
_CONTROL_FLOW = re.compile(r"(Stateless)?(If|Case|While)$|For$|(Ref)?(Switch|Merge|Enter|Exit|NextIteration)$")
_DATASET = re.compile(r"_?(?:Parallel|Legacy)?(\w+?)(?:Dataset)?(?:V\d)?$")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_ONE_FOR_ONE = frozenset(  # or undone by `unbatch`
    {"assert_cardinality", "assert_next", "batch", "cache", "global_shuffle", "map", "options", "padded_batch"}
    | {"prefetch", "rebatch", "restructured", "scan", "shuffle", "snapshot", "variant"}
)
_SHUFFLING = frozenset({"shuffle", "global_shuffle", "shuffle_and_repeat", "directed_interleave"})
_SLOW_WITH_XLA = re.compile(r"Conv\dD|DepthwiseConv|While$|StatelessWhile$")


def operations_of_graph(graph: Any) -> set[str]:
    """Return the names of the operations of a graph, including its functions."""
    definition = graph.as_graph_def()
    found = {node.op for node in definition.node}
    for function in definition.library.function:
        found.update(node.op for node in function.node_def)
    return found


def assigned_variables(graph: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the Keras variables that a graph assigns, also in its conditions, loops and other functions."""
    assigned = _assigned_handles(graph, [variable.value.handle for variable in variables])
    return [variable for variable in variables if id(variable.value.handle) in assigned]


def assigned_beside(graph: Any, variables: Iterable[Any]) -> list[Any]:
    """Return the TensorFlow variables that a graph assigns and that do not belong to a given Keras variable."""
    known = {id(variable.value.handle) for variable in variables}
    others = [variable for variable in graph.variables if id(variable.handle) not in known]
    assigned = _assigned_handles(graph, [variable.handle for variable in others])
    return [variable for variable in others if id(variable.handle) in assigned]


def _assigned_handles(graph: Any, handles: Iterable[Any]) -> set[int]:
    """Return `id` of those of the variables' handles that a graph assigns."""
    captured = {id(outside): inside.op.name for outside, inside in graph.captures}
    names = {id(handle): captured[id(handle)] for handle in handles if id(handle) in captured}
    if not names:
        return set()
    definition = graph.as_graph_def()
    functions = {function.signature.name: function for function in definition.library.function}
    assigned = set(_assigned(definition.node, {name: name for name in names.values()}, functions))
    return {handle for handle, name in names.items() if name in assigned}


def _assigned(nodes: Iterable[Any], handles: Mapping[str, str], functions: Mapping[str, Any]) -> Iterator[str]:
    """Yield the variables that nodes of a graph assign.

    Args:
        nodes: The nodes.
        handles: Maps the name of a node that outputs a variable's handle to the variable.
        functions: The graph's functions by name.
    """
    known = dict(handles)
    for node in nodes:
        given = [known.get(source.partition(":")[0], "") for source in node.input if not source.startswith("^")]
        if not any(given):
            continue
        if node.op == "Identity":
            known[node.name] = given[0]
        elif _ASSIGNMENT.match(node.op) and given[0]:
            yield given[0]
        for name in _functions_of(node):
            names = [argument.name for argument in functions[name].signature.input_arg]
            of_function = given[len(given) - len(names) :]  # the first input of If and Case chooses the function
            inner = {name: handle for name, handle in zip(names, of_function, strict=True) if handle}
            yield from _assigned(functions[name].node_def, inner, functions)


def _functions_of(node: Any) -> list[str]:
    """Return the names of the functions that a node may call."""
    lists = [[value.func, *value.list.func] for value in node.attr.values()]
    return [function.name for functions in lists for function in functions if function.name]


def operations_of_dataset(dataset: Any) -> set[str]:
    """Return the names of the operations in the functions of a dataset."""
    return {op for function in dataset._functions() for op in operations_of_graph(function.function.graph)}


def changing_the_count(dataset: Any) -> list[str]:
    """Return the tf.data methods in a dataset that may change the number of elements.

    Whether they do depends on their arguments and the data: ``take(10**9)`` changes nothing.
    """
    methods = list(dict.fromkeys(_methods(dataset)))
    # Without any other such method, a map over batches may have changed their length.
    return [name for name in methods if name not in (*_ONE_FOR_ONE, "unbatch")] or [
        name for name in methods if name == "unbatch"
    ]


def _methods(dataset: Any) -> Iterator[str]:
    inputs = dataset._inputs()
    for part in inputs:
        yield from _methods(part)
    named = _DATASET.match(type(dataset).__name__)
    if inputs and named is not None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", named[1]).lower()
        drops = tf.get_static_value(getattr(dataset, "_drop_remainder", None)) if name.endswith("batch") else False
        yield f"{name}(drop_remainder=True)" if drops else name


def unrepeatable(dataset: Any) -> list[str]:
    """Return the methods and operations of a dataset by which two passes over it differ."""
    found = [name for name in _methods(dataset) if name in _SHUFFLING]
    operations = {op for part in _chain(dataset) for op in operations_of_dataset(part)}
    return list(dict.fromkeys([*found, *stateful_random(operations)]))


def _chain(dataset: Any) -> Iterator[Any]:
    yield dataset
    for part in dataset._inputs():
        yield from _chain(part)


def frames_of_operation(dataset: Any, message: str) -> list[traceback.FrameSummary]:
    """Return the frames that made the operation of a dataset's functions which an error of TensorFlow names.

    The name of one inside a condition or a loop begins with that of the outer one.
    """
    functions = (function for part in _chain(dataset) for function in part._functions())
    known = {op.name: op for function in functions for op in function.function.graph.get_operations()}
    for name in _NODE.findall(message):
        parts = name.split("/")
        for length in range(len(parts), 0, -1):
            if (found := known.get("/".join(parts[:length]))) is not None:
                return [traceback.FrameSummary(file, line, name) for file, line, name, _ in found.traceback]
    return []


def stateful_random(operations: Iterable[str]) -> list[str]:
    """Return the random operations with values that depend on earlier executions."""
    return sorted(op for op in operations if _STATEFUL_RANDOM.match(op))


def not_vectorisable(operations: Iterable[str]) -> list[str]:
    """Return the operations that are wrong or impossible for many records at a time: random ones and Python ones."""
    return sorted(op for op in operations if _STATEFUL_RANDOM.search(op) or _PYTHON.search(op))


def has_control_flow(operations: Iterable[str]) -> bool:
    """Return whether there are conditions or loops, which TensorFlow does not run in a single thread."""
    return any(_CONTROL_FLOW.match(op) for op in operations)


def warn_of_chance(operations: Iterable[str]) -> None:
    """Warn of random operations in a step that do not depend on its seed."""
    found = stateful_random(operations)
    if found:
        _log.warning(
            "The model or loss uses random operations (%s) whose values depend on what a worker did before; use "
            "keras.random with a SeedGenerator to get the same steps everywhere",
            ", ".join(found),
        )


class IdOutOfRange(ValueError):
    """An embedding layer was given an id that it has no row for."""


class IdWatch:
    """The look-ups of embedding layers with a variable of their own while a function is traced."""

    def __init__(self) -> None:
        self.bounds: list[str] = []  # for each call, a description of the valid ids
        self._in_range: list[Any] = []
        self._graph = tf.compat.v1.get_default_graph()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context that records look-ups."""
        with self._watched(keras.layers.Embedding, "call"), self._watched(Embedding, "own_rows"):
            yield

    @contextmanager
    def _watched(self, layers: Any, method: str) -> Iterator[None]:
        look_up = getattr(layers, method)

        def noted(layer: Any, inputs: Any) -> Any:
            return look_up(layer, self._noted(layer, inputs))

        setattr(layers, method, noted)
        try:
            yield
        finally:
            setattr(layers, method, look_up)

    def in_range(self) -> list[Any]:
        """For each call, a scalar of the graph: whether all ids are in range; other ids were replaced by 0."""
        return self._in_range

    def _noted(self, layer: Any, inputs: Any) -> Any:
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._noted(layer, inputs.flat_values))
        if isinstance(inputs, tf.SparseTensor):
            return tf.SparseTensor(inputs.indices, self._noted(layer, inputs.values), inputs.dense_shape)
        if tf.compat.v1.get_default_graph() is not self._graph:
            return inputs  # in a loop or condition: values cannot be read outside
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)  # as Keras does
        are_good = (ids >= 0) & (ids < layer.input_dim)
        self._in_range.append(tf.reduce_all(are_good))
        self.bounds.append(f"the embedding layer {layer.name!r}: an id is not in [0, {layer.input_dim}), its input_dim")
        return tf.where(are_good, ids, tf.zeros_like(ids))


class _Graph(Protocol):
    @property
    def operations(self) -> set[str]: ...


G = TypeVar("G", bound=_Graph)
R = TypeVar("R")


def first_run(make: Callable[[], G], run: Callable[[G], R]) -> tuple[G, R] | None:
    """Make a graph that XLA compiles at its first run, and run it; None: XLA is not used, with the reason in the log.

    Raises:
        IdOutOfRange: An embedding layer has no row for an id.
    """
    try:
        graph = make()
        slow = min((op for op in graph.operations if _SLOW_WITH_XLA.match(op)), default="")
        if slow:
            tell_uncompiled(f"{slow} is slower with XLA")
            return None
        result = run(graph)
    except IdOutOfRange:
        raise
    except (tf.errors.OpError, NotImplementedError, ValueError) as error:
        tell_uncompiled(str(error).strip().partition("\n")[0])
        return None
    warn_of_chance(graph.operations)
    return graph, result


def tell_uncompiled(reason: str) -> None:
    """Log why steps are not compiled."""
    _log.info("Steps are not compiled with XLA: %s", reason)


_SHOWN = 5
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})  # do not read values


def ids_function(
    model: Any, placement: Placement, features: Any, mode: Mode, changing: Iterable[Any]
) -> Callable[[Any], dict[str, Any]]:
    """Return a graph function from batched features to the ids [n] of each table, over all calls, in order.

    Args:
        model: The model.
        placement: Placement of its tables.
        features: Spec of the batched features.
        mode: Mode of the minibatches.
        changing: Variables of the model that change from step to step.

    Raises:
        ModelDefinitionError: Ids depend on a changing variable, or a layer is called in a loop (the message names it),
            or rows would get no gradient.
    """
    leaves = tf.nest.flatten(features, expand_composites=True)
    recorded = Recorded()
    names: list[str] = []

    def record(*parts: Any) -> list[Any]:
        nonlocal recorded
        recorded = Recorded()
        with placement.using(recorded):
            given = tf.nest.pack_sequence_as(features, parts, expand_composites=True)
            made = call_model(model, given, training=mode is Mode.TRAINING)
        for part in tf.nest.flatten(made, expand_composites=True):
            if tf.is_tensor(part):
                tf.identity(part)  # otherwise it may be unused
        if hidden_from_gradients(recorded.answers):
            raise ModelDefinitionError(
                "The rows of an embedding on the parameter servers are used inside tf.recompute_grad or "
                "tf.custom_gradient, whose function is not given them: they would get no gradient.",
                "Look the embedding up outside of it, or keep the table in the workers: a larger "
                "--embedding_threshold.",
            )
        names.extend(recorded.ids)
        return [tf.concat(calls, 0) for calls in recorded.ids.values()]

    with tf.init_scope():
        whole = tf.compat.v1.wrap_function(record, [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves])
        _check_origin(whole.graph, recorded, changing)
        pruned = whole.prune(whole.inputs[: len(leaves)], whole.structured_outputs) if names else None

    def run(batch: Any) -> dict[str, Any]:
        if pruned is None:
            return {}
        outputs = pruned(*tf.nest.flatten(batch, expand_composites=True))
        return dict(zip(names, outputs, strict=True))

    return run


def complete(ids: Mapping[str, Any], tables: Iterable[str]) -> dict[str, Any]:
    """Return the ids [n] of every table; empty for a table without a call."""
    return {name: ids[name] if name in ids else tf.zeros([0], tf.int64) for name in tables}


def out_of_range(table: TableSpec, ids: Ids) -> str:
    """Describe ids that are negative or not below `input_dim`; empty: there are none."""
    # As unsigned numbers, negative ones are the largest.
    if not table.input_dim or not len(ids) or ids.view(np.uint64).max() < table.input_dim:
        return ""
    wrong = np.unique(ids[(ids < 0) | (ids >= table.input_dim)])
    shown = ", ".join(map(str, wrong[:_SHOWN])) + (", …" if len(wrong) > _SHOWN else "")
    return f"the embedding layer {table.name!r}: ids are not in [0, {table.input_dim}), its input_dim: {shown}"


def _check_origin(graph: Any, recorded: Recorded, changing: Iterable[Any]) -> None:
    """Refuse ids that depend on rows, changing variables or chance: they could not be known before the pull."""
    handles = {id(variable.value.handle): variable.path for variable in changing}
    variables = {id(inner.op): handles[id(outer)] for outer, inner in graph.captures if id(outer) in handles}
    rows = {id(answer.op) for answer in recorded.answers}
    for table, calls in recorded.ids.items():
        for op in _origins(calls):
            if id(op) in rows:
                cause = "the rows of an embedding"
            elif id(op) in variables:
                cause = f"the variable {variables[id(op)]}, which changes from step to step"
            elif stateful_random([op.type]):
                cause = f"the random operation {op.type}"
            else:
                continue
            raise ModelDefinitionError(
                f"The ids of the embedding layer {table!r} depend on {cause}.",
                "Let ids follow from the features alone, or keep the table in the workers: a larger "
                "--embedding_threshold.",
            )


def hidden_from_gradients(sources: Iterable[Any]) -> bool:
    """Return whether a function with a custom gradient, in the current trace, uses sources that are not arguments.

    `tf.custom_gradient`, and therefore `tf.recompute_grad`, handles arguments and variables, but not captured tensors.
    """
    wanted = {id(source.op) for source in sources}
    for op in tf.compat.v1.get_default_graph().get_operations():
        if op.type == "IdentityN" and "_gradient_op_type" in op.node_def.attr:
            arguments = _arguments(op)
            pairs = zip(op.inputs, op.outputs, strict=True)
            results = [tensor for tensor, output in pairs if output.consumers() and tensor.name not in arguments]
            if any(id(origin) in wanted for origin in _origins(results, arguments)):
                return True
    return False


def _arguments(op: Any) -> set[str]:
    """Return the names of the arguments and variables of a function with a custom gradient, given by its operation.

    They are the operation's inputs after the results.
    """
    try:
        gradient = gradient_registry.lookup(op.get_attr("_gradient_op_type").decode())
        own = inspect.getclosurevars(gradient).nonlocals["tape_grad_fn"]
        return {tensor.name for tensor in op.inputs[inspect.getclosurevars(own).nonlocals["flat_result_len"] :]}
    except (LookupError, TypeError):  # a graph from another process, or an operation's own gradient
        return {t.name for t, output in zip(op.inputs, op.outputs, strict=True) if not output.consumers()}


def _origins(tensors: Iterable[Any], arguments: Collection[str] = ()) -> Iterator[Any]:
    """Yield all operations on which the tensors depend, without those before the named arguments."""
    seen: set[int] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if id(op) not in seen:
            seen.add(id(op))
            yield op
            if op.type not in _SHAPES:
                waiting.extend(tensor.op for tensor in op.inputs if tensor.name not in arguments)
