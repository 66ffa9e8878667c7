"""`TensorFlowFunction`: a TensorFlow function as an operation of a functional Keras model.

Keras 2 accepts `tf.reshape(x)` in a functional model; Keras 3 refuses it, because `x` is symbolic.  Inside `accepted`
such a call becomes an operation of the model, so that models written for Keras 2 build without changes.

`inlined`: calls of the user's `tf.function`s become part of the current trace.
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
    """A TensorFlow function as a Keras operation.

    Args:
        function: The function's public name without `tf.`, such as `math.reduce_sum`.

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
        ):  # Keras treats `0.5 * x` as sparse for a sparse `x`: retry with dense inputs
            dense_args, dense_kwargs = keras.tree.map_structure(_dense, (args, kwargs))
            return super().compute_output_spec(*dense_args, **dense_kwargs)

    def get_config(self) -> dict[str, Any]:
        return {"function": self.function, "name": self.name}


class _Dispatcher(tf.__internal__.dispatch.GlobalOpDispatcher):  # type: ignore[misc]
    """Called by TensorFlow for arguments that a TensorFlow function does not support."""

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
    """Return a context in which TensorFlow functions accept symbolic Keras tensors; log the functions at its end."""
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
    """Return a context in which this thread's calls of a `tf.function` run its Python code in the current trace.

    A separate trace would reuse the values of variables and the rows of its first call, and it does not accept the
    symbolic inputs of a functional model.  Outside of a trace the `tf.function` makes its own: its code may need a
    graph.
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
