"""Outputs of a model as arrays, and values of a trained model without its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elasticdl.frameworks.keras.model import BuiltModel, unique_names
from elasticdl_client.errors import CheckpointError

_PREFIX = "model/"  # of names of variables in a state; see `KerasFramework.state`


def arrays_of(outputs: Any) -> Any:
    """A structure of tensors as one of arrays; sparse ones are filled up, bfloat16 becomes float32.

    Raises:
        TypeError: an output is ragged.
    """
    return tf.nest.map_structure(_array, outputs)


def _array(output: Any) -> npt.NDArray[Any]:
    if isinstance(output, tf.RaggedTensor):
        raise TypeError("the model has a ragged output: return a tensor, for example output.to_tensor()")
    tensor = tf.sparse.to_dense(output) if isinstance(output, tf.SparseTensor) else tf.convert_to_tensor(output)
    return np.asarray(tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor)


def load_weights(path: str, built: BuiltModel, state: Mapping[str, npt.NDArray[Any]]) -> None:
    """See `Framework.load_weights`.

    Args:
        path: of the user's module, for messages.
    """
    weights = [*built.trainable, *built.non_trainable, *built.own]
    variables = {_PREFIX + name: variable for name, variable in zip(unique_names(weights), weights, strict=True)}
    given = {name: value for name, value in state.items() if name.startswith(_PREFIX)}
    wrong = sorted(set(given) ^ set(variables)) or [
        name for name, variable in variables.items() if tuple(given[name].shape) != tuple(variable.shape)
    ]
    if wrong:
        raise CheckpointError(
            f"The checkpoint is of another model than {path}: {', '.join(wrong)}.",
            "Use the module that the checkpoint was written with, and its --model_params.",
        )
    for name, variable in variables.items():
        variable.assign(given[name])
