"""Everything random inside a step depends on the step's seed alone: Keras's seed generators are set from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from elasticdl_client.errors import ElasticDLError

_LARGEST = 2**31 - 1
_FALLBACK = getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")  # Keras 3.12 has no such constant


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
        """Makes Keras fall back to our generator; call it where the function is traced.

        Raises:
            ElasticDLError: Keras keeps its generator elsewhere, so steps would not depend on their seeds.
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


def as_int64(seed: int) -> int:
    """Any Python integer as one that a tensor can hold."""
    return seed & (2**62 - 1)
