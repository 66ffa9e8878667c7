"""Checks before a local job starts: paths, symbols, the port.  Writes nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import shutil
import socket
import sys
from pathlib import Path

from elasticdl_client import requirements_file
from elasticdl_client.checkpoint_manifest import MANIFEST
from elasticdl_client.choices import JobType
from elasticdl_client.data_checks import absolute_sources, check_sources
from elasticdl_client.data_sources import is_table
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_spec import JobSpec, flag_fields
from elasticdl_client.model_framework import framework_of
from elasticdl_client.model_source import check_model_source, reads_data_itself
from elasticdl_client.storage_kinds import check_installed, is_remote
from elasticdl_client.trained_model import check_unused, look_at

_DATA_FLAGS = ("training_data", "validation_data", "prediction_data", "data")
_PATH_FLAGS = (
    "bad_records_dir",
    "output",
    "checkpoint_dir",
    "checkpoint_dir_for_init",
    "metrics_output",
    "prediction_outputs",
    "tensorboard_log_dir",
)


_WRITTEN = (
    "output",
    "checkpoint_dir",
    "bad_records_dir",
    "prediction_outputs",
    "metrics_output",
    "tensorboard_log_dir",
)


def check_local(spec: JobSpec) -> JobSpec:
    """Checks a job against this machine and returns it with absolute paths.

    Raises:
        ElasticDLError: the first thing that cannot work.
    """
    zoo = _absolute(spec.model_zoo or ".")
    if spec.job_command:
        _check_command(spec, zoo)
    elif spec.job_type is not JobType.ANALYZE:
        check_model_source(spec, zoo)
    requirements_file.check_installed(zoo)
    changes: dict[str, str] = {"model_zoo": str(zoo)}
    own_reader = not spec.job_command and reads_data_itself(spec, zoo)
    flags = flag_fields(spec.job_type)
    for name in _DATA_FLAGS:
        source = getattr(spec, name)
        if name in flags and source and not own_reader:
            changes[name] = absolute_sources(source)
            check_sources(name, spec, changes[name])
    if "data" in changes:
        changes["prediction_data"] = changes["data"]
    for name in _PATH_FLAGS:
        path = getattr(spec, name)
        if is_remote(path):
            check_installed(path)
        elif is_table(path):
            changes[name] = absolute_sources(path)
        elif path:
            changes[name] = str(_absolute(path))
    for name in _WRITTEN:
        if name in changes and not is_table(changes[name]):
            is_file = name == "metrics_output" or spec.job_type is JobType.ANALYZE
            _check_writable(name, Path(changes[name]).parent if is_file else Path(changes[name]))
    if "checkpoint_dir_for_init" in changes:
        path = Path(changes["checkpoint_dir_for_init"])
        if spec.job_type is JobType.TRAIN:
            _check_checkpoint(path)
        else:
            _check_trained(dataclasses.replace(spec, model_zoo=str(zoo)), path)
    is_written = "prediction_outputs" in changes and not is_table(changes["prediction_outputs"])
    if is_written and spec.job_type is JobType.PREDICT:
        check_unused(Path(changes["prediction_outputs"]))
    for name in spec.trackers:
        if importlib.util.find_spec(name.value) is None:
            raise FlagError(f"--track={name}: the package {name} is not installed here.", f"pip install {name}")
    if spec.master_port:
        _check_port("master_port", spec.master_port, "Leave --master_port out to use a free port.")
    if spec.metrics_port:
        _check_port("metrics_port", spec.metrics_port, "Name another port, or leave --metrics_port out.")
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _check_command(spec: JobSpec, zoo: Path) -> None:
    program = shlex.split(spec.job_command)[0]
    if not zoo.is_dir():
        raise FlagError(f"--model_zoo: {zoo} is not a directory.", "--job_command runs in it; name another one.")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])  # as in a pod
    if shutil.which(str(zoo / program) if "/" in program else program, path=path) is None:
        raise FlagError(
            f"--job_command: {program} is not executable, or not on PATH.",
            f"It is looked for on PATH, or with a slash in it from the directory {zoo} (--model_zoo).",
        )


def _check_writable(name: str, path: Path) -> None:
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise FlagError(f"--{name}: {existing} is not a directory.", f"Name another --{name}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise FlagError(f"--{name}: {existing} cannot be written.", f"Check its permissions, or name another --{name}.")


def _check_checkpoint(path: Path) -> None:
    """That it is a checkpoint, or a directory with one in it; what is inside is read by the job."""
    hint = f"Name a directory version-N with a {MANIFEST} in it, or the directory that holds such versions."
    if not path.is_dir():
        raise FlagError(f"--checkpoint_dir_for_init={path} is not a directory.", hint)
    versions = [path, *path.glob("version-*")]
    if any((version / MANIFEST).is_file() for version in versions):
        return
    incomplete = len(versions) - 1
    found = f"its {incomplete} versions were never completed" if incomplete else "it holds no version"
    raise FlagError(f"--checkpoint_dir_for_init={path} is not a checkpoint: {found}.", hint)


def _check_trained(spec: JobSpec, path: Path) -> None:
    """That there is a trained model, and that a job of this strategy and framework can load it."""
    found = look_at(path)
    found.check_strategy(spec.distribution_strategy)
    found.check_framework(framework_of(spec))


def _check_port(name: str, port: int, hint: str) -> None:
    with socket.socket() as wanted:
        wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            wanted.bind(("", port))
        except OSError as error:
            raise JobError(f"--{name}={port} cannot be used: {error.strerror}.", hint) from error
