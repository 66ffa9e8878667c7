"""From the name of a data source to its files, and the errors that every reader over files shares.

A source is a file, a directory (its files, not those of its subdirectories), or a glob pattern.  Files whose names
begin with a dot or an underscore are not data, nor are their checksums.  Never reads a file.

`need` imports a package that only some readers use, with an error that names the package to install.

`find_remote_files`: from the URL of a data source in storage to its files: a file, a directory, or a pattern.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from elasticdl.data.checksums import MANIFEST, read_manifest
from elasticdl.protocol import Shard
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.port import FileStatus, Storage
from elasticdl_client.errors import DataError, ElasticDLError, StorageFileMissing
from elasticdl_client.storage_kinds import KINDS, is_remote, scheme_of

_log = logging.getLogger("elasticdl.data")


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Makes every error of a library that reads someone's data an error of these data.

    Damaged bytes make parsers raise nearly anything: an error here is the data's, and its traceback is for debugging.

    Args:
        what: is read: a file, a directory, a table.

    Raises:
        DataError: instead of any other error.
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
    """Paths of the data files of a source, sorted, at least one.

    Raises:
        DataError: if there is none.
    """
    if not source:
        raise DataError("The name of the data source is empty.", "Name a file or directory.")
    if is_remote(source):
        return find_remote_files(source)
    if os.path.isdir(source):
        return _files_of_directory(source)
    if os.path.exists(source):
        return [source]
    if glob.has_magic(source):
        paths = sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path) and is_data(path))
        if paths:
            return paths
        raise DataError(f"No file matches {source}.", "Check the pattern, and that the data is mounted where it says.")
    parent = os.path.dirname(source) or "."
    there = "its parent directory exists" if os.path.isdir(parent) else f"{parent} does not exist either"
    raise DataError(
        f"The data source {source} does not exist ({there}).",
        "Check the path; in a pod, check that --volume mounts the data there.",
    )


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
    files = [path for path in paths if os.path.isfile(path)]
    if files:
        return files
    directories = [path for path in paths if os.path.isdir(path)]
    if directories:
        raise DataError(
            f"The data directory {directory} has no files, only directories.",
            f"Name one of them: {', '.join(directories[:5])}.",
        )
    raise DataError(
        f"The data directory {directory} is empty.",
        "Write data into it (scripts/gen_dataset.py makes example data) or name another one.",
    )


def no_records(source: str) -> DataError:
    """The error for a source whose files hold no record at all."""
    return DataError(f"The data source {source} has no records.", "Check that the files were written completely.")


def shard_not_of_source(shard: Shard, source: str, num_records: int | None = None) -> DataError:
    """The error for a shard, or a slice of one, that a source does not have."""
    has = "" if num_records is None else f": it has {num_records} records"
    return DataError(
        f"Records {shard.start} to {shard.end} of {shard.name} are not in the data source {source}{has}.",
        "The data changed after the job had counted it, or is not the same in every pod.",
    )


def need(module: str, what: str, requirement: str) -> Any:
    """A module of an optional package.

    Args:
        module: to import.
        what: needs it, in the plural.
        requirement: for pip.

    Raises:
        DataError: it is not installed.
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


def is_data(path: str) -> bool:
    """Whether a name is one of data: not hidden, and no list of checksums."""
    name = os.path.basename(path)
    return name != MANIFEST and not name.startswith((".", "_"))


def find_remote_files(source: str) -> list[str]:
    """URLs of the data files of a source, sorted, at least one.

    Raises:
        DataError: there is none, or storage cannot be reached.
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
    if files and not all(url.lower().endswith(_IMAGES) for url in files):
        return files
    directories = [one.url for one in found if one.is_directory and is_data(one.url)]
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


def _hold_images(storage: Storage, directories: list[str]) -> bool:
    return bool(directories) and any(one.url.lower().endswith(_IMAGES) for one in storage.list(directories[0]))


def _matching(storage: Storage, pattern: str) -> list[str]:
    """Files that match a pattern, found name by name from the first one that is a pattern on."""
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
            if fnmatch.fnmatchcase(one.url.rpartition("/")[2], name)
        ]
    files = sorted(one.url for one in found if not one.is_directory and is_data(one.url))
    if not files:
        raise DataError(f"No file matches {pattern}.", "Check the pattern.")
    return files
