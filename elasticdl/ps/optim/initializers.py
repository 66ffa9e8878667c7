"""Initial values of embedding rows: each element is a function of (seed, table, id, column) only.

So a row has the same initial values in every process, at any time, and in any batch.  Names and configs are Keras's;
the native kernels compute the values with additions, multiplications, divisions and square roots only, each correctly
rounded, so they are bit-identical on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from elasticdl.frameworks.framework import InitialRow, Table
from elasticdl.kernels import _native
from elasticdl_client.errors import ModelDefinitionError

Distribution = tuple[str, float, float]  # kind, a and b of an `InitialRow`

_TRUNCATED_STDDEV = 0.87962566103423978  # of a standard normal truncated at two sigma; as in Keras
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


def build_initializer(table: Table, seed: int) -> _native.Initializer:
    """Return the native initializer of a table.

    Raises:
        ModelDefinitionError: see `initial_row`.
    """
    initial = initial_row(table, seed)
    return _native.Initializer(initial.kind, initial.key, initial.a, initial.b)


def initial_row(table: Table, seed: int) -> InitialRow:
    """Return the initializer of a table, from its Keras config.

    An integer seed in the config is combined with the job's seed; a seed generator is not: rows have no order.

    Raises:
        ModelDefinitionError: the initializer, or a named option of it, is not supported.
    """
    described = json.loads(table.initializer)
    name, config = described["class_name"], dict(described.get("config") or {})
    module = described.get("module") or "keras"
    if not module.startswith("keras"):
        raise _unsupported(table, name)
    own_seed = config.pop("seed", None)
    key = _key(seed, table.name, own_seed if isinstance(own_seed, int) else "")
    constants = {"Zeros": 0.0, "Ones": 1.0, "Constant": config.get("value", 0.0)}
    if name in constants:
        if not isinstance(constants[name], int | float):
            raise _unsupported(table, f"{name} with an array as value")
        return InitialRow("constant", key, float(constants[name]))
    kind, a, b = _distribution(table, name, config)
    return InitialRow(kind, key, a, b)


def check_table(table: Table) -> None:
    """Check a table, in the worker, before the first update.

    Raises:
        ModelDefinitionError: the table's initializer, which is named, is not supported by the parameter server.
    """
    initial_row(table, 0)


def _distribution(table: Table, name: str, config: Mapping[str, Any]) -> Distribution:
    if name == "RandomUniform":
        return "uniform", float(config.get("minval", -0.05)), float(config.get("maxval", 0.05))
    if name == "RandomNormal":
        return "normal", float(config.get("mean", 0.0)), float(config.get("stddev", 0.05))
    if name == "TruncatedNormal":
        return "truncated_normal", float(config.get("mean", 0.0)), float(config.get("stddev", 0.05))
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
        return "uniform", -limit, limit
    if kind == "untruncated_normal":
        return "normal", 0.0, math.sqrt(variance)
    return "truncated_normal", 0.0, math.sqrt(variance) / _TRUNCATED_STDDEV


def _fan(table: Table, name: str, mode: str) -> float:
    """Return the fan that Keras computes for a variable of shape (input_dim, dim)."""
    if mode == "fan_out":
        return float(table.dim)
    if table.input_dim == 0:
        raise ModelDefinitionError(
            f"the initializer {name} of the embedding {table.name} depends on its number of ids, and that has no bound",
            "give the layer an input_dim, or choose RandomUniform or RandomNormal",
        )
    return float(table.input_dim) if mode == "fan_in" else (table.input_dim + table.dim) / 2.0


def _key(*parts: str | int) -> int:
    """Return a 64-bit hash of a sequence of names and numbers."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _unsupported(table: Table, name: str) -> ModelDefinitionError:
    return ModelDefinitionError(f"the initializer {name} of the embedding {table.name} is not supported", _HINT)
