"""The trainable values of a step as tensors of its graph, in place of the model's variables.

What a graph assigns to variables it writes back at each step, although nobody reads it before the next one assigns it
again.  Everything but trainable variables stays as it is: a model may keep state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


class GivenValues(keras.StatelessScope):  # type: ignore[misc]
    """While it lasts, Keras reads the values of some variables from tensors.

    Attributes:
        are_assigned: the model has assigned one of them: then it wants variables.
    """

    def __init__(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(zip(variables, values, strict=True), collect_losses=True, initialize_variables=False)
        self.sources = [self.state_mapping[id(variable)] for variable in variables]
        self.are_assigned = False

    def add_update(self, update: tuple[Any, Any]) -> None:
        """A variable is assigned."""
        variable, value = update
        self.are_assigned |= id(variable) in self.state_mapping
        variable._direct_assign(value)

    def get_current_value(self, variable: Any) -> Any:
        return self.state_mapping.get(id(variable), variable._value)
