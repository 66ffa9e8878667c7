"""Tasks of one worker alone: TRAIN_END exports the trained model and calls the callbacks; CALLBACK does so in between.

A model is written under a temporary name of the lease; only a confirmed lease may give it its final name.

`ExportPlan`: the parts of an export that fit into memory, for tables on parameter servers; computed before the
training.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticdl.activities import Activity
from elasticdl.cluster.local.gpus import VARIABLE as GPUS_VARIABLE
from elasticdl.frameworks.framework import Framework, Parameters, Table, TableRows
from elasticdl.frameworks.memory_file import create_memory_file
from elasticdl.rpc.resource_use import available_bytes
from elasticdl.storage.paths import DONE_FILE, RemotePath, path_of, sync_directory, sync_file
from elasticdl.worker.export.process import ExportWriter
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, LeaseLost, ReadableModel
from elasticdl_client.choices import RUN_MODULE
from elasticdl_client.errors import (
    CheckpointError,
    ElasticDLError,
    JobError,
    LastCheckpointError,
    ModelDefinitionError,
)
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.storage_kinds import AnyPath, is_remote

_log = logging.getLogger("elasticdl.worker")
_LOOK_S = 0.5
_BUFFER_BYTES = 1 << 20
_LITTLE_SPACE = 1 << 20  # bytes; after a failed write, less than a block of the framework's writer is free
_SIGKILL = -9
_FILES = (".keras", ".pt")  # of the frameworks' own files, which `Framework.export` names model.keras and model.pt
_LOADABLE = ("model.pt", "model.keras", "saved_model.pb")  # a directory with one of these is a model
_BESIDE = {  # other files of an export, by the file that shows that they are not the user's
    "model.pt": ("model.pt2", "model.torchscript.pt"),
    "saved_model.pb": ("variables", "assets", "fingerprint.pb"),
}
_NO_FILE = "Give a directory: elasticdl.api.callbacks.ModelCheckpoint writes a whole export there."


class ExporterLink(Protocol):
    """The part of `MasterLink` that an export needs."""

    def confirm(self, lease: int) -> bool: ...

    def stop_training(self, reason: str) -> object: ...


class Exporter:
    """Exports the model of a job, and calls the callbacks."""

    def __init__(self, framework: Framework, model: ReadableModel, link: ExporterLink, spec: JobSpec) -> None:
        self._framework = framework
        self._model = model
        self._link = link
        self._spec = spec

    def end_training(self, held: HeldLease) -> str:
        """Export to `--output`, if given, and call the user's callbacks.

        Returns:
            Why no model was exported; empty if it was, or none was requested.

        Raises:
            LeaseLost: another worker has the lease.
            ModelDefinitionError: the model cannot be exported.
        """
        parameters = self._model.values(held).parameters
        paths = [self._spec.output, *self._framework.report().rules.export_paths]
        left_out = [self._export(held, parameters, self._place(path)) for path in dict.fromkeys(paths) if path]
        if all(left_out):
            self._confirm(held)
        self._framework.end_training(parameters, self._spec.output)
        reason = left_out[0] if left_out and (self._spec.output or all(left_out)) else ""
        return f"{reason}. {instead(self._spec.checkpoint_dir)} {_MORE_MEMORY}" if reason else ""

    def occasion(self, held: HeldLease) -> str:
        """Save the current model, or call the user's callbacks at the end of an epoch.

        Returns:
            Why the model was not saved; empty if it was, or none was requested.

        Raises:
            LeaseLost: another worker has the lease.
            ModelDefinitionError: the model cannot be saved.
        """
        what, parameters = held.lease.occasion, self._model.values(held).parameters
        if what.save_to:
            self._check_named(what.save_to)
            return self._export(held, parameters, self._place(what.save_to))
        self._confirm(held)
        if reason := self._framework.end_epoch(parameters, what.epoch, what.logs):
            self._link.stop_training(reason)
        return ""

    def _check_named(self, path: str) -> None:
        """Raise unless a path is in the directory of checkpoints, or is named by this worker's own module.

        Raises:
            ModelDefinitionError: a path is not trusted only because a message names it.
        """
        if not self._is_among_checkpoints(path) and not self._framework.report().rules.can_name(path):
            raise ModelDefinitionError(
                f"The model is not saved to {path}: no ModelCheckpoint of this worker's module has such a path, and "
                "it is not in --checkpoint_dir.",
                "Give ModelCheckpoint a path that is the same in every process, or a relative one.",
            )

    def _is_among_checkpoints(self, path: str) -> bool:
        own = self._spec.checkpoint_dir
        if is_remote(own) or is_remote(path):
            return is_remote(own) and not is_remote(path) and not path.startswith("/") and ".." not in path.split("/")
        return bool(own) and Path(os.path.realpath(str(self._place(path)))).is_relative_to(os.path.realpath(own))

    def _place(self, path: str) -> AnyPath:
        """Return the place for a callback's path; a relative path is in the directory of checkpoints."""
        is_whole = path == self._spec.output or is_remote(path)
        return path_of(path if is_whole else os.path.join(self._spec.checkpoint_dir, path))

    def _export(self, held: HeldLease, parameters: Parameters | None, final: AnyPath) -> str:
        """Write the model to a temporary place of the lease; when the master confirms the lease, move it to `final`.

        Returns:
            Why not; empty if it was written.  A model that does not fit into memory remains a checkpoint.
        """
        tables = self._model.tables(held)
        size, available = sum(4 * table.dim * table.num_rows for table in tables), available_bytes()
        plan = plan_export(size, available)
        if not plan.saved_model and self._spec.checkpoint_dir:
            reason = why_not(size, available)
            _log.warning("No model is written to %s: %s", final, reason)
            return reason
        with _temporary_place(final, held.id) as made:
            with self._full_disk_named(made, final):
                self._write(held, parameters, tables, made, plan)
            self._confirm(held)
            if isinstance(final, RemotePath):
                _publish(made, final, lambda: self._confirm(held))
            else:
                _move_to_final(made, Path(str(final)))
                _remove_abandoned(made, held.id)
        _log.info("Exported the model to %s", final)
        return ""

    @contextmanager
    def _full_disk_named(self, made: Path, final: AnyPath) -> Iterator[None]:
        """Convert the exceptions that the frameworks raise on a full disk into one error.

        Raises:
            CheckpointError: the disk with `made` is full.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, ElasticDLError | LeaseLost) or shutil.disk_usage(made.parent).free >= _LITTLE_SPACE:
                raise
            _log.warning("The model cannot be written: %s: %s", type(error).__name__, error)
            saved = self._spec.checkpoint_dir
            raise CheckpointError(
                f"The model is not exported to {final}: No space left on device {made.parent}.",
                "Make room there." + (f" {instead(saved)}" if saved else ""),
            ) from None

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


class ExportTasks:
    """Runs TRAIN_END and CALLBACK tasks, and reports them.  The caller closes the lease in its stream."""

    def __init__(self, failures: TaskFailures, exporter: Exporter) -> None:
        self._link, self._reporter, self._clock = failures.link, failures.reporter, failures.clock
        self._exporter = exporter

    def end_training(self, held: HeldLease, save_last: Callable[[], None]) -> None:
        """Run TRAIN_END: the export and the user's callbacks.

        Args:
            save_last: Called first; see `Strategy.save_last`.
        """

        def end(held: HeldLease) -> str:
            save_last()
            return self._exporter.end_training(held)

        self._run(held, end)

    def occasion(self, held: HeldLease) -> None:
        """Run CALLBACK: save the model, or call the user's callbacks."""
        self._run(held, self._exporter.occasion)

    def _run(self, held: HeldLease, do: Callable[[HeldLease], str]) -> None:
        """
        Args:
            do: Runs the task; returns why no model was written, if one was requested.
        """
        self._reporter.drain()
        try:
            with self._clock.during(Activity.EXPORT):
                not_exported = do(held)
        except LeaseLost:
            _log.info("Lease %d (%s) is lost; another worker has it", held.id, held.task_name)
        except JobError:
            raise
        except (LastCheckpointError, ModelDefinitionError) as error:
            _log.error("%s", error)
            self._link.fail(held.id, 0, str(error), getattr(error, "details", ""), [])
        except Exception as error:  # noqa: BLE001  the user's model and callbacks run in here
            _log.error("%s", traceback.format_exc())
            self._link.fail(held.id, 0, f"{type(error).__name__}: {error}", traceback.format_exc(), [])
        else:
            self._link.finish(held.id, 0, not_exported=not_exported)
        self._link.leases.remove(held.id)


def _move_to_final(made: Path, final: Path) -> None:
    """Move an export to its final name; if the path names a file, move only the file of that kind.

    Raises:
        ModelDefinitionError: there is no such file of this model.
    """
    for path in made.rglob("*"):
        if path.is_file():
            sync_file(path)
    if final.suffix in _FILES:
        os.replace(_file_for(made, final), final)
    elif final.is_dir():
        _move_into(made, final)
    else:
        final.unlink(missing_ok=True)
        os.rename(made, final)
    sync_directory(final.parent)


def _move_into(made: Path, final: Path) -> None:
    """Move an export into a directory, replacing an earlier one; other files stay: it may be the root of a volume.

    From the first change to the last, the directory is not a model.
    """
    # TensorFlow makes assets/ even for a model without assets: an empty one must not replace the user's.
    found = (entry for entry in made.iterdir() if not entry.is_dir() or any(entry.iterdir()))
    entries = sorted(found, key=lambda entry: _order(entry.name))
    earlier = [name for main, beside in _BESIDE.items() if _has_or_had(final, main) for name in beside]
    retired = made / ".old"
    retired.mkdir()
    for name in dict.fromkeys((*_LOADABLE, *earlier, *(entry.name for entry in entries))):
        with suppress(FileNotFoundError):
            os.rename(final / name, retired / name)
    for entry in entries:
        os.rename(entry, final / entry.name)
    sync_directory(final)


def _has_or_had(final: Path, main: str) -> bool:
    """Return whether a directory has a model's main file, or had one before an export into it was killed."""
    return (final / main).exists() or any(final.glob(f".*/.old/{main}"))


def _remove_abandoned(made: Path, lease: int) -> None:
    """Remove unfinished exports of this model that killed workers have left, under earlier leases."""
    ours = re.compile(re.escape(made.name.rpartition(".")[0]) + r"\.(\d+)(\.old)?")
    with suppress(OSError):  # the export itself is done
        for path in made.parent.iterdir():
            found = ours.fullmatch(path.name)
            if found is not None and int(found[1]) < lease:
                shutil.rmtree(path, ignore_errors=True)


def _order(name: str) -> tuple[int, str]:
    """Return the sort key of a model's files: the file that makes the directory a model comes last."""
    return (_LOADABLE.index(name) + 1 if name in _LOADABLE else 0, name)


def _publish(made: Path, final: RemotePath, confirm: Callable[[], None]) -> None:
    """Upload an export.

    First remove the file that makes an earlier export a model; upload the one of this export last.

    Args:
        made: The directory of the export on this machine.
        final: The place in storage.
        confirm: Called before each change; raises `LeaseLost`.

    Raises:
        ModelDefinitionError: the path names a file that this model does not have.
        StorageError: a file could not be uploaded.
    """
    if final.suffix in _FILES:
        final.storage.publish(final.url, _file_for(made, final))
        return
    names = [path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()]
    names.sort(key=_order)
    earlier = _names_in(final)
    for name in (DONE_FILE, *_LOADABLE, *(name for name in earlier if name not in names)):
        confirm()
        (final / name).unlink()
    for name in names:
        confirm()
        final.storage.publish((final / name).url, made / name)
    confirm()
    final.storage.publish((final / DONE_FILE).url, json.dumps({"files": names}).encode() + b"\n")


def _names_in(directory: RemotePath) -> list[str]:
    """Return the files of a complete export; other files in the directory must not be removed."""
    try:
        found = json.loads((directory / DONE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return []
    names = found.get("files") if isinstance(found, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _file_for(made: Path, final: AnyPath) -> Path:
    file = made / f"model{final.suffix}"
    if not file.exists():
        raise ModelDefinitionError(f"{final}: of this model no {final.suffix} file can be written.", _NO_FILE)
    return file


@contextmanager
def _temporary_place(final: AnyPath, lease: int) -> Iterator[Path]:
    """Yield where a lease writes a model: beside `final`, in it if it exists, or on the local disk for remote storage.

    An existing directory may be the root of a volume: only inside of it is a path on the same disk.
    """
    if isinstance(final, RemotePath):
        with tempfile.TemporaryDirectory(prefix="elasticdl-export-") as directory:
            yield Path(directory, "model")
        return
    place = Path(str(final))
    temporary = (place if place.is_dir() else place.parent) / f".{place.name}.{lease}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export_elsewhere(
    order: dict[str, object], parameters: Parameters, tables: Sequence[TableRows], held: HeldLease
) -> dict[str, int]:
    """Let another process write the model, so that its memory is freed afterwards.

    Args:
        order: `job_spec`, `path` and `model_file`, for the process.
        parameters: The dense values.
        tables: The embedding tables.
        held: The lease.

    Returns:
        Memory of the process: `started_bytes` before the first table, `peak_bytes` at most.

    Raises:
        LeaseLost: the lease was revoked meanwhile; the process is ended.
        ModelDefinitionError: the process could not write the model.
    """
    # Not a pipe: it would block after 64 KiB of an error text, while this process waits for the other to end.
    with os.fdopen(create_memory_file("elasticdl-export"), "r+") as answer:
        command = [sys.executable, *RUN_MODULE, "elasticdl.worker.export.process", str(answer.fileno())]
        # Without a GPU: this process has taken its memory, and tables must fit into main memory.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=(answer.fileno(),),
            bufsize=_BUFFER_BYTES,
            env={**os.environ, GPUS_VARIABLE: "-1"},
        )
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
        answer.seek(0)
        return _result(process.returncode, answer.read())


def _send(
    process: subprocess.Popen[bytes], order: dict[str, object], parameters: Parameters, tables: Sequence[TableRows]
) -> None:
    """Send everything that the process reads; stop if it ends early."""
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


_PROCESS_BYTES = 700 << 20  # memory of the export process without tables
_SAVED_MODEL = 1.5  # memory for a SavedModel, times the tables; measured: 1.1 to 1.3
_MODEL_FILE = 2.5  # the same for the framework's own file, written after it; measured: 2.2
_SEPARATE_BYTES = 64 << 20  # larger tables are exported by another process
_MORE_MEMORY = "For an export give workers more memory, on Kubernetes by --worker_resource_limit."


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The parts of an export that fit into memory.

    Attributes:
        saved_model: Whether a SavedModel is written; if not, the last checkpoint is the trained model.
        model_file: Whether the framework's own file is written.
        separate: Whether another process writes them.
    """

    saved_model: bool = True
    model_file: bool = True
    separate: bool = False


def plan_export(tables_bytes: int, available_bytes: int) -> ExportPlan:
    """Return the parts of an export that fit into the available memory."""
    if tables_bytes <= _SEPARATE_BYTES:
        return ExportPlan()
    saved_model, model_file = needed_bytes(tables_bytes)
    return ExportPlan(saved_model <= available_bytes, model_file <= available_bytes, separate=True)


def needed_bytes(tables_bytes: int) -> tuple[float, float]:
    """Return the most memory that an export takes, with a SavedModel only, and with the framework's own file, too."""
    return _PROCESS_BYTES + _SAVED_MODEL * tables_bytes, _PROCESS_BYTES + _MODEL_FILE * tables_bytes


def announce_export(tables: Sequence[Table], available_bytes: int, output: str, checkpoint_dir: str) -> None:
    """Log, before the job starts, what will not be exported, and why.

    Tables without an `input_dim` are not counted: their final number of rows is unknown.

    Raises:
        ModelDefinitionError: nothing could be exported, and the job writes no checkpoints either.
    """
    sizes = {table.name: 4 * table.dim * table.input_dim for table in tables}
    size = sum(sizes.values())
    plan = plan_export(size, available_bytes)
    if plan.model_file:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    tables_here = f"The embedding tables have {_gb(size)} (the largest is {largest!r})"
    if plan.saved_model:
        reason = _reason(needed_bytes(size)[1], available_bytes)
        _log.warning("%s, so no model.keras is exported: %s", tables_here, reason)
        return
    reason = why_not(size, available_bytes)
    if checkpoint_dir:
        text = "%s, so no model is exported: %s. %s %s"
        _log.warning(text, tables_here, reason, instead(checkpoint_dir), _MORE_MEMORY)
        return
    raise ModelDefinitionError(
        f"{tables_here}, so no model can be exported to {output}: {reason}. Without --checkpoint_dir "
        "the trained model would be lost.",
        "Give the job a --checkpoint_dir, its workers more memory, or leave --output out.",
    )


def why_not(tables_bytes: int, available_bytes: int) -> str:
    """Explain why no SavedModel is written."""
    return _reason(needed_bytes(tables_bytes)[0], available_bytes)


def instead(checkpoint_dir: str) -> str:
    """Return the sentence that names the substitute for an export."""
    taken = "the trained model, which --checkpoint_dir_for_init takes"
    return f"The last checkpoint in {checkpoint_dir}, written when training is done, is {taken}."


def _reason(needed: float, available_bytes: int) -> str:
    return f"it needs up to {_gb(needed)} of memory, and there are {_gb(available_bytes)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
