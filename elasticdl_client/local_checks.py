"""Checks before a local job starts: paths, symbols, the port.  Writes nothing.

`check_sources`: that a data source is there, its kind, parameters and columns.

Columns are looked up where that is cheap: in the header of CSV files, in tables of SQLite, in the schema of Parquet and
Arrow files where pyarrow is installed.  Writes nothing.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import glob
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import socket
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, quote

from elasticdl_client import requirements_file
from elasticdl_client.checkpoint_manifest import MANIFEST
from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.data_sources import (
    DESCRIPTIONS,
    check_kind_of_storage,
    check_params,
    is_table,
    is_url,
    known_type,
    names_in_header,
    paths_matching,
    split_columns,
    split_sources,
    type_by_ending,
)
from elasticdl_client.errors import CheckpointError, DataError, FlagError, JobError
from elasticdl_client.job_spec import JobSpec, flag_fields
from elasticdl_client.model_source import check_model_source, reads_data_itself
from elasticdl_client.partitions import partition_of
from elasticdl_client.storage_kinds import check_installed, check_url, is_remote
from elasticdl_client.trained_model import check_beginning, check_unused, look_at
from elasticdl_client.zoo_modules import framework_of

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
    """Check a job against this machine and return it with absolute paths.

    Raises:
        ElasticDLError: the first thing that cannot work.
    """
    zoo = _absolute(spec.model_zoo or ".")
    if spec.job_command:
        _check_command(spec, zoo)
    elif spec.job_type is not JobType.ANALYZE:
        check_model_source(spec, zoo)
    if spec.job_type is not JobType.ANALYZE:  # it has no code of the user's
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
    _check_written(spec, changes)
    if "checkpoint_dir_for_init" in changes:
        path = Path(changes["checkpoint_dir_for_init"])
        if spec.job_type is JobType.TRAIN:
            _check_checkpoint(path, spec.distribution_strategy)
        else:
            _check_trained(dataclasses.replace(spec, model_zoo=str(zoo)), path)
    for name in spec.trackers:
        if importlib.util.find_spec(name.value) is None:
            raise FlagError(f"--track={name}: the package {name} is not installed here.", f"pip install {name}")
    if spec.master_port:
        _check_port("master_port", spec.master_port, "Leave --master_port out to use a free port.")
    if spec.metrics_port:
        _check_port("metrics_port", spec.metrics_port, "Name another port, or leave --metrics_port out.")
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def _check_written(spec: JobSpec, paths: Mapping[str, str]) -> None:
    """Check what the job writes to; `paths` are absolute, by flag."""
    for name in _WRITTEN:
        if name in paths and not is_table(paths[name]):
            path = Path(paths[name])
            is_file = name == "metrics_output" or (name == "output" and spec.job_type is JobType.ANALYZE)
            if is_file and path.is_dir():
                raise FlagError(f"--{name}: {path} is a directory.", "Name a file in it.")
            _check_writable(name, path.parent if is_file else path)
            if name == "prediction_outputs" and spec.job_type is JobType.PREDICT:
                check_unused(path)


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


def _check_checkpoint(path: Path, strategy: DistributionStrategy) -> None:
    """That it is a checkpoint for this strategy, or a directory with one in it; the job reads its content."""
    hint = f"Name a directory version-N with a {MANIFEST} in it, or the directory that holds such versions."
    versions = [path, *path.glob("version-*")]
    if any((version / MANIFEST).is_file() for version in versions):
        check_beginning(path, strategy)
        return
    with contextlib.suppress(CheckpointError):
        raise FlagError(
            f"--checkpoint_dir_for_init={path} is {look_at(path).kind}, and training begins with a checkpoint.",
            "Name the checkpoints of the job that trained it, its --checkpoint_dir.",
        )
    if not path.is_dir():
        raise FlagError(f"--checkpoint_dir_for_init={path} is not a directory.", hint)
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


_LONGEST_HEADER = 1 << 20
_UNPACK = "Unpack it: records are read from their places in the file."
_CONVERT = "Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE."
_NOT_TEXT = {  # the first bytes of a file → its kind, and what to do
    b"\x1f\x8b": ("compressed by gzip", _UNPACK),
    b"PK\x03\x04": ("a zip archive", _UNPACK),
    b"\xfd7zXZ\x00": ("compressed by xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _UNPACK),
    b"\xff\xfe": ("in UTF-16", _CONVERT),
    b"\xfe\xff": ("in UTF-16", _CONVERT),
}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_BZIP2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")  # its first three bytes alone may begin a text, too
_PARQUET = b"PAR1"  # at both ends: the first column of a table may have that name


def absolute_sources(origin: str) -> str:
    """Return the same sources with absolute paths.

    Raises:
        DataError: one of several has a comma in its path.
    """
    sources = [_absolute_source(source) for source in split_sources(os.path.expanduser(origin))]
    split = next((source for source in sources if "," in source), "") if len(sources) > 1 else ""
    if split:
        raise DataError(
            f"{split} has a comma in it, which separates sources.",
            "Name a directory or a pattern alone, or rename the directory.",
        )
    return ",".join(sources)


def check_sources(name: str, spec: JobSpec, origin: str) -> None:
    """Check one of a job's data flags.

    Args:
        name: Name of the flag.
        origin: its value, with absolute paths.

    Raises:
        DataError: a source is not there, or not what the flags say.
    """
    for source in split_sources(origin):
        if is_url(source):
            _check_table(name, spec, source)
        elif is_remote(source):
            _check_storage(name, spec, source)
        else:
            _check_path(name, source)
            _check_kind(name, spec, source)


def _absolute_source(source: str) -> str:
    scheme, mark, rest = source.partition("://")
    if not mark:
        return os.path.abspath(os.path.expanduser(source))
    path, question, query = rest.partition("?")
    if scheme == "sqlite" and path.startswith("/") and not path.startswith("//"):
        return f"sqlite:///{os.path.abspath(path[1:])}{question}{query}"
    return source


def _check_path(name: str, source: str) -> None:
    if not os.path.exists(source):
        if glob.has_magic(source) and paths_matching(source):
            return
        raise DataError(f"--{name}: {source} does not exist.", "Name a file, a directory of files, or a pattern.")
    if not os.access(source, os.R_OK):
        raise DataError(f"--{name}: {source} cannot be read.", "Check its permissions.")
    if os.path.isdir(source):
        if not any(not entry.startswith((".", "_")) for entry in os.listdir(source)):
            raise DataError(f"--{name}: the directory {source} is empty.", "Write data into it, or name another one.")
    elif os.path.isfile(source) and os.path.getsize(source) == 0:
        raise DataError(f"--{name}: the file {source} is empty.", "Write data into it, or name another one.")


def _check_storage(name: str, spec: JobSpec, url: str) -> None:
    """Check a URL without a request; the job's first request checks the rest."""
    check_url(url)
    check_installed(url)
    params = spec.data_reader_params_dict()
    given = params.pop("reader_type", None)
    if given is not None:
        kind = known_type(given)
        check_kind_of_storage(kind, url)
        check_params(kind, params, f"--{name}")


def _check_kind(name: str, spec: JobSpec, source: str) -> None:
    params = spec.data_reader_params_dict()
    given = params.pop("reader_type", None)
    files = _files(source)
    is_packed = bool(files) and all(path.lower().endswith(_PACKED) for path in files) and not _has_directories(source)
    is_unclear = type_by_ending(files) == "RecordIO" or _describes_directories(source, files)
    if given is None and (not files or (os.path.isdir(source) and is_unclear)):
        if is_packed:
            _check_is_text(name, files[0])
        return  # the content of a directory decides: images, a saved data set, RecordIO
    kind = known_type(given) if given is not None else type_by_ending(files)
    check_params(kind, params, source)
    if kind in ("Parquet", "Arrow") and files and _wanted_columns(spec):
        columns = _schema(kind, files[0])
        if columns:
            columns = [*columns, *partition_of(source, files[0])]
            _check_columns(name, spec, files[0], columns)
    if is_packed or (kind in ("CSV", "JSONL", "Text") and files):
        _check_is_text(name, files[0])
    if kind == "JSONL" and files:
        _check_first_object(name, files[0])
    header = str(params.get("header", True)).lower() != "false"
    if kind == "CSV" and header and files:
        delimiter = str(params.get("delimiter", "\t" if files[0].lower().endswith(".tsv") else ","))
        columns = _header(files[0], delimiter) if len(delimiter) == 1 else []
        if "delimiter" not in params and len(columns) == 1 and _wanted_columns(spec):
            _check_delimiter(name, files[0], columns[0])
        if columns:
            _check_columns(name, spec, files[0], [*columns, *partition_of(source, files[0])])


def _files(source: str) -> list[str]:
    paths = [source]
    if os.path.isdir(source):
        paths = [os.path.join(source, entry) for entry in sorted(os.listdir(source))]
    elif not os.path.exists(source):
        paths = paths_matching(source)
    named = ((path, os.path.basename(path)) for path in paths)
    return [
        path
        for path, name in named
        if os.path.isfile(path) and not name.startswith((".", "_")) and (path == source or name not in DESCRIPTIONS)
    ]


def _describes_directories(source: str, files: list[str]) -> bool:
    """Return whether files may describe directories beside them, such as dataset_dict.json or the names of classes."""
    return all(path.lower().endswith(".json") for path in files) and _has_directories(source)


def _has_directories(source: str) -> bool:
    """Return whether directories are in it, such as one unpacked from an archive beside it."""
    return os.path.isdir(source) and any(entry.is_dir() and entry.name[0] not in "._" for entry in os.scandir(source))


def _header(path: str, delimiter: str) -> list[str]:
    with open(path, "rb") as file:
        data = file.read(_LONGEST_HEADER)
    if len(data) == _LONGEST_HEADER and b"\n" not in data.strip():
        return []  # the reader parses it
    text = io.StringIO(data.decode("utf-8-sig", errors="replace"), newline="")
    rows = csv.reader(text, delimiter=delimiter)
    return list(names_in_header(next(rows, []), path))


def _check_is_text(name: str, path: str) -> None:
    with open(path, "rb") as file:
        start = file.read(16)
        file.seek(-min(len(_PARQUET), len(start)), os.SEEK_END)
        end = file.read()
    found = next((one for magic, one in _NOT_TEXT.items() if start.startswith(magic)), None)
    if _BZIP2.match(start):
        found = "compressed by bzip2", _UNPACK
    elif start.startswith(_PARQUET) and end == _PARQUET:
        found = "a Parquet file", "Name it so that it ends in .parquet."
    if found is not None:
        kind, hint = found
        raise DataError(f"--{name}: {path} is {kind}, not records or a text in UTF-8.", hint)


def _check_delimiter(name: str, path: str, column: str) -> None:
    """Refuse a table whose only column has another delimiter in its name, and as often in the first row."""
    with open(path, "rb") as file:
        lines = file.read(_LONGEST_HEADER).decode("utf-8-sig", errors="replace").splitlines()
    row = lines[1] if len(lines) > 1 else ""
    for delimiter in ";\t|":
        if 0 < column.count(delimiter) == row.count(delimiter):
            shown = json.dumps(delimiter)
            raise DataError(
                f"--{name}: the rows of {path} have a single field with commas between fields: {column[:100]}",
                f"Their delimiter seems to be {shown}: --data_reader_params='delimiter={shown}'.",
            )


def _check_first_object(name: str, path: str) -> None:
    with open(path, "rb") as file:
        line = file.readline(_LONGEST_HEADER)
    if not line.endswith(b"\n") and len(line) == _LONGEST_HEADER:
        return  # the reader parses it
    text = line.decode("utf-8-sig", errors="replace").strip()
    try:
        is_object = not text or isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise DataError(
            f"--{name}: the first line of {path} is not a JSON object: {text[:100]}",
            "JSON Lines have one object a line; write an array as lines, for example with jq -c '.[]'.",
        )


def _schema(kind: str, path: str) -> list[str]:
    """Return the columns of a Parquet or Arrow file, fields of structs as `outer.inner`; empty if unreadable."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:  # the reader names the package
        return []
    try:
        if kind == "Parquet":
            schema = pq.read_schema(path)
        else:
            with pa.memory_map(path) as file:
                schema = pa.ipc.open_file(file).schema
    except (pa.ArrowException, OSError):  # the reader says what is wrong, or the file is an Arrow stream
        return []
    fields = list(schema)
    while any(pa.types.is_struct(field.type) for field in fields):
        fields = [inner for field in fields for inner in field.flatten()]
    return [str(field.name) for field in fields]


def _check_table(name: str, spec: JobSpec, url: str) -> None:
    check_params("SQL", set(spec.data_reader_params_dict()) - {"reader_type"}, f"--{name}")
    scheme, _, rest = url.partition("://")
    path, _, query = rest.partition("?")
    table = parse_qs(query).get("table", [""])[0]
    if not table:
        raise DataError(f"--{name}: the URL of {scheme} names no table.", "Write it after the URL: ?table=NAME.")
    if scheme != "sqlite":
        return
    path = path.removeprefix("/")
    if not os.path.isfile(path):
        raise DataError(
            f"--{name}: the database {path} does not exist.", "sqlite:////data/data.db is an absolute path."
        )
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as connection:
            columns = [row[1] for row in connection.execute("select * from pragma_table_info(?)", (table,))]
    except sqlite3.Error as error:
        raise DataError(f"--{name}: {path} cannot be read: {error}.", "Name a database of SQLite.") from error
    if not columns:
        raise DataError(f"--{name}: {path} has no table {table}.", "Write its name after the URL: ?table=NAME.")
    _check_columns(name, spec, f"the table {table} of {path}", columns)


def _wanted_columns(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the columns that flags name, each with its flag."""
    params: Mapping[str, object] = spec.data_reader_params_dict()
    wanted = [("--columns", column) for column in split_columns(spec.columns)]
    wanted += [("--prediction_columns", column) for column in split_columns(spec.prediction_columns)]
    if spec.label_column and spec.job_type is not JobType.PREDICT:
        wanted.append(("--label_column", spec.label_column))
    dtypes = params.get("column_dtypes", {})
    wanted += [("column_dtypes", str(column)) for column in dtypes] if isinstance(dtypes, dict) else []
    return wanted


def _check_columns(name: str, spec: JobSpec, where: str, columns: Sequence[str]) -> None:
    for flag, column in _wanted_columns(spec):
        if column not in columns:
            raise DataError(
                f"--{name}: {where} has no column {column}, which {flag} names.", f"It has: {', '.join(columns)}."
            )
