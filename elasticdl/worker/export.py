"""TRAIN_END: exports the trained model, under a name that only a confirmed lease may make final, then the callbacks."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from elasticdl.frameworks.framework import Framework, Parameters
from elasticdl.worker.batches import LeaseLost
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.strategy import Strategy

_log = logging.getLogger("elasticdl.worker")


def end_training(framework: Framework, strategy: Strategy, link: MasterLink, held: HeldLease, output: str) -> None:
    """Exports to `output`, if there is one, and calls the user's callbacks.

    Raises:
        LeaseLost: somebody else does it.
    """
    parameters = strategy.values(held).parameters
    if output:
        _export(framework, strategy, link, held, parameters, Path(output))
    elif not link.confirm(held.id):
        raise LeaseLost
    framework.end_training(parameters, output)


def _export(
    framework: Framework,
    strategy: Strategy,
    link: MasterLink,
    held: HeldLease,
    parameters: Parameters | None,
    final: Path,
) -> None:
    """Writes to a name of the lease's own and, when the master confirms the lease, renames that to `final`."""
    temporary = final.with_name(f".{final.name}.{held.id}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    framework.export(str(temporary), parameters, strategy.tables(held))
    if not link.confirm(held.id):
        shutil.rmtree(temporary, ignore_errors=True)
        raise LeaseLost
    retired = final.with_name(f".{final.name}.{held.id}.old")
    if final.exists():
        os.rename(final, retired)
    os.rename(temporary, final)
    shutil.rmtree(retired, ignore_errors=True)
    _log.info("Exported the model to %s", final)
