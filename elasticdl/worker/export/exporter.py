"""Work of one worker alone: TRAIN_END exports the trained model, then the callbacks; CALLBACK does it on the way.

A model is written under a name of the lease's own, which only a confirmed lease may make final.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from elasticdl.frameworks.framework import Framework, Parameters, TableRows
from elasticdl.rpc.memory import available_bytes
from elasticdl.worker.export.plan import ExportPlan, instead, plan_export, why_not
from elasticdl.worker.export.stream import ExportWriter
from elasticdl.worker.input.batches import LeaseLost
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.strategy import Values
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_LOOK_S = 0.5
_BUFFER_BYTES = 1 << 20
_SIGKILL = -9
_FILES = (".keras", ".pt")  # the frameworks' own, as `Framework.export` names them: model.keras, model.pt
_NO_FILE = "Give a directory: elasticdl.api.callbacks.ModelCheckpoint writes a whole export there."


class ReadableModel(Protocol):
    """The model to export: the half of a `Strategy` that reads."""

    def values(self, held: HeldLease) -> Values: ...

    def tables(self, held: HeldLease) -> list[TableRows]: ...


class Exporter:
    """Ends the training of one job."""

    def __init__(self, framework: Framework, model: ReadableModel, link: MasterLink, spec: JobSpec) -> None:
        self._framework = framework
        self._model = model
        self._link = link
        self._spec = spec

    def end_training(self, held: HeldLease) -> None:
        """Exports to `--output`, if there is one, and calls the user's callbacks.

        Raises:
            LeaseLost: another worker has the lease.
            ModelDefinitionError: the model cannot be exported.
        """
        parameters = self._model.values(held).parameters
        paths = [self._spec.output, *self._framework.report().rules.export_paths]
        exported = [self._export(held, parameters, self._place(path)) for path in dict.fromkeys(paths) if path]
        if not any(exported):
            self._confirm(held)
        self._framework.end_training(parameters, self._spec.output)

    def occasion(self, held: HeldLease) -> None:
        """Saves the model as it is now, or calls the user's callbacks at the end of an epoch.

        Raises:
            LeaseLost: another worker has the lease.
            ModelDefinitionError: the model cannot be saved.
        """
        what, parameters = held.lease.occasion, self._model.values(held).parameters
        if what.save_to:
            self._check_named(what.save_to)
            self._export(held, parameters, self._place(what.save_to))
        else:
            self._confirm(held)
            self._framework.end_epoch(parameters, what.epoch, what.logs)

    def _check_named(self, path: str) -> None:
        """That a path lies in the directory of checkpoints, or is one of the user's own module.

        Raises:
            ModelDefinitionError: nothing may be written there because a message names it.
        """
        own = os.path.realpath(self._spec.checkpoint_dir)
        is_inside = bool(self._spec.checkpoint_dir) and Path(os.path.realpath(self._place(path))).is_relative_to(own)
        if not is_inside and not self._framework.report().rules.can_name(path):
            raise ModelDefinitionError(
                f"The model is not saved to {path}: no ModelCheckpoint of this worker's module has such a path, and "
                "it is not in --checkpoint_dir.",
                "Give ModelCheckpoint a path that is the same in every process, or a relative one.",
            )

    def _place(self, path: str) -> Path:
        """Of a callback's path: a relative one lies in the directory of checkpoints."""
        return Path(path if path == self._spec.output else os.path.join(self._spec.checkpoint_dir, path))

    def _export(self, held: HeldLease, parameters: Parameters | None, final: Path) -> bool:
        """Writes to a name of the lease's own and, when the master confirms the lease, renames that to `final`.

        Returns:
            Whether it did: what does not fit into the memory there is stays a checkpoint.
        """
        tables = self._model.tables(held)
        size, available = sum(4 * table.dim * table.num_rows for table in tables), available_bytes()
        plan = plan_export(size, available)
        if not plan.saved_model and self._spec.checkpoint_dir:
            _log.warning("No model is exported, %s. %s", why_not(size, available), instead(self._spec.checkpoint_dir))
            return False
        temporary = final.with_name(f".{final.name}.{held.id}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write(held, parameters, tables, temporary, plan)
            self._confirm(held)
            _put(temporary, final, held.id)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _log.info("Exported the model to %s", final)
        return True

    def _write(
        self,
        held: HeldLease,
        parameters: Parameters | None,
        tables: Sequence[TableRows],
        path: Path,
        plan: ExportPlan,
    ) -> None:
        if not plan.separate or parameters is None:
            self._framework.export(str(path), parameters, tables, plan.model_file)
            return
        if not plan.model_file:
            _log.warning("model.keras is left out: there is too little memory for it beside the SavedModel")
        order = {"job_spec": self._spec.to_json(), "path": str(path), "model_file": plan.model_file}
        export_elsewhere(order, parameters, tables, held)

    def _confirm(self, held: HeldLease) -> None:
        if not self._link.confirm(held.id):
            raise LeaseLost


def _put(made: Path, final: Path, lease: int) -> None:
    """Gives what was made its final name; of a path that names a file, the file of that kind alone.

    Raises:
        ModelDefinitionError: there is no such file of this model.
    """
    if final.suffix in _FILES:
        file = made / f"model{final.suffix}"
        if not file.exists():
            raise ModelDefinitionError(f"{final}: of this model no {final.suffix} file can be written.", _NO_FILE)
        os.replace(file, final)
        return
    retired = final.with_name(f".{final.name}.{lease}.old")
    if final.exists():
        os.rename(final, retired)
    os.rename(made, final)
    shutil.rmtree(retired, ignore_errors=True)


def export_elsewhere(
    order: dict[str, object], parameters: Parameters, tables: Sequence[TableRows], held: HeldLease
) -> dict[str, int]:
    """Lets a process of its own write the model, so that its memory is free again afterwards.

    Args:
        order: `job_spec`, `path` and `model_file`, for the process.

    Returns:
        Its memory: `started_bytes` before the first table, `peak_bytes` at most.

    Raises:
        LeaseLost: the lease was taken back meanwhile; the process is ended.
        ModelDefinitionError: it could not write the model.
    """
    told, tell = os.pipe()
    command = [sys.executable, "-m", "elasticdl.worker.export.process", str(tell)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(tell,), bufsize=_BUFFER_BYTES)
    os.close(tell)
    with os.fdopen(told) as answer:
        try:
            _send(process, order, parameters, tables)
            while process.poll() is None:
                if held.revoked:
                    raise LeaseLost
                _pause(process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return _result(process.returncode, answer.read())


def _send(
    process: subprocess.Popen[bytes], order: dict[str, object], parameters: Parameters, tables: Sequence[TableRows]
) -> None:
    """All that the process reads; less, if it ends before."""
    assert process.stdin is not None
    sizes = {"num_trainable": len(parameters.trainable), "num_non_trainable": len(parameters.non_trainable)}
    try:
        with process.stdin as pipe:
            writer = ExportWriter(pipe)  # type: ignore[arg-type]
            writer.message(**order, **sizes)
            writer.array(parameters.trainable)
            writer.array(parameters.non_trainable)
            for table in tables:
                writer.table(table)
            writer.end()
    except BrokenPipeError:
        process.wait()


def _pause(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return


def _result(exit_code: int, text: str) -> dict[str, int]:
    result = json.loads(text) if text else {}
    if exit_code == 0 and result:
        _log.info("The export process took %.1f GB of memory at most", result["peak_bytes"] / 1e9)
        return {name: result[name] for name in ("started_bytes", "peak_bytes")}
    if result.get("error"):
        raise ModelDefinitionError(f"The model cannot be exported: {result['error']}", details=result["details"])
    cause = "was killed, probably for want of memory" if exit_code == _SIGKILL else f"ended with code {exit_code}"
    raise ModelDefinitionError(
        f"The model cannot be exported: the export process {cause}.",
        "Give workers more memory; the last checkpoint holds the trained model.",
    )
