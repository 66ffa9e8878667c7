"""`TensorFlowFunction`: a TensorFlow function as an operation of a functional Keras model.

Keras 2 let `tf.reshape(x)` stand in a functional model; Keras 3 refuses it, since `x` is symbolic there.  While
`accepted` is open such a call becomes an operation of the model, so that models written for Keras 2 build as they are.

`inlined`: the user's own `tf.function`s as parts of what is being traced.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status  # as tf.function traces
from tensorflow.python.eager.polymorphic_function.autograph_util import py_func_from_autograph
from tensorflow.python.eager.polymorphic_function.function_type_utils import bind_function_inputs

from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.keras")


@keras.saving.register_keras_serializable(package="elasticdl")
class TensorFlowFunction(keras.Operation):  # type: ignore[misc]
    """One call of a TensorFlow function.

    Args:
        function: its public name without `tf.`, such as `math.reduce_sum`.

    Raises:
        ModelDefinitionError: TensorFlow has no such function.
    """

    def __init__(self, function: str, name: str | None = None) -> None:
        super().__init__(name=name)
        self.function = function
        found: Any = tf
        for part in function.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise ModelDefinitionError(f"TensorFlow {tf.__version__} has no function tf.{function}.")
        self._call = found

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().compute_output_spec(*args, **kwargs)
        except (
            TypeError,
            ValueError,
        ):  # Keras takes `0.5 * x` for sparse, since a number has no attribute that says so
            dense_args, dense_kwargs = keras.tree.map_structure(_dense, (args, kwargs))
            return super().compute_output_spec(*dense_args, **dense_kwargs)

    def get_config(self) -> dict[str, Any]:
        return {"function": self.function, "name": self.name}


class _Dispatcher(tf.__internal__.dispatch.GlobalOpDispatcher):  # type: ignore[misc]
    """Asked by TensorFlow about arguments that a function of its own cannot take."""

    def __init__(self) -> None:
        self.num_open = 0
        self.used: set[str] = set()

    def handle(self, op: Any, args: Any, kwargs: Any) -> Any:
        names = getattr(inspect.unwrap(op), "_tf_api_names", ())
        if not self.num_open or not names or not _any_symbolic(args, kwargs):
            return self.NOT_SUPPORTED
        self.used.add(f"tf.{names[0]}")
        kwargs = {key: value for key, value in kwargs.items() if key != "name"}
        return TensorFlowFunction(names[0])(*args, **kwargs)


_dispatcher = _Dispatcher()
_dispatcher.register()


@contextmanager
def accepted() -> Iterator[None]:
    """TensorFlow functions take symbolic Keras tensors inside; says once which were used so."""
    _dispatcher.num_open += 1
    try:
        yield
    finally:
        _dispatcher.num_open -= 1
        if _dispatcher.used:
            used, _dispatcher.used = ", ".join(sorted(_dispatcher.used)), set()
            _log.info("Operations of the model that are TensorFlow functions: %s", used)


_Function = type(tf.function(lambda: None))


@contextmanager
def inlined() -> Iterator[None]:
    """Calls of a `tf.function` inside, by this thread, run its Python code as a part of what is being traced.

    A trace of its own would be called again with the values of variables and the rows of its first call, and takes no
    symbolic inputs of a functional model.  Where nothing is traced it has its own: its code may need a graph.
    """
    call, own_thread = _Function.__call__, threading.get_ident()

    def called(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_traced = not tf.executing_eagerly() or _any_symbolic(args, kwargs)
        if not is_traced or type(function) is not _Function or threading.get_ident() != own_thread:
            return call(function, *args, **kwargs)
        python, status = function.python_function, Status.DISABLED
        if function._autograph:
            python, status = py_func_from_autograph(python), Status.ENABLED
        bound = bind_function_inputs(args, kwargs, function._function_type, function._default_values)
        args, kwargs = tf.nest.map_structure(_no_array, (bound.args, bound.kwargs))
        with ControlStatusCtx(status=status):
            return python(*args, **kwargs)

    _Function.__call__ = called
    try:
        yield
    finally:
        _Function.__call__ = call


def _no_array(argument: Any) -> Any:
    return tf.convert_to_tensor(argument) if isinstance(argument, np.ndarray | np.generic) else argument


def _any_symbolic(args: Any, kwargs: Any) -> bool:
    return any(isinstance(one, keras.KerasTensor) for one in keras.tree.flatten((args, kwargs)))


def _dense(value: Any) -> Any:
    is_sparse = isinstance(value, keras.KerasTensor) and value.sparse
    return keras.KerasTensor(value.shape, value.dtype) if is_sparse else value
