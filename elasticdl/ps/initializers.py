"""Initial values of embedding rows: each element is a function of (seed, table, id, column) alone.

So a row is the same whoever creates it, when, and in which batch.  Names and configs are Keras's.  Distributions are
made from one counter-based hash per element with nothing but additions, multiplications, divisions and square roots,
each correctly rounded: the values are the same bits on every machine and in every implementation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Floats, Ids, Table
from elasticdl.ps.hashing import GOLDEN, hash_key, mix64
from elasticdl.ps.quantiles import TWO_SIGMA_TAIL, normal_quantile
from elasticdl_client.errors import ModelDefinitionError

Doubles = npt.NDArray[np.float64]

_TRUNCATED_STDDEV = 0.87962566103423978  # of a standard normal cut off at two sigma; as in Keras
_SCALING: Mapping[str, tuple[float, str, str]] = {
    "GlorotUniform": (1.0, "fan_avg", "uniform"),
    "GlorotNormal": (1.0, "fan_avg", "truncated_normal"),
    "HeUniform": (2.0, "fan_in", "uniform"),
    "HeNormal": (2.0, "fan_in", "truncated_normal"),
    "LecunUniform": (1.0, "fan_in", "uniform"),
    "LecunNormal": (1.0, "fan_in", "truncated_normal"),
}
_HINT = (
    "supported for embedding tables on the parameter server: RandomUniform, RandomNormal, TruncatedNormal, "
    "VarianceScaling, Glorot, He and Lecun (Uniform, Normal), Zeros, Ones, Constant"
)


@dataclass(frozen=True, slots=True)
class Initializer:
    """Values of new rows of one table.

    Attributes:
        transform: uniform numbers in (0, 1) to values; None: the constant.
    """

    key: npt.NDArray[np.uint64]
    dim: int
    constant: float
    transform: Callable[[Doubles], Doubles] | None

    def rows(self, ids: Ids) -> Floats:
        """Rows [len(ids), dim] of the ids, float32."""
        if self.transform is None:
            return np.full((len(ids), self.dim), self.constant, np.float32)
        row_keys = mix64(mix64(ids) ^ self.key)
        columns = np.arange(self.dim, dtype=np.uint64) * GOLDEN
        hashes = mix64(row_keys[:, None] + columns[None, :])
        uniform = (hashes >> np.uint64(11)).astype(np.float64)
        uniform += 0.5
        uniform *= 2.0**-53
        return self.transform(uniform).astype(np.float32)


def build_initializer(table: Table, seed: int) -> Initializer:
    """The initializer of a table, from its Keras config.

    An integer seed of the config is mixed into the job's; a seed generator is not: rows have no order to draw in.

    Raises:
        ModelDefinitionError: it, or an option of it, is not supported; named.
    """
    described = json.loads(table.initializer)
    name, config = described["class_name"], dict(described.get("config") or {})
    module = described.get("module") or "keras"
    if not module.startswith("keras"):
        raise _unsupported(table, name)
    own_seed = config.pop("seed", None)
    key = hash_key(seed, table.name, own_seed if isinstance(own_seed, int) else "")
    constants = {"Zeros": 0.0, "Ones": 1.0, "Constant": config.get("value", 0.0)}
    if name in constants:
        if not isinstance(constants[name], int | float):
            raise _unsupported(table, f"{name} with an array as value")
        return Initializer(key, table.dim, float(constants[name]), None)
    return Initializer(key, table.dim, 0.0, _transform(table, name, config))


def check_table(table: Table) -> None:
    """For the worker, before the first update.

    Raises:
        ModelDefinitionError: the table's initializer is not supported by the parameter server; named.
    """
    build_initializer(table, 0)


def _transform(table: Table, name: str, config: Mapping[str, Any]) -> Callable[[Doubles], Doubles]:
    if name == "RandomUniform":
        return _uniform(config.get("minval", -0.05), config.get("maxval", 0.05))
    if name == "RandomNormal":
        return _normal(config.get("mean", 0.0), config.get("stddev", 0.05))
    if name == "TruncatedNormal":
        return _truncated_normal(config.get("mean", 0.0), config.get("stddev", 0.05))
    if name == "VarianceScaling":
        kind = config.get("distribution", "truncated_normal")
        scale, mode = config.get("scale", 1.0), config.get("mode", "fan_in")
    elif name in _SCALING:
        scale, mode, kind = _SCALING[name]
    else:
        raise _unsupported(table, name)
    if config.get("input_axes") is not None or config.get("output_axes") is not None:
        raise _unsupported(table, f"{name} with input_axes or output_axes")
    variance = scale / max(1.0, _fan(table, name, mode))
    if kind == "uniform":
        limit = math.sqrt(3.0 * variance)
        return _uniform(-limit, limit)
    if kind == "untruncated_normal":
        return _normal(0.0, math.sqrt(variance))
    return _truncated_normal(0.0, math.sqrt(variance) / _TRUNCATED_STDDEV)


def _fan(table: Table, name: str, mode: str) -> float:
    """As Keras computes it for a variable of shape (input_dim, dim)."""
    if mode == "fan_out":
        return float(table.dim)
    if table.input_dim == 0:
        raise ModelDefinitionError(
            f"the initializer {name} of the embedding {table.name} depends on its number of ids, and that has no bound",
            "give the layer an input_dim, or choose RandomUniform or RandomNormal",
        )
    return float(table.input_dim) if mode == "fan_in" else (table.input_dim + table.dim) / 2.0


def _uniform(low: float, high: float) -> Callable[[Doubles], Doubles]:
    return lambda uniform: low + (high - low) * uniform


def _normal(mean: float, stddev: float) -> Callable[[Doubles], Doubles]:
    return lambda uniform: mean + stddev * normal_quantile(uniform)


def _truncated_normal(mean: float, stddev: float) -> Callable[[Doubles], Doubles]:
    """Cut off at two standard deviations, as Keras does."""
    kept = 1.0 - 2.0 * TWO_SIGMA_TAIL
    return lambda uniform: mean + stddev * normal_quantile(TWO_SIGMA_TAIL + kept * uniform)


def _unsupported(table: Table, name: str) -> ModelDefinitionError:
    return ModelDefinitionError(f"the initializer {name} of the embedding {table.name} is not supported", _HINT)
