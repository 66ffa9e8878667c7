"""Read the data set of a module's `dataset()` by index: NumPy arrays, a `keras.utils.PyDataset` or a `tf.data.Dataset`.

Accepts the same data as `fit`, provides the rows for a `Reader`, and unpacks its records to samples.  Data without
an index, or with another order in each process, are refused.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.data.samples import LENGTH_BYTES, ArrayRows, BatchRows, Column, ColumnSpec, SampleRows, SamplesReader
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.operations import unrepeatable
from elasticdl.frameworks.user_code import user_call
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import DataError, ModelDefinitionError

_CHUNK = 512
_log = logging.getLogger("elasticdl.keras")


class ModuleData:
    """The samples of one mode.

    Attributes:
        rows: The rows of samples; the columns are the arrays of a sample, in order.
        structure: The structure of a sample, with arbitrary leaves.
    """

    def __init__(self, definition: ModelDefinition, mode: Mode) -> None:
        """
        Raises:
            DataError: The data set cannot be read by index.
            ModelDefinitionError: The object is not a data set, or has no labels although the mode needs them.
        """
        assert definition.dataset is not None
        self._what = f"{definition.path}: the data set for {mode.value}"
        get = definition.dataset
        given = user_call(lambda: get(mode.value), self._what)
        if isinstance(given, keras.utils.PyDataset):
            self.rows, self.structure = self._of_batches(given)
        elif isinstance(given, tf.data.Dataset):
            self.rows, self.structure = self._of_tf_data(given)
        else:
            self.structure = _tuples(given)
            leaves = [self._array(leaf) for leaf in tf.nest.flatten(self.structure)]
            self.rows = ArrayRows(leaves, [f"array {place}" for place in range(len(leaves))], keras.config.floatx())
        is_labelled = isinstance(self.structure, tuple) and len(self.structure) in (2, 3)
        if not is_labelled and mode is not Mode.PREDICTION:
            raise ModelDefinitionError(
                f"{self._what} is none of (features, labels) or (features, labels, sample_weight).",
                "Return a tuple of arrays, or a PyDataset or tf.data.Dataset whose batches are such tuples.",
            )
        is_tuple_of_one = isinstance(self.structure, tuple) and len(self.structure) == 1
        self._is_cut = is_tuple_of_one or (is_labelled and mode is Mode.PREDICTION)

    def feed(self, dataset: Any) -> Any:
        """Convert a dataset of records to one of samples, like a module's `feed`; to predict, only of features."""
        return dataset.batch(_CHUNK).map(self._samples).unbatch()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # loops over columns, not tensors
    def _samples(self, records: Any) -> Any:
        made = tf.nest.pack_sequence_as(self.structure, unpack(self.rows.specs, records))
        return made[0] if self._is_cut else made

    def _of_batches(self, given: Any) -> tuple[SampleRows, Any]:
        for hook in ("on_epoch_begin", "on_epoch_end"):
            if getattr(type(given), hook) is not getattr(keras.utils.PyDataset, hook, None):
                _log.warning("%s.%s is not called: tasks are permuted in each epoch", type(given).__name__, hook)
        try:
            num_batches = given.num_batches
        except (NotImplementedError, TypeError):
            num_batches = None
        name = f"the {type(given).__name__} of {self._what}"
        if not num_batches:
            raise DataError(f"{name} has no number of batches.", "Define __len__, which returns it.")
        whole = _tuples(user_call(lambda: given[0], f"{name}: batch 0"))

        def batch(number: int) -> Sequence[Column]:
            made = _tuples(user_call(lambda: given[number], f"{name}: batch {number}"))
            try:
                tf.nest.assert_same_structure(whole, made)
            except (ValueError, TypeError) as error:
                raise DataError(f"{name}: batch {number} is of another structure than batch 0.") from error
            return [self._array(leaf) for leaf in tf.nest.flatten(made)]

        return BatchRows(batch, num_batches, name, keras.config.floatx()), whole

    def _of_tf_data(self, given: Any) -> tuple[SampleRows, Any]:
        name, cardinality = f"the tf.data.Dataset of {self._what}", int(given.cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY:
            raise DataError(f"{name} has no end.", "Leave out repeat(): --num_epochs says how often the data are read.")
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            raise DataError(
                f"{name} does not know its length, so that its samples have no index.",
                "Apply tf.data.experimental.assert_cardinality(n) at its end; or name its files by --training_data and "
                "parse them in feed.",
            )
        if found := unrepeatable(given):
            raise DataError(
                f"{name} has {', '.join(found)}: each process would read other samples by the same index.",
                "Leave it out (shuffle=False of keras.utils.image_dataset_from_directory and its like): tasks are "
                "permuted in each epoch, --shuffle permutes the records of each.",
            )
        spec = given.element_spec
        if any(type(leaf) is not tf.TensorSpec for leaf in tf.nest.flatten(spec)):
            raise DataError(f"{name} has ragged or sparse tensors.", "Pad them, or give --training_data and feed.")
        if any(leaf.shape.rank == 0 for leaf in tf.nest.flatten(spec)):
            raise DataError(f"{name} is of single samples.", "Batch it, as for fit: .batch(32).")
        return _PassedOnce(given, name), spec

    def _array(self, leaf: Any) -> Any:
        if hasattr(leaf, "to_numpy"):  # of pandas
            leaf = leaf.to_numpy()
        elif tf.is_tensor(leaf):
            leaf = leaf.numpy()
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype") and len(leaf.shape)):
            raise ModelDefinitionError(
                f"{self._what} has a {type(leaf).__name__} in it.",
                "Return NumPy arrays, or tuples and dictionaries of them, with one row for each sample; or a "
                "keras.utils.PyDataset or a batched tf.data.Dataset of these.",
            )
        return leaf


class _PassedOnce:
    """SampleRows of a `tf.data.Dataset`, which has no index: one pass writes them to a file without a name.

    `skip(n)` would compute all that it skips, for every task.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset
        self._name = name
        first = next(self._batches(), None)
        if first is None:
            raise DataError(f"{name} is empty.", "Give it samples.")
        names = [f"array {number} of {name}" for number in range(len(first))]
        self.specs = ArrayRows(first, names, keras.config.floatx()).specs
        self._rows: ArrayRows | None = None

    def __len__(self) -> int:
        return len(self._passed())

    def read(self, start: int, end: int) -> Sequence[Column]:
        """See `SampleRows.read`."""
        return self._passed().read(start, end)

    def _passed(self) -> ArrayRows:
        if self._rows is None:
            columns = [_Spool(spec) for spec in self.specs]
            for number, batch in enumerate(self._batches()):
                names = [f"array {place} of batch {number} of {self._name}" for place in range(len(batch))]
                found = ArrayRows(batch, names, keras.config.floatx()).specs
                if found != self.specs:
                    raise DataError(
                        f"Batch {number} of {self._name} has samples of other shapes or types than the first.",
                        "All samples must be of one shape and type: pad them.",
                    )
                for column, part in zip(columns, batch, strict=True):
                    column.write(part)
            arrays = [column.read() for column in columns]
            self._rows = ArrayRows(arrays, [self._name] * len(arrays), keras.config.floatx())
            _log.info("%s: %d samples are on the local disk, to be read by index", self._name, len(self._rows))
        return self._rows

    def _batches(self) -> Iterator[list[Column]]:
        for element in self._dataset:
            yield [np.asarray(leaf.numpy()) for leaf in tf.nest.flatten(element)]


class _Spool:
    """A column on disk, in a file that is gone with the process; texts stay in memory."""

    def __init__(self, spec: ColumnSpec) -> None:
        self._spec = spec
        self._texts: list[Column] = []
        self._file = None if spec.is_text else tempfile.TemporaryFile()  # noqa: SIM115  open as long as it is mapped

    def write(self, part: Column) -> None:
        """Append rows."""
        if self._file is None:
            self._texts.append(part)
        else:
            self._file.write(np.ascontiguousarray(part.astype(self._spec.dtype, copy=False)).tobytes())

    def read(self) -> Column:
        """Return all rows."""
        if self._file is None:
            return np.concatenate(self._texts)
        self._file.flush()
        return np.memmap(self._file, self._spec.dtype, mode="r").reshape(-1, *self._spec.shape)


def dataset_reader(definition: ModelDefinition, mode: Mode, seed: int) -> SamplesReader:
    """Return the reader of a module's data set for a mode.

    Raises:
        ElasticDLError: See `ModuleData`.
    """
    return SamplesReader(ModuleData(definition, mode).rows, f"{definition.path}: dataset()", seed)


def unpack(specs: Sequence[ColumnSpec], records: Any) -> list[Any]:
    """Return the columns of packed records [n], each [n, …], inside a graph; see `elasticdl.data.samples.pack`."""
    fixed = sum(spec.size_bytes for spec in specs)
    parts, offset = [], 0
    lengths = {}
    for number, spec in enumerate(specs):
        dtype = tf.int32 if spec.is_text else tf.as_dtype(spec.dtype)
        raw = records
        if len(specs) > 1 or spec.is_text:
            raw = tf.strings.substr(records, offset, spec.size_bytes)
        offset += spec.size_bytes
        values = tf.io.decode_raw(raw, dtype)
        if spec.is_text:
            lengths[number] = tf.reshape(values, [-1, spec.size_bytes // LENGTH_BYTES])
        parts.append(values if spec.is_text else tf.reshape(values, [-1, *spec.shape]))
    start = tf.fill(tf.shape(records), fixed)
    for number, of_column in lengths.items():
        texts = []
        for place in range(specs[number].count):
            texts.append(tf.strings.substr(records, start, of_column[:, place]))
            start = start + of_column[:, place]
        parts[number] = tf.reshape(tf.stack(texts, axis=1), [-1, *specs[number].shape])
    return parts


def _tuples(given: Any) -> Any:
    """Convert lists in a structure to tuples, as `fit` does: tf.data would convert a list to a tensor."""
    if isinstance(given, list | tuple) and not hasattr(given, "_fields"):
        return tuple(_tuples(part) for part in given)
    if isinstance(given, dict):
        return {key: _tuples(part) for key, part in given.items()}
    return given
