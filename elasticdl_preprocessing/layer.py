"""The base of this package's layers: they take tensors as they come and have nothing that is trained."""

from __future__ import annotations

from typing import Any

import keras

from elasticdl_preprocessing.tensors import Tensor, as_tensor, map_values, spec_like

PACKAGE = "elasticdl_preprocessing"


class PreprocessingLayer(keras.layers.Layer):  # type: ignore[misc]
    """A layer whose inputs Keras does not cast, whatever the policy of dtypes: ids and strings are among them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.autocast = False
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True


class ElementwiseLayer(PreprocessingLayer):
    """Turns each value into another, alone: the result is of the kind and the shape of the input."""

    output_dtype = "int64"

    def values(self, values: Tensor) -> Tensor:
        """The results for values of any shape."""
        raise NotImplementedError

    def call(self, inputs: Any) -> Tensor:
        return map_values(self.values, as_tensor(inputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def compute_output_spec(self, inputs: Any) -> Any:
        return spec_like(inputs, self.output_dtype)
