"""The port `Strategy`: how minibatches become part of the model that all workers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from elasticdl.frameworks.framework import Batch, Floats, Parameters, TableRows
from elasticdl.worker.input.task_stream import TaskBatches
from elasticdl.worker.leases import HeldLease

Commit = Callable[[int, float | None], None]  # (minibatch, loss): it is in the model


@dataclass(frozen=True, slots=True)
class Values:
    """A model as read for evaluation or export.  `parameters` None: those of the framework itself."""

    parameters: Parameters | None
    rows: Callable[[Batch], Mapping[str, Floats]]


class Strategy(Protocol):
    """Raises `LeaseLost` where a lease is given and turns out not to be ours any more."""

    def begin(self, held: HeldLease) -> None:
        """Takes a task over: finds which of its minibatches the model holds, into ``held.committed``."""
        ...

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        """Works the minibatches off; on return all of them, or those before the cut, are in the model and committed."""
        ...

    def values(self, held: HeldLease) -> Values:
        """The living model, for evaluation."""
        ...

    def tables(self, held: HeldLease) -> list[TableRows]:
        """Embedding tables, for export; their rows are read when their chunks are taken."""
        ...

    def save_last(self) -> None:
        """Write the trained model's last checkpoint, if this worker holds the model.

        Raises:
            LastCheckpointError: it cannot be written.
        """
        ...

    def close(self) -> None:
        """The job is over, or this worker leaves."""
        ...
