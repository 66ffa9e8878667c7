"""Which embedding tables a parameter server can hold, and how they are described to it.

Owns the lists of what is supported; the parameter server checks the same once more, by name.
"""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

from elasticdl.frameworks.framework import Table
from elasticdl.layers.placement import TableSpec
from elasticdl_client.errors import ModelDefinitionError

_INITIALIZERS = (
    *("Zeros", "Ones", "Constant", "RandomUniform", "RandomNormal", "TruncatedNormal", "VarianceScaling"),
    *("GlorotUniform", "GlorotNormal", "HeUniform", "HeNormal", "LecunUniform", "LecunNormal"),
)
_ALONG_ROWS = ("MaxNorm", "UnitNorm", "MinMaxNorm")
_REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def obstacle(spec: TableSpec) -> str:
    """Explain why no parameter server can hold the table; empty: one can."""
    if not _supports_initializer(spec):
        return f"its initializer is {_name(spec.initializer)}; supported are {', '.join(_INITIALIZERS)}"
    if spec.regularizer is not None and type(spec.regularizer) not in _REGULARIZERS:
        return f"its embeddings_regularizer is {_name(spec.regularizer)}; supported are L1, L2, L1L2"
    if spec.constraint is not None and not _supports_constraint(spec.constraint):
        return (
            f"its embeddings_constraint is {_name(spec.constraint)}; supported are NonNeg, and "
            f"{', '.join(_ALONG_ROWS)} with axis=1, which bound each row alone"
        )
    return ""


def describe_table(spec: TableSpec) -> Table:
    """For the parameter servers.

    Raises:
        ModelDefinitionError: none can hold it.
    """
    found = obstacle(spec)
    if found:
        raise ModelDefinitionError(f"The embedding {spec.name!r} cannot live on a parameter server: {found}.")
    constraint = "" if spec.constraint is None else _config(keras.constraints.serialize(spec.constraint))
    initializer = _config(keras.initializers.serialize(spec.initializer))
    return Table(spec.name, spec.dim, initializer, spec.input_dim, constraint)


def _supports_initializer(spec: TableSpec) -> bool:
    if not isinstance(spec.initializer, keras.initializers.Initializer):
        return False
    described = keras.initializers.serialize(spec.initializer)
    if not _is_keras(described) or described["class_name"] not in _INITIALIZERS:
        return False
    config = described["config"]
    if config.get("input_axes") is not None or config.get("output_axes") is not None:
        return False
    return described["class_name"] != "Constant" or np.isscalar(config.get("value", 0.0))


def _supports_constraint(constraint: Any) -> bool:
    described = keras.constraints.serialize(constraint)
    if not _is_keras(described):
        return False
    if described["class_name"] in _ALONG_ROWS:
        return described["config"].get("axis", 0) in (1, -1, [1], [-1])
    return bool(described["class_name"] == "NonNeg")


def _is_keras(described: Any) -> bool:
    if not isinstance(described, dict) or described.get("registered_name"):
        return False
    return str(described.get("module")).startswith("keras")


def _config(described: dict[str, Any]) -> str:
    return json.dumps({"class_name": described["class_name"], "config": described["config"]}, sort_keys=True)


def _name(described: Any) -> str:
    return getattr(described, "__name__", None) or type(described).__name__
