"""COLUMN clauses: features of a table's columns, and the clause that its statistics suggest."""

from __future__ import annotations

from typing import Any

import pytest

from elasticdl.analysis.analysis import statistics_of_rows
from elasticdl_client.errors import DataError
from elasticdl_client.sql.columns import ColumnFeatures, clause_of, inferred, inputs_of, resolved
from elasticdl_client.sql.parser import parse
from elasticdl_client.sql.statement import StatementError, Train

ROWS = 200


def statistics() -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        "id": list(range(7, 7 + ROWS)),
        "age": [18 + i % 50 for i in range(ROWS)],
        "gain": [0.0] * (ROWS - 5) + [1.5, 2.5, 3.5, 4.5, 5.5],
        "sex": ["m" if i % 3 else "f" for i in range(ROWS)],
        "town": [f"town {i % 90}" if i % 9 else None for i in range(ROWS)],
        "name": [f"name {i}" for i in range(ROWS)],
        "one": [1] * ROWS,
        "none": [None] * ROWS,
        "odd 'na`me\"": ["it's", 'a "b" \\'] * (ROWS // 2),
        "y": [i % 2 for i in range(ROWS)],
    }
    found = statistics_of_rows(columns)["columns"]
    return {name: found[name] for name in columns}


def columns_of(clause: str, dialect: str = "postgres") -> ColumnFeatures:
    (found,) = parse(f"SELECT * FROM t TO TRAIN D {clause} LABEL y INTO m", dialect)
    assert isinstance(found, Train)
    return resolved(found.columns, statistics(), "y")


def test_without_a_clause_each_column_gets_what_its_type_and_statistics_ask_for() -> None:
    found = inferred(statistics(), "y")
    kinds = [
        (one["column"], one["kind"]) for one in ({**feature, **feature.get("ids", {})} for feature in found.features)
    ]
    assert kinds == [
        ("age", "number"), ("age", "bucket"), ("gain", "number"), ("sex", "vocabulary"), ("town", "hash"),
        ("odd 'na`me\"", "vocabulary"),
    ]  # fmt: skip
    assert set(found.left_out) == {"id", "name", "one", "none"}


@pytest.mark.parametrize("dialect", ["postgres", "sqlite", "mysql"])
def test_the_explicit_clause_means_the_same(dialect: str) -> None:
    found = inferred(statistics(), "y")
    again = columns_of(clause_of(found.features, dialect), dialect)
    assert [one | {"part": ""} for one in found.features] == list(again.features)
    assert clause_of(again.features, dialect) == clause_of(found.features, dialect)


BUCKETS = {"kind": "bucket", "column": "age", "boundaries": [20.0, 30.0]}
SEXES = {"kind": "vocabulary", "column": "sex", "values": ["f", "m"]}


@pytest.mark.parametrize(
    ("clause", "feature"),
    [
        ("NUMERIC(age)", {"kind": "number", "column": "age", "mean": 0.0, "deviation": 1.0}),
        ("NORMALIZE(AGE, 40, 2.5)", {"kind": "number", "column": "age", "mean": 40.0, "deviation": 2.5}),
        ("EMBEDDING(sex, 4)", {"kind": "embedding", "dimension": 4, "ids": SEXES}),
        ("INDICATOR(BUCKET(age, [20, 30]))", {"kind": "indicator", "ids": BUCKETS}),
    ],
)
def test_a_function_makes_its_feature(clause: str, feature: dict[str, Any]) -> None:
    found = columns_of(f"COLUMN {clause}")
    assert found.features == (feature | {"part": ""},)
    assert columns_of(clause_of(found.features, "postgres")).features == found.features


@pytest.mark.parametrize(
    ("clause", "ids"),
    [
        ("BUCKET(age, [20, 30])", BUCKETS),
        ("VOCABULARY(sex)", SEXES),
        ("VOCABULARY(age, [1, 2.0])", {"kind": "vocabulary", "column": "age", "values": ["1", "2"]}),
        ("CATEGORY_HASH(age, 9)", {"kind": "hash", "column": "age", "size": 9}),
        ("category_id(age, 99)", {"kind": "identity", "column": "age", "size": 99}),
    ],
)
def test_a_function_makes_its_category(clause: str, ids: dict[str, Any]) -> None:
    found = columns_of(f"COLUMN {clause}")
    assert found.features == ({"kind": "category", "ids": ids, "part": ""},)
    assert columns_of(clause_of(found.features, "postgres")).features == found.features


def test_a_cross_is_of_categories_and_of_columns() -> None:
    found = columns_of(
        "COLUMN CROSS([sex, age, CATEGORY_HASH(town, 5)], 1000) FOR wide COLUMN age FOR dnn_feature_columns"
    )
    cross, *deep = found.features
    assert [one["kind"] for one in cross["ids"]["of"]] == ["vocabulary", "bucket", "hash"]
    assert (cross["part"], {one["part"] for one in deep}) == ("wide", {"deep"})
    assert inputs_of(found.features) == [("sex", "text"), ("age", "number"), ("town", "text")]


@pytest.mark.parametrize(
    ("clause", "marked", "hint"),
    [
        ("agee", "agee", "'age'"),
        ('"AGE"', '"AGE"', "age"),
        ("y", "y", "leave it out"),
        ("none", "none", "Leave it out"),
        ("NORMALISE(age)", "NORMALISE", "NORMALIZE"),
        ("NORMALIZE(age, 1)", "NORMALIZE(age, 1)", "deviation"),
        ("NORMALIZE(age, 1, 0)", "0", "Leave both out"),
        ("NORMALIZE(sex)", "sex", "VOCABULARY"),
        ("NUMERIC()", "NUMERIC()", "NUMERIC(column)"),
        ("BUCKET(age, [2, 1])", "[2, 1]", "10, 20.5"),
        ("BUCKET(age, ['a'])", "['a']", "10, 20.5"),
        ("BUCKET(gain)", "gain", "boundaries"),
        ("VOCABULARY(sex, ['a', 'a'])", "['a', 'a']", "'a', 'b'"),
        ("VOCABULARY(gain)", "gain", "BUCKET"),
        ("CATEGORY_HASH(sex)", "CATEGORY_HASH(sex)", "size"),
        ("CATEGORY_HASH(sex, 0)", "0", "another"),
        ("CATEGORY_HASH(sex, 'x')", "'x'", "sql.md"),
        ("CROSS([sex], 10)", "[sex]", "CROSS("),
        ("CROSS(sex, 10)", "sex", "CROSS("),
        ("CROSS([sex, CROSS([sex, age], 9)], 10)", "[sex, CROSS([sex, age], 9)]", "one list"),
        ("EMBEDDING(NUMERIC(age), 4)", "NUMERIC(age)", "BUCKET"),
        ("EMBEDDING(sex, 4.5)", "4.5", "sql.md"),
        ("5", "5", "NORMALIZE"),
        ("age FOR wise", "wise", "'wide'"),
    ],
)
def test_a_wrong_feature_is_pointed_at(clause: str, marked: str, hint: str) -> None:
    with pytest.raises(StatementError) as caught:
        columns_of(f"COLUMN {clause}")
    assert caught.value.place.text == marked
    assert hint in caught.value.hint


def test_a_column_of_numbers_and_texts_is_refused() -> None:
    with pytest.raises(DataError, match="column x holds numbers and texts, such as 1 and 'a'"):
        statistics_of_rows({"x": [1, "a", None]})
