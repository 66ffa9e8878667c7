"""The default feed for modules without a `feed`: samples from the columns of a table.

`explain_table_feed` and `explain_own_feed` explain TensorFlow's errors on a record: the column, the value, a remedy.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from elasticdl.data.reader import Metadata
from elasticdl.data.table_decoder import FeedColumns, missing_number, table_of, wrong_cell, wrong_row
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.input.feed import TracedFeed
from elasticdl.frameworks.keras.input.module_data import ModuleData
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import DataError

_CHUNK = 512
_WHOLE_TASK = 1 << 31  # more records than any task has, so that all lists of a column are padded to one length
_DTYPES = {"int64": tf.int64, "float64": tf.float32, "string": tf.string, "image": tf.string}


def traced_feed(definition: ModelDefinition, mode: Mode, metadata: Metadata, minibatch_size: int) -> TracedFeed:
    """Return the feed for one mode: the user's `feed`, the one for `dataset()`, or the default feed for a table.

    Raises:
        ModelDefinitionError: There is no `feed`, and the data have no columns, or no label is named.
    """
    if definition.dataset is not None:
        data = ModuleData(definition, mode)
        return TracedFeed(lambda dataset, *_: data.feed(dataset), mode, metadata, minibatch_size)
    if definition.feed is not None:
        own = partial(explain_own_feed, metadata)
        return TracedFeed(definition.feed, mode, metadata, minibatch_size, own)
    table = table_of(metadata, mode is Mode.PREDICTION, definition.path)
    explained = partial(explain_table_feed, table)
    return TracedFeed(_table_feed(table), mode, metadata, minibatch_size, lambda message, _: explained(message))


def _table_feed(table: FeedColumns) -> Callable[..., Any]:

    def feed(dataset: Any, *_: Any) -> Any:
        parse = _parse_rows(table) if table.delimiter else _parse_examples(table)
        chunk = _WHOLE_TASK if table.lists else _CHUNK
        samples = dataset.batch(chunk).map(lambda records: _sample(table, parse(records))).unbatch()
        if any(table.dtypes[name] == "image" for name in table.features):
            samples = samples.map(lambda *sample: _decoded(table, *sample), num_parallel_calls=tf.data.AUTOTUNE)
        return samples

    return feed


def _sample(table: FeedColumns, columns: dict[str, Any]) -> Any:
    features = {name: columns[name] for name in table.features}
    sample: Any = next(iter(features.values())) if table.is_one_image else features
    return (sample, columns[table.label]) if table.label else sample


def _parse_examples(table: FeedColumns) -> Callable[[Any], dict[str, Any]]:
    spec: dict[str, Any] = {}
    for name in table.used:
        shape, dtype = table.shapes.get(name, ()), table.dtypes[name]
        if name in table.lists:
            spec[name] = tf.io.FixedLenSequenceFeature([], _DTYPES[dtype], allow_missing=True)
        else:
            spec[name] = tf.io.FixedLenFeature([] if dtype == "image" else shape, _DTYPES[dtype])
    return lambda records: tf.io.parse_example(records, spec)  # type: ignore[no-any-return]


def _parse_rows(table: FeedColumns) -> Callable[[Any], dict[str, Any]]:
    """Return a parser for CSV rows; an empty field becomes NaN or an empty text, and is an error for a whole number."""
    defaults = {
        "int64": tf.constant([], tf.int64),
        "float64": tf.constant([float("nan")], tf.float32),
        "string": tf.constant([""]),
    }
    # Parse all columns, unused ones as texts: otherwise a row with more fields than the header is not detected.
    kinds = [defaults[dtype if name in table.used else "string"] for name, dtype in table.dtypes.items()]

    def parse(records: Any) -> dict[str, Any]:
        columns = tf.io.decode_csv(records, kinds, field_delim=table.delimiter)
        return dict(zip(table.dtypes, columns, strict=True))

    return parse


def _decoded(table: FeedColumns, *sample: Any) -> Any:
    """Decode images like keras.utils.image_dataset_from_directory: float32, 0 to 255, resized."""

    def image(name: str, data: Any) -> Any:
        height, width, channels = table.shapes[name]
        pixels = tf.io.decode_image(data, channels=channels, expand_animations=False)
        pixels.set_shape([None, None, channels])
        return tf.ensure_shape(tf.image.resize(tf.cast(pixels, tf.float32), [height, width]), table.shapes[name])

    features = sample[0]
    if table.is_one_image:
        features = image(table.features[0], features)
    else:
        features = {
            name: image(name, value) if table.dtypes[name] == "image" else value for name, value in features.items()
        }
    return (features, *sample[1:]) if len(sample) > 1 else features


_WRONG_FIELD = re.compile(
    r"Field (\d+) (?:in record \d+ is not a valid (\w+): (.*)|is required but missing in record)", re.DOTALL
)
_WRONG_COUNT = re.compile(r"Expect (\d+) fields but have (\d+) in record")
_NOT_CSV = re.compile(
    "Unquoted fields cannot have quotes/CRLFs inside|Quote inside a string has to be escaped by another quote"
    "|Quoted field has to end with quote followed by delim or end"
)
_MISSING = re.compile(r"Feature: (\S+) \(.*?\) is required but|Key: ([^,]+), Index: \d+\.  Number of int64 values")
_WRONG_TYPE = re.compile(
    r"Key: ([^,]+), Index: \d+\.  Data types don't match. Data type: (\w+) but expected type: (\w+)"
)
_NO_NUMBER = re.compile(r"StringToNumberOp could not correctly convert string: (.*)", re.DOTALL)
_CAST = re.compile(r"Cast string to (\w+) is not supported")
_LEAVES_OUT = "--max_bad_records=N leaves such records out."


def explain_table_feed(table: FeedColumns, message: str) -> str:
    """Explain an error of the default feed; an unknown error is returned unchanged."""
    names = list(table.dtypes)
    error: DataError | None = None
    if found := _WRONG_FIELD.search(message):
        name = names[int(found[1])]
        error = wrong_cell(name, table.dtypes[name], found[3] or "")
    elif found := _WRONG_COUNT.search(message):
        error = wrong_row(int(found[2]), len(names))
    elif found := _NOT_CSV.search(message):
        error = _not_csv(found[0])
    elif found := _MISSING.search(message):
        error = missing_number(found[1] or found[2])
    elif found := _WRONG_TYPE.search(message):
        error = DataError(f"A record has a {found[2]} in the column {found[1]}, which holds {found[3]}.")
    return message if error is None else f"{type(error).__name__}: {error}"


def explain_own_feed(metadata: Metadata, message: str, record: bytes | None) -> str:
    """Explain an error of the user's `feed`; an unknown error is returned unchanged.

    Args:
        metadata: Metadata of the data source.
        message: TensorFlow's message.
        record: The record that caused the error; None: unknown.
    """
    error: DataError | None = None
    if found := _WRONG_FIELD.search(message):
        field, value = int(found[1]), found[3] or ""
        what = f"reads {value!r} as {found[2]}" if value else "finds an empty field, which has no default"
        error = DataError(
            f"tf.io.decode_csv in feed {what}: field {field}{_column(metadata, record, value, field)}",
            "Mend the record, or give this field another entry of record_defaults: [0.0] or [float('nan')] for "
            f"fractions and missing numbers, [''] for texts; {_LEAVES_OUT}",
        )
    elif found := _WRONG_COUNT.search(message):
        error = DataError(
            f"tf.io.decode_csv in feed has {found[1]} record_defaults, and a record has {found[2]} fields.",
            f"Give one entry for each column, and quote fields that hold the delimiter; {_LEAVES_OUT}",
        )
    elif found := _NOT_CSV.search(message):
        error = _not_csv(found[0])
    elif found := _NO_NUMBER.search(message):
        error = DataError(
            f"tf.strings.to_number in feed reads {found[1]!r}{_column(metadata, record, found[1])}: no number.",
            f"Mend the record, or map texts to numbers with keras.layers.StringLookup; {_LEAVES_OUT}",
        )
    elif found := _CAST.search(message):
        error = DataError(
            f"feed casts texts to {found[1]}, which tf.cast cannot.",
            "Use tf.strings.to_number for texts of numbers, keras.layers.StringLookup for others; decode_csv makes "
            "numbers of the fields whose entry of record_defaults is one.",
        )
    return message if error is None else f"{type(error).__name__}: {error}"


def _not_csv(reason: str) -> DataError:
    return DataError(
        f"A row is not CSV: {reason}.",
        f"Put fields with quotes into quotes and double the quotes inside: there is no escapechar; {_LEAVES_OUT}",
    )


def _column(metadata: Metadata, record: bytes | None, value: str, field: int = -1) -> str:
    """Describe the column of a CSV row with a value, if it is certain: `feed` may parse only some columns."""
    if record is None or not metadata.delimiter:
        return ""
    cells = next(csv.reader([record.decode(errors="replace")], delimiter=metadata.delimiter), [])
    if len(cells) != len(metadata.column_names):
        return ""
    holding = [k for k, cell in enumerate(cells) if cell == value]
    if field not in holding:
        field = holding[0] if len(holding) == 1 else -1
    return f", the column {metadata.column_names[field]}" if field >= 0 else ""
