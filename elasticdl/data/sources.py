"""Find the files of a data source, and check their checksums; also the errors shared by all readers of files.

A source is a file, a directory (its files, or those of its subdirectories if all of these are partitions), or a glob
pattern.  Files with names that begin with a dot or an underscore are not data; neither is a file of checksums.  Finding
files does not read them.

`need` imports a package that only some readers use, with an error that names the package to install.

`find_remote_files`: the files of a data source in storage, given by the URL of a file, a directory, or a pattern.

`SHA256SUMS` next to the data: the output of `sha256sum *`, compared with each file before its first record is read.
`sha256sum --check SHA256SUMS` makes the same check by hand.  A directory without this file is not checked.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import hashlib
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticdl.protocol import Shard
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.port import FileStatus, Storage
from elasticdl_client.data_sources import (
    DESCRIPTIONS,
    MANIFEST,
    is_hidden,
    is_url,
    paths_matching,
    split_sources,
    type_by_ending,
)
from elasticdl_client.errors import DataError, ElasticDLError, StorageFileMissing, StorageUnreachable
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.params import split_params
from elasticdl_client.partitions import Partitions, dtypes_of, is_partition
from elasticdl_client.secret_values import hide_in_flag
from elasticdl_client.storage_kinds import KINDS, is_remote, scheme_of

_log = logging.getLogger("elasticdl.data")


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Return a context that converts any error of a library that reads data to a `DataError`.

    Damaged data make parsers raise nearly anything, so an error is blamed on the data; its traceback is logged at level
    DEBUG.

    Args:
        what: The data being read: a file, a directory, a table.

    Raises:
        DataError: Instead of any other error.
    """
    try:
        yield
    except ElasticDLError:
        raise
    except Exception as error:
        _log.debug("%s cannot be read", what, exc_info=True)
        lines = str(error).strip().splitlines() or [""]
        raise DataError(
            f"{what} cannot be read: {type(error).__name__}: {lines[0]}",
            "It was cut off or changed after it was written, or is of another format: write it again or remove it.",
        ) from error


def find_files(source: str) -> list[str]:
    """Return the paths of the data files of a source, sorted; at least one.

    Raises:
        DataError: There is no file, a link is broken, or a name is not UTF-8.
    """
    if not source:
        raise DataError("The name of the data source is empty.", "Name a file or directory.")
    if is_remote(source):
        return find_remote_files(source)
    if os.path.isdir(source):
        return _files_of_directory(source)
    if os.path.exists(source):
        check_name(source)
        return [source]
    if glob.has_magic(source):
        paths = _files_of(path for path in paths_matching(source) if os.path.basename(path) not in DESCRIPTIONS)
        if paths:
            return paths
        raise DataError(f"No file matches {source}.", "Check the pattern, and that the data is mounted where it says.")
    _files_of([source])  # raises a better error if the source is a broken link
    parent = os.path.dirname(source) or "."
    there = "its parent directory exists" if os.path.isdir(parent) else f"{parent} does not exist either"
    raise DataError(
        f"The data source {source} does not exist ({there}).",
        "Check the path; in a pod, check that --volume mounts the data there.",
    )


class FoundFiles:
    """Keeps the result of `find_files` for a second use, since a process needs it twice when a job begins."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def find(self, source: str) -> list[str]:
        """Find the files of a source, and keep the list."""
        found = self._found[source] = find_files(source)
        return found

    def take(self, source: str) -> list[str]:
        """Return the kept list and drop it; without a kept list, find the files."""
        found = self._found.pop(source, None)
        return find_files(source) if found is None else found


def partition_dtypes(spec: JobSpec, find: Callable[[str], list[str]] | None = None) -> dict[str, str]:
    """Return the types of the partition columns (in names of directories) of a job's data, for all flags together.

    They are determined once for the job: a process that lists the files later may find others, and the validation data
    may have other values.

    Args:
        spec: The job's flags.
        find: Replaces `find_files`.

    Returns:
        Maps keys, the names before `=`, to "int64" or "string".

    Raises:
        DataError: A type in the flags does not fit the values, or is for a column that is in no name.
        StorageUnreachable: The storage does not respond.
    """
    origins = filter(None, (spec.training_data, spec.validation_data, spec.prediction_data))
    sources = [source for origin in origins for source in split_sources(origin)]
    try:
        partitions = [
            Partitions.of(((source, path) for path in (find or find_files)(source)), {})
            for source in sources
            if not is_url(source) and _may_have_partitions(source)
        ]
    except (ElasticDLError, OSError) as error:
        if isinstance(error, StorageUnreachable) and not spec.job_command:  # else a later success would lack the types
            raise
        return {}  # the reader of these data raises the error
    given = spec.data_reader_params_dict().get("partition_dtypes", {})
    if not isinstance(given, dict):
        return {}  # the reader raises the error
    dtypes = dtypes_of((values for one in partitions for values in one.values.values()), given)
    unknown = sorted(set(given) - set(dtypes))
    if unknown:
        raise DataError(
            f"--data_reader_params: no directory of the data is named {unknown[0]}=…, which partition_dtypes names.",
            f"There are: {', '.join(dtypes) or 'none'}.",
        )
    for one in partitions:
        found = Partitions(one.values, dtypes)
        for path, values in one.values.items():
            for key in values:
                found.value(path, key)
    return dtypes


def _may_have_partitions(source: str) -> bool:
    """Return whether a source may have partitions, so that its files, possibly millions, must be listed."""
    if is_remote(source) and not glob.has_magic(source):
        return True
    if os.path.isdir(source):
        return any(map(is_partition, os.listdir(source)))
    return glob.has_magic(source.rpartition("/")[0])


def with_partition_dtypes(spec: JobSpec, dtypes: Mapping[str, str]) -> JobSpec:
    """Return the job's flags with these types, so that its readers need not determine them."""
    if not dtypes:
        return spec
    others = [part for part in split_params(spec.data_reader_params) if not part.strip().startswith("partition_dtypes")]
    params = ";".join([*others, f"partition_dtypes={dict(dtypes)}"])
    if hide_in_flag("data_reader_params", params) != params:  # a secret flag, which workers get in another way
        return spec
    return replace(spec, data_reader_params=params)


def _files_of_directory(directory: str) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise DataError(f"The data directory {directory} cannot be listed: {error.strerror}.") from error
    missing = sorted((read_manifest(directory) or {}).keys() - names) if MANIFEST in names else []
    gone = next((name for name in missing if not os.path.exists(os.path.join(directory, name))), None)
    if gone is not None:
        raise DataError(
            f"{os.path.join(directory, MANIFEST)} lists {gone}, which is not there.",
            f"Copy the data again, or make {MANIFEST} anew where it was removed on purpose.",
        )
    paths = [os.path.join(directory, name) for name in names if is_data(name)]
    files = _files_of(paths)
    if files:
        partitions = [path for path in paths if is_partition(os.path.basename(path)) and os.path.isdir(path)]
        _check_beside(directory, files, _paths_below(partitions))
        return files
    directories = [path for path in paths if os.path.isdir(path)]
    if directories and all(is_partition(os.path.basename(path)) for path in directories):
        files = _files_of(path for path in _paths_below(directories) if os.path.basename(path) not in DESCRIPTIONS)
        if files:
            return files
    if directories:
        raise DataError(
            f"The data directory {directory} has no files, only directories.",
            f"Name one of them: {', '.join(directories[:5])}; or all files in them, {directory}/**/*.",
        )
    raise DataError(
        f"The data directory {directory} is empty.",
        "Write data into it (scripts/gen_dataset.py makes example data) or name another one.",
    )


def _paths_below(directories: Iterable[str]) -> Iterator[str]:
    for directory in directories:
        yield from paths_matching(os.path.join(glob.escape(directory), "**", "*"))


def _check_beside(directory: str, files: Sequence[str], in_partitions: Iterable[str]) -> None:
    """Check that files of a directory do not hide those of its partitions.

    Raises:
        DataError: Partitions contain files of the same kind; or the kind of the files is not clear from their names
            (a JSON file such as metadata.json may describe the data).
    """
    kind = type_by_ending(files)
    is_any = kind == "RecordIO" or all(path.lower().endswith(".json") for path in files)
    same = (path for path in in_partitions if (is_any or type_by_ending([path]) == kind) and not os.path.isdir(path))
    hidden = next(same, None)
    if hidden is not None:
        raise DataError(
            f"The data directory {directory} has {os.path.basename(files[0])} beside partitions with data, such as "
            f"{hidden}.",
            "Name the one or the other by a pattern, such as DIRECTORY/*.csv or DIRECTORY/*=*/*.csv, or move them.",
        )


def _files_of(paths: Iterable[str]) -> list[str]:
    """Return only those paths that are files.

    Raises:
        DataError: A link is broken (without its file the job would train only on a part of the data), or the name of a
            file cannot be sent to the workers.
    """
    files = []
    for path in paths:
        if os.path.isfile(path):
            check_name(path)
            files.append(path)
        elif os.path.islink(path) and not os.path.exists(path):
            raise DataError(
                f"{path} is a link to {os.readlink(path)}, which is not there.",
                "Fetch the file (git annex get, dvc pull), mount where the link leads, or remove the link.",
            )
    return files


def check_name(path: str) -> None:
    """Check that a path can be sent to the workers.

    Raises:
        DataError: The path is not UTF-8.
    """
    shown = path.encode(errors="backslashreplace").decode()
    if shown != path:
        raise DataError(
            f"The name of {shown} is not UTF-8, and cannot be sent to workers.", "Rename it, for example with convmv."
        )


def no_records(source: str) -> DataError:
    """Return the error for a source without any record."""
    return DataError(f"The data source {source} has no records.", "Check that the files were written completely.")


def shard_not_of_source(shard: Shard, source: str, num_records: int | None = None) -> DataError:
    """Return the error for a shard, or a slice of one, that a source does not have."""
    has = "" if num_records is None else f": it has {num_records} records"
    return DataError(
        f"Records {shard.start} to {shard.end} of {shard.name} are not in the data source {source}{has}.",
        "The data changed after the job had counted it, or is not the same in every pod.",
    )


def need(module: str, what: str, requirement: str) -> Any:
    """Import and return a module of an optional package.

    Args:
        module: Name of the module.
        what: What needs it, in the plural, for the message.
        requirement: Requirement for pip.

    Raises:
        DataError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{what} need the package {package}, which cannot be imported: {error}.",
            f"Install it: pip install '{requirement}'; in an image, name it in the requirements.txt of your zoo.",
        ) from error


_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


def is_data(path: str, *patterns: str) -> bool:
    """Return whether a path is data: its name is not hidden (unless a pattern asks for it), and not a description."""
    name = os.path.basename(path)
    return name not in DESCRIPTIONS and not is_hidden(name, patterns)


def find_remote_files(source: str) -> list[str]:
    """Return the URLs of the data files of a source, sorted; at least one.

    Raises:
        DataError: There is no file, or the storage cannot be reached.
    """
    storage = storage_of(source)
    if not KINDS[scheme_of(source)].can_list:
        return [source]
    if glob.has_magic(source):
        return _matching(storage, source)
    try:
        if not storage.stat(source).is_directory:
            return [source]
    except StorageFileMissing as error:
        raise DataError(
            f"The data source {source} does not exist.", "Check the URL, and that the credentials are of its account."
        ) from error
    found = storage.list(source)
    if any(one.url.endswith(f"/{MANIFEST}") for one in found):
        _warn_of_manifest(source)
    files = [one.url for one in found if not one.is_directory and is_data(one.url)]
    directories = [one.url for one in found if one.is_directory and is_data(one.url)]
    partitions = [url for url in directories if is_partition(url.rstrip("/").rpartition("/")[2])]
    if files and not all(url.lower().endswith(_IMAGES) for url in files):
        _check_beside(source, files, (url for directory in partitions for url in _below(storage, directory)))
        return files
    if directories and not files and len(partitions) == len(directories):
        files = [url for directory in directories for url in _below(storage, directory)]
        if files and not all(url.lower().endswith(_IMAGES) for url in files):
            return files
    if files or _hold_images(storage, directories):
        raise DataError(
            f"The data directory {source} holds images, which are read from mounted directories alone.",
            "Write them as WebDataset tar files, or mount the bucket.",
        )
    if directories:
        raise DataError(
            f"The data directory {source} has no files, only directories.",
            f"Name one of them: {', '.join(directories[:5])}.",
        )
    raise DataError(f"The data directory {source} is empty.", "Write data into it or name another one.")


@functools.cache  # a process opens a source several times
def _warn_of_manifest(source: str) -> None:
    _log.warning("%s in %s is not compared: the files would have to be fetched whole", MANIFEST, source)


def _below(storage: Storage, directory: str) -> Iterator[str]:
    """Yield the files of a directory and of all directories below it, sorted."""
    for one in sorted(storage.list(directory), key=lambda one: one.url):
        if is_data(one.url.rstrip("/")):
            yield from _below(storage, one.url) if one.is_directory else (one.url,)


def _hold_images(storage: Storage, directories: list[str]) -> bool:
    return bool(directories) and any(one.url.lower().endswith(_IMAGES) for one in storage.list(directories[0]))


def _matching(storage: Storage, pattern: str) -> list[str]:
    """Return the files that match a pattern; list directories level by level from the first name with a wildcard."""
    names = pattern.split("/")
    if "**" in names:
        raise DataError(f"The pattern {pattern} has a ** in it.", "Name the directories, with commas between.")
    first = next(i for i, name in enumerate(names) if glob.has_magic(name))
    if first < 3:
        raise DataError(f"The pattern {pattern} has a bucket that is a pattern.", "Name the bucket.")
    found = [FileStatus("/".join(names[:first]), 0, "", is_directory=True)]
    for name in names[first:]:
        found = [
            one
            for directory in found
            if directory.is_directory
            for one in storage.list(directory.url)
            if (own := one.url.rpartition("/")[2]) == name or (fnmatch.fnmatchcase(own, name) and is_data(own, name))
        ]
    files = sorted(one.url for one in found if not one.is_directory)
    if not files:
        raise DataError(f"No file matches {pattern}.", "Check the pattern.")
    return files


_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_HINT = f"The file was damaged or replaced: copy or write it again, or make {MANIFEST} anew where the change was meant."


def check_file(path: str) -> None:
    """Check a file against the manifest of its directory, if there is one.

    Raises:
        DataError: The file differs, or is not listed.
    """
    directory, name = os.path.split(path)
    sums = read_manifest(directory or ".")
    if sums is not None:
        _check(sums, directory, name)


def check_directory(directory: str) -> None:
    """Check all files listed in the manifest of a directory, if there is one.

    Raises:
        DataError: A file differs or is missing.
    """
    sums = read_manifest(directory)
    for name in sums or ():
        _check(sums or {}, directory, name)


def check_content(sums: Mapping[str, str], directory: str, name: str, data: bytes) -> None:
    """Check the content of a file against a manifest.

    Raises:
        DataError: The content differs, or the file is not listed.
    """
    _compare(sums, directory, name, lambda: hashlib.sha256(data).hexdigest())


def read_manifest(directory: str) -> Mapping[str, str] | None:
    """Return a map from file names, relative to the directory, to their SHA-256; None: there is no manifest.

    Raises:
        DataError: The manifest cannot be read.
    """
    path = os.path.join(directory, MANIFEST)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().removesuffix("\n").split("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"The checksums {path} cannot be read: {error.strerror}."
        raise DataError(what, "Write them again, or remove them.") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise DataError(
                f"{path}, line {number}: {line[:80]!r} is not a checksum and a name.",
                f"Make it with sha256sum * > {MANIFEST}.",
            )
        found[os.path.normpath(match[2])] = match[1].lower()
    found.pop(MANIFEST, None)  # `sha256sum *` also lists an older manifest
    return found


def write_manifest(directory: str, paths: Iterable[str]) -> None:
    """Write the manifest of files in a directory.

    Raises:
        OSError: A file cannot be read, or the manifest cannot be written.
    """
    lines = [f"{_sum_of(path)}  {os.path.relpath(path, directory)}\n" for path in sorted(paths)]
    with open(os.path.join(directory, MANIFEST), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(lines)


def _check(sums: Mapping[str, str], directory: str, name: str) -> None:
    _compare(sums, directory, name, lambda: _sum_of(os.path.join(directory, name)))


def _compare(sums: Mapping[str, str], directory: str, name: str, computed: Callable[[], str]) -> None:
    manifest, path = os.path.join(directory, MANIFEST), os.path.join(directory, name)
    if name not in sums:
        raise DataError(f"{path} is not in {manifest}.", f"Add it there with sha256sum, or remove {MANIFEST}.")
    try:
        found = computed()
    except OSError as error:
        raise DataError(f"{path}, which {manifest} lists, cannot be read: {error.strerror}.", _HINT) from error
    if found != sums[name]:
        raise DataError(f"{path}: its SHA-256 is {found}, {manifest} says {sums[name]}.", _HINT)


def _sum_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
