"""How a PS makes the native tables of a model."""

from __future__ import annotations

import json

from elasticdl.frameworks.framework import Table
from elasticdl.kernels import _native
from elasticdl.ps.optim.initializers import build_initializer
from elasticdl.ps.optim.optimizers import OptimizerConfig
from elasticdl_client.errors import ModelDefinitionError


def build_table(table: Table, config: OptimizerConfig, seed: int, expected_rows: int) -> _native.Table:
    """An empty table.

    Raises:
        ModelDefinitionError: its initializer or constraint is not supported; named.
    """
    return _native.Table(
        table.dim,
        build_initializer(table, seed),
        _native.Optimizer(config.kind, config.options),
        [slot.initial for slot in config.slots],
        build_constraint(table),
        expected_rows,
    )


def build_constraint(table: Table) -> _native.Constraint:
    """Of Keras's config: along each row, as Keras's axis 1 of the whole table.

    Raises:
        ModelDefinitionError: it is not supported; named.
    """
    if not table.constraint:
        return _native.Constraint()
    described = json.loads(table.constraint)
    kind, options = described["class_name"], dict(described.get("config") or {})
    if (described.get("module") or "keras").startswith("keras"):
        if kind == "NonNeg":
            return _native.Constraint("non_neg")
        if options.pop("axis", 0) in (1, -1, [1], [-1]):
            if kind == "MaxNorm":
                return _native.Constraint("max_norm", float(options.get("max_value", 2.0)))
            if kind == "UnitNorm":
                return _native.Constraint("unit_norm")
            if kind == "MinMaxNorm":
                low, high = float(options.get("min_value", 0.0)), float(options.get("max_value", 1.0))
                return _native.Constraint("min_max_norm", low, high, float(options.get("rate", 1.0)))
        else:
            kind += " along axis 0"
    raise ModelDefinitionError(
        f"the embeddings_constraint {kind} of the embedding {table.name} is not supported by the parameter server",
        "supported are NonNeg, and MaxNorm, UnitNorm and MinMaxNorm with axis=1, which bound each row alone",
    )
