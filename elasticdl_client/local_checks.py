"""What can be known to fail before a local job starts: paths, symbols, the port.  Writes nothing."""

from __future__ import annotations

import dataclasses
import glob
import os
import socket
from pathlib import Path

from elasticdl_client.errors import DataError, FlagError, JobError
from elasticdl_client.job_spec import JobSpec, flag_fields
from elasticdl_client.model_source import check_model_source, reads_data_itself

_DATA_FLAGS = ("training_data", "validation_data", "prediction_data")
_MANIFEST = "MANIFEST.json"
_PATH_FLAGS = ("output", "checkpoint_dir", "checkpoint_dir_for_init")


def check_local(spec: JobSpec) -> JobSpec:
    """Checks a job against this machine and returns it with absolute paths.

    Raises:
        ElasticDLError: the first thing that cannot work.
    """
    zoo = _absolute(spec.model_zoo or ".")
    check_model_source(spec, zoo)
    changes: dict[str, str] = {"model_zoo": str(zoo)}
    own_reader = reads_data_itself(spec, zoo)
    flags = flag_fields(spec.job_type)
    for name in _DATA_FLAGS:
        source = getattr(spec, name)
        if name in flags and source and not own_reader:
            changes[name] = os.path.abspath(os.path.expanduser(source))
            _check_data(name, changes[name])
    for name in _PATH_FLAGS:
        if getattr(spec, name):
            changes[name] = str(_absolute(getattr(spec, name)))
    for name in ("output", "checkpoint_dir"):
        if name in changes:
            _check_writable(name, Path(changes[name]))
    if "checkpoint_dir_for_init" in changes:
        _check_checkpoint(Path(changes["checkpoint_dir_for_init"]))
    if spec.master_port:
        _check_port(spec.master_port)
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _check_data(name: str, source: str) -> None:
    if not os.path.exists(source):
        if glob.has_magic(source) and glob.glob(source, recursive=True):
            return
        raise DataError(f"--{name}: {source} does not exist.", "Name a file, a directory of files, or a pattern.")
    if not os.access(source, os.R_OK):
        raise DataError(f"--{name}: {source} cannot be read.", "Check its permissions.")
    if os.path.isdir(source):
        if not any(not entry.startswith((".", "_")) for entry in os.listdir(source)):
            raise DataError(f"--{name}: the directory {source} is empty.", "Write data into it, or name another one.")
    elif os.path.isfile(source) and os.path.getsize(source) == 0:
        raise DataError(f"--{name}: the file {source} is empty.", "Write data into it, or name another one.")


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
    hint = f"Name a directory version-N with a {_MANIFEST} in it, or the directory that holds such versions."
    if not path.is_dir():
        raise FlagError(f"--checkpoint_dir_for_init={path} is not a directory.", hint)
    versions = [path, *path.glob("version-*")]
    if any((version / _MANIFEST).is_file() for version in versions):
        return
    incomplete = len(versions) - 1
    found = f"its {incomplete} versions were never completed" if incomplete else "it holds no version"
    raise FlagError(f"--checkpoint_dir_for_init={path} is no checkpoint: {found}.", hint)


def _check_port(port: int) -> None:
    with socket.socket() as wanted:
        wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            wanted.bind(("", port))
        except OSError as error:
            raise JobError(
                f"--master_port={port} cannot be had: {error.strerror}.",
                "Leave --master_port out: a free one is taken.",
            ) from error
