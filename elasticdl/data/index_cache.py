"""Indexes are built once: arrays of a data source, kept in a hidden directory beside it, found again by every process.

An index belongs to a file of one size and time of change; whatever else is found under its name is built anew.  Where
nothing can be written (read-only data), each process builds its own.
"""

from __future__ import annotations

import contextlib
import hashlib
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
        stamp: what says that the source is the same; None: size and time of change of the file.
        holds: asked of an index that was found, where the index itself says what must not have changed.
    """
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


def _load(target: Path, words: str) -> Arrays | None:
    try:
        with np.load(target, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None  # there is none, or it was cut off: the next one replaces it
    return found if str(found.pop("words", "")) == words else None


def _save(target: Path, arrays: Arrays, words: str) -> None:
    try:
        target.parent.mkdir(exist_ok=True)
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
