"""The default feed: samples of the columns of a table, for modules without a `feed`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from elasticdl.data.default_feed import FeedColumns, table_of
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.input import feed_errors
from elasticdl.frameworks.keras.input.feed import TracedFeed
from elasticdl.frameworks.keras.input.module_data import ModuleData
from elasticdl.model_def import ModelDefinition

_CHUNK = 512
_WHOLE_TASK = 1 << 31  # more records than any has; all lists of a column are filled up to one length
_DTYPES = {"int64": tf.int64, "float64": tf.float32, "string": tf.string, "image": tf.string}


def traced_feed(definition: ModelDefinition, mode: Mode, metadata: Metadata, minibatch_size: int) -> TracedFeed:
    """The user's `feed` for one mode, that of its `dataset()`, or that of a table: features by column, and the label.

    Raises:
        ModelDefinitionError: there is no `feed`, and the data are no table, or no label is named.
    """
    if definition.dataset is not None:
        data = ModuleData(definition, mode)
        return TracedFeed(lambda dataset, *_: data.feed(dataset), mode, metadata, minibatch_size)
    if definition.feed is not None:
        own = partial(feed_errors.of_own_feed, metadata)
        return TracedFeed(definition.feed, mode, metadata, minibatch_size, own)
    table = table_of(metadata, mode is Mode.PREDICTION, definition.path)
    explained = partial(feed_errors.of_table, table)
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
    """Empty fields: NaN, an empty text; a whole number must be there."""
    defaults = {
        "int64": tf.constant([], tf.int64),
        "float64": tf.constant([float("nan")], tf.float32),
        "string": tf.constant([""]),
    }
    # All columns are taken, the others as texts: else a row with more fields than the header would pass unseen.
    kinds = [defaults[dtype if name in table.used else "string"] for name, dtype in table.dtypes.items()]

    def parse(records: Any) -> dict[str, Any]:
        columns = tf.io.decode_csv(records, kinds, field_delim=table.delimiter)
        return dict(zip(table.dtypes, columns, strict=True))

    return parse


def _decoded(table: FeedColumns, *sample: Any) -> Any:
    """Images as keras.utils.image_dataset_from_directory gives them: float32 0 to 255, resized."""

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
