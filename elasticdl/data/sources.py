"""From the name of a data source to its files, and the errors that every reader over files shares.

A source is a file, a directory (its files, not those of its subdirectories), or a glob pattern.  Files whose names
begin with a dot or an underscore are not data, nor are their checksums.  Never reads a file.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
from collections.abc import Iterator

from elasticdl.data.checksums import MANIFEST, read_manifest
from elasticdl.data.remote_sources import find_remote_files, is_data
from elasticdl.protocol.values import Shard
from elasticdl_client.errors import DataError, ElasticDLError
from elasticdl_client.storage_kinds import is_remote

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
