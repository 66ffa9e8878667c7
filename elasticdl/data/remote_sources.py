"""From the URL of a data source in storage to its files: a file, a directory, or a pattern; never reads one."""

from __future__ import annotations

import fnmatch
import functools
import glob
import logging
import os

from elasticdl.data.checksums import MANIFEST
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.port import FileStatus, Storage
from elasticdl_client.errors import DataError, StorageFileMissing
from elasticdl_client.storage_kinds import KINDS, scheme_of

_log = logging.getLogger("elasticdl.data")
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
