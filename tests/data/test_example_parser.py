"""Reading tf.train.Example without TensorFlow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticdl.api.examples import parse_examples
from elasticdl.data.example import encode_example, encode_examples, parse_all
from elasticdl_client.errors import DataError


def test_columns_come_back_as_they_were_written() -> None:
    random = np.random.default_rng(0)
    images = random.normal(size=(50, 12)).astype(np.float32)
    labels = random.integers(0, 300, 50)  # of one byte and of two
    columns = parse_examples(encode_examples({"image": images, "label": labels}), {"image": (3, 4), "label": ()})
    np.testing.assert_array_equal(columns["image"], images.reshape(50, 3, 4))
    np.testing.assert_array_equal(columns["label"], labels)
    assert (columns["image"].dtype, columns["label"].dtype) == (np.float32, np.int64)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3), min_size=1, max_size=9))
def test_integers_of_any_length(rows: list[list[int]]) -> None:
    records = [encode_example({"ids": row, "word": b"w" * (k % 3)}) for k, row in enumerate(rows)]
    columns = parse_examples(records, {"ids": (3,), "word": ()})
    assert columns["ids"].tolist() == rows
    assert columns["word"].tolist() == [b"w" * (k % 3) for k in range(len(rows))]


def test_no_records_make_empty_columns() -> None:
    assert parse_examples([], {"image": (3,)})["image"].shape == (0, 3)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (encode_example({"other": 1}), "no feature 'image'; it has other"),
        (encode_example({"image": [1.0]}), "has 1 floats, not 2"),
        (encode_example({"image": [1.0, 2.0]})[:-3], "not a tf.train.Example: it ends within field"),
        (b"\xff\xff", "not a tf.train.Example: it ends within a number"),
        (b"hello", "not a tf.train.Example"),
    ],
)
def test_what_is_wrong_is_said(record: bytes, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        parse_examples([encode_example({"image": [3.0, 4.0]}), record], {"image": (2,)})


@given(st.lists(st.tuples(st.lists(st.integers(-9, 2**40)), st.lists(st.binary(max_size=3)), st.floats(width=32))))
@example([([], [b"", b"", b"\0", b"\0"], 0.0), ([], [b"\0\0\0", b"\0\0\0"], 0.0)])  # as many bytes of words
def test_all_features_of_any_number_of_values(rows: list[tuple[list[int], list[bytes], float]]) -> None:
    records = [encode_example({"ids": ids, "words": words, "number": number}) for ids, words, number in rows]
    found = parse_all(records)
    for k, name in enumerate(("ids", "words")):
        values = {
            row: part.tolist()
            for rows_of, column in found.get(name, [])
            for row, part in zip(rows_of, column, strict=True)
        }
        assert {row: list(cells) for row, cells in values.items() if cells} == {
            n: list(row[k]) for n, row in enumerate(rows) if row[k]
        }
    numbers = {
        row: float(part[0])
        for rows_of, column in found.get("number", [])
        for row, part in zip(rows_of, column, strict=True)
    }
    np.testing.assert_equal([numbers[n] for n in range(len(rows))], [row[2] for row in rows])
