"""Which parts of a model with tables on parameter servers fit into memory at export; computed before training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from elasticdl.frameworks.framework import Table
from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.worker")
_PROCESS_BYTES = 700 << 20  # of the export process without tables
_SAVED_MODEL = 1.5  # times the tables: what a SavedModel needs; 1.1 to 1.3 were measured
_MODEL_FILE = 2.5  # what the framework's own file needs, which is written after it; 2.2 were measured
_SEPARATE_BYTES = 64 << 20  # larger tables are exported by a process of their own


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """
    Attributes:
        saved_model: a SavedModel is written; otherwise the last checkpoint is the trained model.
        model_file: so is the framework's own file.
        separate: by a process of its own.
    """

    saved_model: bool = True
    model_file: bool = True
    separate: bool = False


def plan_export(tables_bytes: int, available_bytes: int) -> ExportPlan:
    """Return the export that is possible with tables of that size and that much memory."""
    if tables_bytes <= _SEPARATE_BYTES:
        return ExportPlan()
    saved_model, model_file = needed_bytes(tables_bytes)
    return ExportPlan(saved_model <= available_bytes, model_file <= available_bytes, separate=True)


def needed_bytes(tables_bytes: int) -> tuple[float, float]:
    """Return the memory that an export takes at most: for the SavedModel, and for the framework's own file as well."""
    return _PROCESS_BYTES + _SAVED_MODEL * tables_bytes, _PROCESS_BYTES + _MODEL_FILE * tables_bytes


def announce_export(tables: Sequence[Table], available_bytes: int, output: str, checkpoint_dir: str) -> None:
    """Before the job starts: says what will not be exported, and why.

    Tables without an `input_dim` are not counted: their final number of rows is unknown.

    Raises:
        ModelDefinitionError: nothing could be exported, and there are no checkpoints either.
    """
    sizes = {table.name: 4 * table.dim * table.input_dim for table in tables}
    size = sum(sizes.values())
    plan = plan_export(size, available_bytes)
    if plan.model_file:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    tables_here = f"The embedding tables have {_gb(size)} (the largest is {largest!r})"
    if plan.saved_model:
        _log.warning("%s: no model.keras is exported, %s", tables_here, _reason(needed_bytes(size)[1], available_bytes))
        return
    reason = why_not(size, available_bytes)
    if checkpoint_dir:
        _log.warning("%s: no model is exported, %s. %s", tables_here, reason, instead(checkpoint_dir))
        return
    raise ModelDefinitionError(
        f"{tables_here}: no model can be exported to {output}, {reason}; and without --checkpoint_dir "
        "the trained model would be lost.",
        "Give the job a --checkpoint_dir, its workers more memory, or leave --output out.",
    )


def why_not(tables_bytes: int, available_bytes: int) -> str:
    """Explain why no SavedModel is written."""
    return _reason(needed_bytes(tables_bytes)[0], available_bytes)


def instead(checkpoint_dir: str) -> str:
    """Return the substitute for an export."""
    return f"The newest checkpoint in {checkpoint_dir} is the trained model."


def _reason(needed: float, available_bytes: int) -> str:
    return f"which needs up to {_gb(needed)} of memory where there are {_gb(available_bytes)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
