"""The device of Keras models (name, settings, memory), and their precision (dtype policy, loss scale).

`limit_threads`: TensorFlow computes with as many threads as this container has CPUs, not as this machine has.

Variables, their gradients and the optimizer stay float32, as in Keras's mixed policies; with float16 the optimizer
scales the loss, see `make_optimizer`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticdl.frameworks.devices import DeviceMeter, cpu_text, num_processors
from elasticdl.frameworks.keras.compiled import call_model
from elasticdl.protocol import Device
from elasticdl_client.choices import Precision
from elasticdl_client.errors import ModelDefinitionError

_POLICIES = {Precision.BF16: "mixed_bfloat16", Precision.FP16: "mixed_float16"}
_HALF = ("bfloat16", "float16")


def set_policy(precision: Precision) -> None:
    """Make the policy of a precision the one of all models that this process makes; with fp32 the module chooses."""
    if precision in _POLICIES:
        keras.config.set_dtype_policy(_POLICIES[precision])


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make the slots of an optimizer once: a LossScaleOptimizer that is built again begins with a new scale."""
    if not optimizer.built:
        optimizer.build(variables)


def apply_gradients(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Update the variables as `fit` does: by the method of that name, which a class of the user's may override."""
    if variables:
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))


def check_policy(path: str, model: Any, precision: Precision, features: Callable[[], Any]) -> None:
    """Check that a model has the dtype policy of a precision, and float32 outputs for losses, metrics and exports.

    Args:
        path: Path of the user's module, for messages.
        model: The model.
        precision: The job's precision.
        features: Returns the spec of a minibatch's features, matched to the model's inputs; called only for a
            subclassed model.

    Raises:
        ModelDefinitionError: The module sets another policy, or an output is not float32.
    """
    policy = _POLICIES.get(precision)
    if policy is None:
        return
    if model.dtype_policy.name != policy:
        raise ModelDefinitionError(
            f"{path}: the model has the policy {model.dtype_policy.name}, and --precision={precision} is {policy}.",
            "Leave --precision out, or let the module set no policy.",
        )
    for output in keras.tree.flatten(getattr(model, "outputs", None) or _traced(model, features())):
        dtype = keras.backend.standardize_dtype(output.dtype)
        if dtype in _HALF:
            raise ModelDefinitionError(
                f"{path}: an output of the model is {dtype} with --precision={precision}; losses, metrics and "
                "exports take float32.",
                'Give the last layer dtype="float32".',
            )


def _traced(model: Any, features: Any) -> Any:
    """Return symbolic outputs of a model; nothing is computed."""
    called = tf.function(lambda given: call_model(model, given, training=False), autograph=False)
    return called.get_concrete_function(features).structured_outputs


def device_meter() -> DeviceMeter:
    """Return the meter of the first GPU, where TensorFlow puts a model, or of the CPU."""
    if not tf.config.list_logical_devices("GPU"):
        return DeviceMeter(cpu_text(_num_threads()), lambda: None)
    name = "GPU:0"
    details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
    kind = str(details.get("device_name", "GPU"))
    tf32 = "on" if tf.config.experimental.tensor_float_32_execution_enabled() else "off"
    return DeviceMeter(f"{name} ({kind}); TF32 matrix products {tf32}", lambda: Device(name, kind, used_bytes(name)))


def used_bytes(name: str) -> int:
    """Return the bytes that tensors take of a device's memory; 0: its allocator does not count."""
    try:
        return int(tf.config.experimental.get_memory_info(name)["current"])
    except ValueError:
        return 0


def _num_threads() -> int:
    """Return the number of threads per operation: set by the user, by the environment, or TensorFlow's default."""
    chosen = tf.config.threading.get_intra_op_parallelism_threads()
    return chosen or int(os.environ.get("TF_NUM_INTRAOP_THREADS", "0")) or num_processors()


_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def limit_threads() -> None:
    """Limit the threads to the container's CPUs, unless the user has set their number in the environment.

    TensorFlow itself counts the machine's CPUs; it reads the variables at its first operation.
    """
    for name in _VARIABLES:
        os.environ.setdefault(name, str(num_processors()))
