"""Records of typed sources come back as the columns they were made of, by the quick way and by the general one."""

from __future__ import annotations

import numpy as np
import pytest
import typed_sources as typed
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.data.example import encode_example
from elasticdl.data.reader import Metadata
from elasticdl.data.table_decoder import FeedColumns, decode, table_of
from elasticdl.data.table_encoder import Numbers, TableColumn, TextLists, Texts, encode_table
from elasticdl.data.text import guess_types, split_rows
from elasticdl_client.errors import DataError, ModelDefinitionError

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
ROW = st.tuples(INT64, FLOAT32, st.binary(max_size=300), st.tuples(INT64, INT64), st.tuples(FLOAT32, FLOAT32))
DTYPES = {"n": "int64", "f": "float64", "t": "string", "pair": "int64", "point": "float64"}
SHAPES = {"pair": (2,), "point": (2,)}


def table(dtypes: dict[str, str], delimiter: str = "", **shapes: tuple[int, ...]) -> FeedColumns:
    return FeedColumns(dtypes, shapes, tuple(dtypes), "", delimiter)


def encoded(rows: list[tuple[int, float, bytes, tuple[int, int], tuple[float, float]]]) -> list[bytes]:
    columns: dict[str, TableColumn] = {
        "n": Numbers(np.array([row[0] for row in rows], np.int64)),
        "f": Numbers(np.array([row[1] for row in rows], np.float32)),
        "t": Texts([row[2] for row in rows]),
        "pair": Numbers(np.array([row[3] for row in rows], np.int64).reshape(-1, 2)),
        "point": Numbers(np.array([row[4] for row in rows], np.float32).reshape(-1, 2)),
    }
    return encode_table(columns, len(rows))


@given(st.lists(ROW, min_size=1, max_size=20))
@settings(max_examples=80, deadline=None)
def test_what_was_encoded_is_decoded(
    rows: list[tuple[int, float, bytes, tuple[int, int], tuple[float, float]]],
) -> None:
    found = decode(encoded(rows), table(DTYPES, **SHAPES))
    assert [int(one) for one in found["n"]] == [row[0] for row in rows]
    assert [float(one) for one in found["f"]] == [row[1] for row in rows]
    assert found["t"] == [row[2] for row in rows]
    assert np.asarray(found["pair"]).tolist() == [list(row[3]) for row in rows]
    assert np.asarray(found["point"]).tolist() == [list(row[4]) for row in rows]


@given(st.lists(ROW, min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_a_record_is_the_same_whatever_it_is_read_with(
    rows: list[tuple[int, float, bytes, tuple[int, int], tuple[float, float]]],
) -> None:
    assert encoded(rows) == [encoded([row])[0] for row in rows]


def test_records_of_another_writer_are_decoded_too() -> None:
    records = [encode_example({"n": 1, "f": 0.5}), encode_example({"f": 1.5, "n": 300, "more": b"x"})]
    found = decode(records, table({"n": "int64", "f": "float64"}))
    assert np.asarray(found["n"]).tolist() == [1, 300]
    assert np.asarray(found["f"]).tolist() == [0.5, 1.5]


def test_a_missing_whole_number_is_named() -> None:
    columns = {"n": Numbers(np.array([1, 0]), np.array([False, True])), "f": Numbers(np.array([1.0, np.nan]))}
    records = encode_table(columns, 2)
    with pytest.raises(DataError, match="no value of the column n"):
        decode(records, table({"n": "int64", "f": "float64"}))


def test_lists_of_texts_are_as_tensorflow_parses_them() -> None:
    import tensorflow as tf

    (record,) = encode_table({"t": TextLists([[b"a", b"", b"long" * 99]])}, 1)
    parsed = tf.io.parse_single_example(record, {"t": tf.io.FixedLenFeature([3], tf.string)})
    assert parsed["t"].numpy().tolist() == [b"a", b"", b"long" * 99]


def test_csv_rows_are_split_by_their_quotes_and_typed() -> None:
    rows = [b'1,"a, ""b""",2.5', b"-7,,"]
    found = decode(rows, table({"n": "int64", "t": "string", "f": "float64"}, delimiter=","))
    assert np.asarray(found["n"]).tolist() == [1, -7]
    assert found["t"] == [b'a, "b"', b""]
    assert np.asarray(found["f"])[0] == 2.5
    assert np.isnan(np.asarray(found["f"])[1])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b"x,t,1", "'x' in the column n, which is read as int64"),
        (b"1,2", "2 fields, the header 3"),
        (b"1,\xe9", r"2 fields, the header 3: 1,\?"),
        (b"1,caf\xe9,1", r"b'caf\\xe9' in the column t, which is not UTF-8"),
        (b"1,t\r,1", r"A row is not CSV: .*: b'1,t\\r,1'"),
    ],
)
def test_a_row_that_is_not_of_the_table_is_named(row: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        decode([row], table({"n": "int64", "t": "string", "f": "float64"}, delimiter=","))


def test_a_text_of_another_encoding_is_an_error_only_where_it_is_used() -> None:
    found = decode([b"1,caf\xe9"], FeedColumns({"n": "int64", "t": "string"}, {}, ("n",), "", ","))
    assert np.asarray(found["n"]).tolist() == [1]
    assert guess_types([b"1,caf\xe9", b"2,a\rb", b'3,"a\rb"'], 2, ",") == ["int64", "string"]
    assert split_rows([b'"a\rb\r\nc",d', b""], ",") == [["a\rb\r\nc", "d"], []]


def test_a_module_without_a_feed_needs_columns_and_a_label() -> None:
    columns = Metadata(("a", "b"), (("a", "int64"), ("b", "float64")), label_column="b")
    assert table_of(columns, False, "m.py").features == ("a",)
    assert table_of(columns, True, "m.py").used == ("a",)
    with pytest.raises(ModelDefinitionError, match="the data have no columns"):
        table_of(Metadata(), True, "m.py")
    with pytest.raises(ModelDefinitionError, match="label_column names no column") as caught:
        table_of(Metadata(("a",), (("a", "int64"),)), False, "m.py")
    assert "--label_column, one of a" in caught.value.hint
    image = Metadata(("image",), (("image", "image"),))
    with pytest.raises(ModelDefinitionError, match="images may be of any size") as caught:
        table_of(image, True, "m.py")
    assert "image_size" in caught.value.hint


def test_rows_of_every_length_are_decoded_together() -> None:
    rows = typed.rows(300)
    found = decode(typed.records(rows), table({"f": "float64", "n": "int64", "t": "string"}))
    assert np.asarray(found["n"]).tolist() == [row["n"] for row in rows]
