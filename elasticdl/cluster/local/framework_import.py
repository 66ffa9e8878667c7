"""Imports a framework without the packages that a worker does not need.

If scikit-learn, matplotlib, pandas and IPython are installed, ``import keras`` imports them, too, for `keras.wrappers`,
`keras.visualization`, data frames given to `fit`, and `KerasFileEditor`: a third of the time from a pod's start to its
first op, and 80 MB.  IPython also installs a fork handler, which would run in each pod of a standby.  TensorFlow
imports SciPy's sparse matrices for its own, earlier Keras: another tenth.  Garbage collections, which traverse the
growing modules again and again and free almost nothing, take another quarter.
"""

from __future__ import annotations

import atexit
import gc
import io
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_BUFFERS = (io.BytesIO, io.StringIO)
_NOT_FOR_WORKERS = {  # hidden package, and the package that must not import it
    "sklearn": "keras",
    "matplotlib": "keras",
    "pandas": "keras",
    "IPython": "keras",
    "scipy.sparse": "tensorflow.python.keras",
}


class _MissingToKeras:
    """A module finder that hides packages while one of the two Keras packages is being imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importer = _NOT_FOR_WORKERS.get(fullname)
        if importer is not None and _is_being_imported(importer):
            raise ModuleNotFoundError(f"Keras does without {fullname} in a worker.", name=fullname)
        return None


def _is_being_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and getattr(module.__spec__, "_initializing", False)


def import_less_with_keras() -> None:
    """Hide the packages from Keras's import from now on; a model definition can still import them."""
    sys.meta_path.insert(0, _MissingToKeras())


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable collections in the block, for imports; its objects are frozen: later collections skip them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def finalize_at_exit() -> None:
    """Prepare a script for `no_garbage_collection`: it may have created objects that need finalization.

    Open files and objects with a ``__del__`` in reference cycles are finalized only by the collections at the exit.
    These include all objects again, a second of a processor with PyTorch, if one such object still lives then.
    Buffers in memory, such as that of pandas, need no finalization.
    """
    streams = _with_files_behind((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    found = [
        one
        for one in gc.get_objects()
        if hasattr(type(one), "__del__") and type(one) not in _BUFFERS and id(one) not in streams
    ]
    if found:
        atexit.register(_unfreeze, [_reference(one) for one in found])


def _with_files_behind(streams: Iterable[object]) -> set[int]:
    """Return the ids of standard streams, which Python flushes itself, and of the files that they write to."""
    known: set[int] = set()
    todo = list(streams)
    while todo:
        stream = todo.pop()
        if id(stream) not in known:
            known.add(id(stream))
            todo += [found for found in gc.get_referents(stream) if issubclass(type(found), io.IOBase)]
    return known


def _reference(found: object) -> Callable[[], object]:
    try:
        return weakref.ref(found)
    except TypeError:  # a class with __slots__ and without weak references: counts as alive
        return lambda: True


def _unfreeze(references: Sequence[Callable[[], object]]) -> None:
    if any(reference() is not None for reference in references):
        gc.unfreeze()
