"""Writes `model.keras`, which Keras alone loads, for a model that consists of Keras's own classes.

The weights go to a file of their own first and from there into the archive: `model.save` would hold a table three
times more.
"""

from __future__ import annotations

import logging
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elasticdl.frameworks.keras.embedding.swap import MovedEmbedding
from elasticdl_client.errors import ModelDefinitionError

FILE = "model.keras"
_log = logging.getLogger("elasticdl.keras")


def write_keras_file(directory: Path, model: Any, tables: Mapping[str, Any]) -> None:
    """Writes ``directory/model.keras``, or logs why there is none.

    Args:
        tables: by name, a variable that holds the whole table.
    """
    reason = not_ordinary(model)
    if reason:
        _log.info("%s is left out: %s, so Keras alone could not load it; the SavedModel is whole", FILE, reason)
        return
    parts = (directory / ".keras_parts").resolve()
    try:
        with _own_variables(model, tables):
            keras.saving.save_model(model, str(parts), zipped=False)
        _zip(parts, directory / FILE)
    except (NotImplementedError, TypeError, ValueError) as error:
        (directory / FILE).unlink(missing_ok=True)
        _log.warning("%s is left out: Keras cannot write this model: %s", FILE, error)
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def check_keras_file(path: str, model: Any) -> None:
    """For a `.keras` file that a callback is to write.

    Args:
        path: of the user's module, for messages.

    Raises:
        ModelDefinitionError: Keras alone could not load it.
    """
    reason = not_ordinary(model)
    if reason:
        raise ModelDefinitionError(
            f"{path}: ModelCheckpoint cannot write a .keras file: {reason}, so Keras alone could not load it.",
            "Use elasticdl.api.callbacks.ModelCheckpoint with a directory, which gets a SavedModel.",
        )


def not_ordinary(model: Any) -> str:
    """Name the class of a model that is not Keras's own; empty: there is none."""
    if not _is_keras(model):
        return f"the model is a {type(model).__name__}"
    for layer in model._flatten_layers(include_self=False):
        if not _is_keras(layer):
            return f"the layer {layer.name!r} is a {type(layer).__module__}.{type(layer).__qualname__}"
    return ""


def _is_keras(part: Any) -> bool:
    """Keras knows the layers of elasticdl_preprocessing, too, where that is imported."""
    package = type(part).__module__.partition(".")[0]
    return package in ("keras", "elasticdl_preprocessing") or isinstance(part, MovedEmbedding)


@contextmanager
def _own_variables(model: Any, tables: Mapping[str, Any]) -> Iterator[None]:
    """While it lasts, embedding layers whose table was moved are Keras's, with the table as their variable."""
    moved = [layer for layer in model._flatten_layers() if isinstance(layer, MovedEmbedding)]
    for layer in moved:
        object.__setattr__(layer, "__class__", keras.layers.Embedding)
        # A view: Keras would copy a variable twice.  Past Keras's tracking, which would own it from now on.
        layer.__dict__["_embeddings"] = np.asarray(memoryview(tables[layer.table].value()))
    try:
        yield
    finally:
        for layer in moved:
            del layer.__dict__["_embeddings"]
            object.__setattr__(layer, "__class__", MovedEmbedding)


def _zip(directory: Path, file: Path) -> None:
    """Stored, not compressed, as Keras does it."""
    with zipfile.ZipFile(file, "w") as archive:
        for part in sorted(directory.rglob("*")):
            if part.is_file():
                archive.write(part, str(part.relative_to(directory)))
