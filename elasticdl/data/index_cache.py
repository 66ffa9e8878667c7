"""Indexes are built once: arrays of a data source, kept in a hidden directory beside it, found again by every process.

An index belongs to a file of one size and time of change, or of one etag; another file under its name is built
anew.  Where nothing can be written (read-only data), each process builds its own; those of storage are kept in
the user's cache directory, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticdl.storage.fsspec_storage import FsspecStorage, storage_of
from elasticdl_client.errors import StorageError
from elasticdl_client.storage_kinds import is_remote

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

_FOLDER = ".elasticdl"
_FORMAT = 1
_log = logging.getLogger("elasticdl.data")


def cached(
    path: str,
    kind: str,
    build: Callable[[], Arrays],
    stamp: object = None,
    holds: Callable[[Arrays], bool] = lambda index: True,
) -> Arrays:
    """The index of a file: from its cache, or built and put there.

    Args:
        path: of the file; its index goes into a hidden directory beside it.
        kind: which index, with everything but the file that it depends on.
        stamp: equal as long as the source is the same; None: size and time of change of the file.
        holds: asked of an index that was found, where the index itself says what must not have changed.
    """
    if is_remote(path):
        return _cached_of_storage(path, kind, build, stamp)
    if stamp is None:
        status = os.stat(path)
        stamp = [status.st_size, status.st_mtime_ns]
    words = json.dumps([_FORMAT, os.path.abspath(path), kind, stamp])
    name = f"{os.path.basename(path)}.{hashlib.sha256(words.encode()).hexdigest()[:16]}.npz"
    target = Path(os.path.dirname(os.path.abspath(path)), _FOLDER, name)
    found = _load(target, words)
    if found is None or not holds(found):
        found = build()
        _save(target, found, words)
    return found


def _cached_of_storage(url: str, kind: str, build: Callable[[], Arrays], stamp: object) -> Arrays:
    words = json.dumps([_FORMAT, url, kind, stamp])
    directory, _, name = url.rpartition("/")
    name = f"{name.partition('?')[0]}.{hashlib.sha256(words.encode()).hexdigest()[:16]}.npz"
    here = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "elasticdl", "index", name)
    found = _load(here, words)
    if found is not None:
        return found
    storage = storage_of(url)
    there = f"{directory}/{_FOLDER}/{name}"
    found = _fetch(storage, there, words) if storage.can_write else None
    if found is None:
        found = build()
        if storage.can_write:
            try:
                storage.publish(there, _encoded(found, words))
            except StorageError as error:
                _log.debug("The index %s cannot be kept: %s", there, error)
    _save(here, found, words)
    return found


def _fetch(storage: FsspecStorage, url: str, words: str) -> Arrays | None:
    try:
        return _load(io.BytesIO(storage.read(url, 0, storage.stat(url).size_bytes)), words)
    except StorageError as error:  # there is none, or it may not be read
        _log.debug("The index %s is not taken: %s", url, error)
        return None


def _encoded(arrays: Arrays, words: str) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, words=np.array(words), **arrays)
    return file.getvalue()


def _load(source: Path | io.BytesIO, words: str) -> Arrays | None:
    try:
        with np.load(source, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None  # there is none, or it was cut off: the next one replaces it
    return found if str(found.pop("words", "")) == words else None


def _save(target: Path, arrays: Arrays, words: str) -> None:
    try:
        target.parent.mkdir(exist_ok=True, parents=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
    except OSError as error:
        _log.debug("The index %s cannot be kept: %s", target, error)
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, allow_pickle=False, words=np.array(words), **arrays)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        _log.debug("The index %s cannot be kept: %s", target, error)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
