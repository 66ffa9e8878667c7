"""The tf.train.Example writer against TensorFlow's own parser."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.data.example import encode_example, encode_examples

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def parse(record: bytes) -> dict[str, list[object]]:
    import tensorflow as tf

    parsed: dict[str, list[object]] = {}
    for name, feature in tf.train.Example.FromString(record).features.feature.items():
        kind = feature.WhichOneof("kind")
        parsed[name] = [] if kind is None else list(getattr(feature, kind).value)
    return parsed


@given(
    st.dictionaries(
        st.text(max_size=20),
        st.one_of(st.lists(st.binary(max_size=200)), st.lists(INT64), st.lists(FLOAT32), st.lists(st.booleans())),
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_tensorflow_reads_what_is_written(features: dict[str, list[object]]) -> None:
    assert parse(encode_example(features)) == features  # type: ignore[arg-type]


def test_single_values_text_and_arrays_are_taken() -> None:
    record = encode_example({"b": b"x", "s": "é", "i": -1, "f": 0.5, "a": np.arange(6, dtype=np.uint8).reshape(2, 3)})
    assert parse(record) == {"b": [b"x"], "s": ["é".encode()], "i": [-1], "f": [0.5], "a": [0, 1, 2, 3, 4, 5]}


def test_the_bytes_do_not_depend_on_the_order_of_the_features() -> None:
    assert encode_example({"a": 1, "b": 2.0}) == encode_example({"b": 2.0, "a": 1})


def test_the_bytes_are_those_that_tensorflow_writes_for_one_feature() -> None:
    import tensorflow as tf

    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[1, 300, -5]))
    message = tf.train.Example(features=tf.train.Features(feature={"ids": feature}))
    assert encode_example({"ids": [1, 300, -5]}) == message.SerializeToString()


@pytest.mark.parametrize("value", [[b"x", 1], object(), [None], [1j]])
def test_values_that_no_feature_can_hold_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match="feature 'odd'"):
        encode_example({"odd": value})  # type: ignore[dict-item]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_columns_give_the_same_bytes_as_one_record_at_a_time(data: st.DataObject) -> None:
    num_records = data.draw(st.integers(1, 8))
    columns = {}
    for name, dtype, elements in [
        ("ids", np.int64, INT64),
        ("x", np.float32, FLOAT32),
        ("y", np.int32, st.integers(0, 1)),
    ]:
        width = data.draw(st.integers(1, 20))
        values = data.draw(st.lists(elements, min_size=num_records * width, max_size=num_records * width))
        columns[name] = np.array(values, dtype).reshape(num_records, width)
    assert encode_examples(columns) == [
        encode_example({name: column[row] for name, column in columns.items()}) for row in range(num_records)
    ]


def test_columns_of_scalars_and_of_no_records_are_taken() -> None:
    assert encode_examples({"y": np.array([7, 300])}) == [encode_example({"y": 7}), encode_example({"y": 300})]
    assert encode_examples({"y": np.zeros((0, 3))}) == []


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="same number of records"):
        encode_examples({"x": np.zeros(2), "y": np.zeros(3)})


def test_reading_and_writing_data_imports_no_framework() -> None:
    program = (
        "import sys\n"
        "import elasticdl.data.factory, elasticdl.data.custom\n"
        "import elasticdl.data.example, elasticdl.data.datasets.catalogue\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'tensorflow', 'keras', 'torch', 'jax', 'sklearn', 'pandas', 'grpc', 'pyarrow'}))\n"
    )
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"
