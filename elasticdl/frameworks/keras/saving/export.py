"""Write a model, including its embedding tables, as a SavedModel that plain TensorFlow can load.

Owns the structure of the exported object; never renames the directory.

`write_keras_file` writes `model.keras`, which plain Keras can load, for a model that consists of Keras's own classes.

The weights are first written to a separate file and from there copied into the archive: `model.save` would use three
times as much memory for a table.
"""

from __future__ import annotations

import keyword
import logging
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.frameworks.framework import Floats, InitialRow, TableRows
from elasticdl.frameworks.keras.compiled import call_model
from elasticdl.frameworks.keras.embedding import MovedEmbedding
from elasticdl.frameworks.keras.input.declared_inputs import ModelInputs
from elasticdl.frameworks.keras.samples import masks_of
from elasticdl.layers.placement import Placement, Served, TableSpec
from elasticdl_client.errors import ModelDefinitionError

_GOLDEN = 0x9E3779B97F4A7C15
_TWO_SIGMA_TAIL = 0.022750131948179195  # probability that a standard normal value is below -2


@contextmanager
def _warnings_only(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def initial_rows(initial: InitialRow, ids: Tensor, dim: int) -> Tensor:
    """Return the rows [n, dim] float32 of `ids` [n] int64 that were never trained, as operations of TensorFlow.

    The same numbers as those of the parameter servers (kernels/src/initializer.cpp): uniform ones to the bit, normal
    ones to the last bit but one, because the quantiles are TensorFlow's own.
    """
    if initial.kind == "constant":
        return tf.fill([tf.size(ids), dim], tf.constant(initial.a, tf.float32))
    numbers = _uniform_numbers(initial.key, ids, dim)
    if initial.kind == "uniform":
        return tf.cast(initial.a + (initial.b - initial.a) * numbers, tf.float32)
    if initial.kind == "truncated_normal":
        numbers = _TWO_SIGMA_TAIL + (1.0 - 2.0 * _TWO_SIGMA_TAIL) * numbers
    return tf.cast(initial.a + initial.b * tf.math.ndtri(numbers), tf.float32)


def _uniform_numbers(key: int, ids: Tensor, dim: int) -> Tensor:
    """Return float64 numbers in (0, 1) that depend only on (key, id, column)."""
    columns = tf.bitcast(tf.range(dim, dtype=tf.int64), tf.uint64) * _unsigned(_GOLDEN)
    row_keys = _mix64(tf.bitwise.bitwise_xor(_mix64(tf.bitcast(ids, tf.uint64)), _unsigned(key)))
    hashes = tf.bitwise.right_shift(_mix64(row_keys[:, None] + columns), _unsigned(11))
    return (tf.cast(tf.bitcast(hashes, tf.int64), tf.float64) + 0.5) * 2.0**-53


def _mix64(values: Tensor) -> Tensor:
    """See kernels/src/hashing.hpp."""
    mixed = values + _unsigned(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, _unsigned(shift))) * _unsigned(factor)
    return tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, _unsigned(31)))


def _unsigned(value: int) -> Tensor:
    return tf.constant(value, tf.uint64)


Tensor = Any


class ServedTable(tf.Module):  # type: ignore[misc]
    """The rows of one table.

    With an `input_dim` an id is a row number; without, an id that was never trained gets its initial row.
    """

    def __init__(self, table: TableSpec, rows: TableRows | None) -> None:
        super().__init__(name=table.name)
        num_known = 0 if rows is None else rows.num_rows
        self._initial = InitialRow() if rows is None else rows.initial
        num_rows = table.input_dim or num_known + 1  # the last row is used for all other ids
        self.rows = tf.Variable(tf.zeros([num_rows, table.dim]), trainable=False, name="rows")
        ids = np.arange(0 if table.input_dim else num_known)
        start = 0
        for part, values in () if rows is None else rows.chunks:
            if not table.input_dim:
                ids[start : start + len(part)] = part
            self._fill(start, values)
            start += len(part)
        if table.input_dim:
            self._index = None
        else:
            if not num_known:
                ids = np.zeros(1, np.int64)  # a lookup table must not be empty; row 0 is used for all other ids
            numbers = tf.range(len(ids), dtype=tf.int64)
            contents = tf.lookup.KeyValueTensorInitializer(tf.constant(ids, tf.int64), numbers)
            self._index = tf.lookup.StaticHashTable(contents, default_value=num_known)

    def _fill(self, start: int, values: Floats) -> None:
        """Set rows in place: `self.rows[start:end].assign(values)` would need memory for a second table."""
        begin, end, strides = (np.array([place], np.int64) for place in (start, start + len(values), 1))
        tf.raw_ops.ResourceStridedSliceAssign(ref=self.rows.handle, begin=begin, end=end, strides=strides, value=values)

    def __call__(self, ids: Tensor) -> Tensor:
        if self._index is None:
            return tf.gather(self.rows, ids)
        numbers = self._index.lookup(ids)
        is_new = tf.equal(numbers, tf.shape(self.rows, tf.int64)[0] - 1)[:, None]
        return tf.where(is_new, initial_rows(self._initial, ids, self.rows.shape[1]), tf.gather(self.rows, numbers))


class ServedModel(tf.Module):  # type: ignore[misc]
    """The saved object: `loaded(features)` gives the model's outputs; so does the signature `serving_default`.

    Of a model that masks outputs `serve_masked` gives the masks, too, for metrics.
    """

    def __init__(
        self, model: Any, tables: Mapping[str, ServedTable], placement: Placement | None, specs: Iterable[Any]
    ) -> None:
        """
        Args:
            model: The model.
            tables: The tables in the placement, by name.
            placement: Placement of the embedding tables, if any.
            specs: Specs of batched features, for the functions to trace.
        """
        super().__init__(name="served")
        self.model = model
        self.tables = list(tables.values())
        by_name = dict(tables)

        has_masks = False

        def call_masked(inputs: Tensor) -> tuple[Tensor, list[Any]]:
            nonlocal has_masks
            with nullcontext() if placement is None else placement.using(Served(by_name)):
                outputs = call_model(model, inputs, training=False)
            masks = masks_of(outputs)
            has_masks |= any(mask is not None for mask in masks)
            return outputs, masks

        self.serve = tf.function(lambda inputs: call_masked(inputs)[0], autograph=False)
        for spec in specs:
            self.serve.get_concrete_function(spec)
        self.__call__ = self.serve
        if has_masks:
            self.serve_masked = tf.function(call_masked, autograph=False)
            for spec in specs:
                self.serve_masked.get_concrete_function(spec)


def export_model(
    path: str,
    model: Any,
    inputs: ModelInputs,
    placement: Placement | None,
    tables: Iterable[TableRows],
    spec: Any,
    model_file: bool,
) -> None:
    """Write the SavedModel, and `model.keras` in its directory.

    Args:
        path: Path of the directory.
        model: The model.
        inputs: The model's inputs; the signature has their names and types.
        placement: Placement of the embedding tables; None: they are variables of the model.
        tables: Rows of the tables in the placement; a table without an entry has no rows.
        spec: Spec of batched features, matched to the inputs.
        model_file: Write `model.keras`, if plain Keras can load the model from it.
    """
    specs = {} if placement is None else placement.tables
    served_tables = {rows.name: ServedTable(specs[rows.name], rows) for rows in tables}
    empty = {name: ServedTable(table, None) for name, table in specs.items() if name not in served_tables}
    declared = inputs.served(spec)
    served = ServedModel(model, {**served_tables, **empty}, placement, (declared, spec))
    with _warnings_only("tensorflow"):  # its info log would show a temporary directory
        tf.saved_model.save(served, path, signatures={"serving_default": _signature(served.serve, declared)})
    if model_file:
        write_keras_file(Path(path), model, {name: table.rows for name, table in served_tables.items()})


def _signature(serve: Callable[[Any], Any], spec: Any) -> Any:
    """Return a function like `serve` with inputs and outputs by name."""
    leaves = tf.nest.flatten(spec)
    if isinstance(spec, Mapping) and len(leaves) == len(spec):
        keys = sorted(spec)
    else:
        numbered = _numbered("inputs", len(leaves))
        keys = [getattr(leaf, "name", None) or name for leaf, name in zip(leaves, numbered, strict=True)]
    names = _argument_names(keys)

    def call(**inputs: Tensor) -> dict[str, Tensor]:
        outputs = serve(tf.nest.pack_sequence_as(spec, [inputs[name] for name in names]))
        if isinstance(outputs, Mapping):
            return {str(name): tf.identity(value) for name, value in outputs.items()}
        flat = tf.nest.flatten(outputs)
        return dict(zip(_numbered("output", len(flat)), map(tf.identity, flat), strict=True))

    named = {name: _named_spec(leaf, name) for name, leaf in zip(names, leaves, strict=True)}
    return tf.function(call, autograph=False).get_concrete_function(**named)


def _argument_names(keys: Iterable[str]) -> list[str]:
    """Return a name for each key that the arguments of a TensorFlow function may have: the key itself where it may.

    TensorFlow refuses Python's keywords and `self`, and silently renames what has other characters.
    """
    wanted = [(str(key), _argument_name(str(key))) for key in keys]
    taken = {key for key, name in wanted if name == key}  # keep these names: another output must not get them
    names: list[str] = []
    for key, name in wanted:
        while name != key and name in taken:
            name += "_"
        taken.add(name)
        names.append(name)
    return names


def _argument_name(key: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", key)
    if not re.match("[A-Za-z]", name):
        name = f"arg_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name == "self" else name


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}_{k}" for k in range(count)]


def _named_spec(leaf: Any, name: str) -> Any:
    return tf.TensorSpec(leaf.shape, leaf.dtype, name) if isinstance(leaf, tf.TensorSpec) else leaf


FILE = "model.keras"
_log = logging.getLogger("elasticdl.keras")


def write_keras_file(directory: Path, model: Any, tables: Mapping[str, Any]) -> None:
    """Write ``directory/model.keras``, or log why this is impossible.

    Args:
        directory: The directory.
        model: The model.
        tables: Variables with whole tables, by name.
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
    """Check that a callback can write a `.keras` file of a model.

    Args:
        path: Path of the user's module, for messages.
        model: The model.

    Raises:
        ModelDefinitionError: Plain Keras could not load the file.
    """
    reason = not_ordinary(model)
    if reason:
        raise ModelDefinitionError(
            f"{path}: ModelCheckpoint cannot write a .keras file: {reason}, so Keras alone could not load it.",
            "Use elasticdl.api.callbacks.ModelCheckpoint with a directory, which gets a SavedModel.",
        )


def not_ordinary(model: Any) -> str:
    """Return a description of the first class in a model that is not Keras's own; empty: there is none."""
    if not _is_keras(model):
        return f"the model is a {type(model).__name__}"
    for layer in model._flatten_layers(include_self=False):
        if not _is_keras(layer):
            return f"the layer {layer.name!r} is a {type(layer).__module__}.{type(layer).__qualname__}"
    return ""


def _is_keras(part: Any) -> bool:
    """Return whether Keras can load a layer or model; elasticdl_preprocessing counts, since it registers its layers."""
    package = type(part).__module__.partition(".")[0]
    return package in ("keras", "elasticdl_preprocessing") or isinstance(part, MovedEmbedding)


@contextmanager
def _own_variables(model: Any, tables: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which moved embedding layers are ordinary Keras layers, with their tables as variables."""
    moved = [layer for layer in model._flatten_layers() if isinstance(layer, MovedEmbedding)]
    for layer in moved:
        object.__setattr__(layer, "__class__", keras.layers.Embedding)
        # A view, because Keras would copy a variable twice; set without Keras's tracking, which would keep it.
        layer.__dict__["_embeddings"] = np.asarray(memoryview(tables[layer.table].value()))
    try:
        yield
    finally:
        for layer in moved:
            del layer.__dict__["_embeddings"]
            object.__setattr__(layer, "__class__", MovedEmbedding)


def _zip(directory: Path, file: Path) -> None:
    """Write a directory to a zip file, without compression as in Keras."""
    with zipfile.ZipFile(file, "w") as archive:
        for part in sorted(directory.rglob("*")):
            if part.is_file():
                archive.write(part, str(part.relative_to(directory)))
