"""Tabular data sets as tf.train.Example: frappe (libfm), census (CSV), iris (CSV).

Each row becomes one record; a row that is not as it should be is an error that names file and line.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.datasets import Split
from elasticdl.data.example import encode_example, encode_examples
from elasticdl_client.errors import DataError

NUM_FRAPPE_FIELDS = 10
CENSUS_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship", "race",
    "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country",
)  # fmt: skip
CENSUS_NUMERIC_COLUMNS = frozenset(["age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"])
IRIS_COLUMNS = ("sepal_length", "sepal_width", "petal_length", "petal_width")
IRIS_CLASSES = ("Iris-setosa", "Iris-versicolor", "Iris-virginica")

_IRIS_SPLIT_SEED = 1936
_NUM_VALIDATION_IRISES = 30


def frappe(source: str) -> list[Split]:
    """`feature`, ten ids, and `label`, 1 or 0, from libfm files.

    `train` is made of frappe.train.libfm and `validation` of frappe.validation.libfm; where the first is missing,
    of frappe.validation.libfm and frappe.test.libfm.
    """
    files = ["frappe.train.libfm", "frappe.validation.libfm"]
    if not os.path.isfile(os.path.join(source, files[0])):
        files = ["frappe.validation.libfm", "frappe.test.libfm"]
    splits: list[Split] = []
    for name, file in zip(("train", "validation"), files, strict=True):
        ids, labels = _read_libfm(_required(source, file))
        splits.append(Split(name, len(labels), iter([encode_examples({"feature": ids, "label": labels})])))
    return splits


def census(source: str) -> list[Split]:
    """UCI's Adult: numeric columns as floats, the others as bytes (missing: `?`), `label` 1 for more than 50K."""
    files = [("train", ("adult-train.csv", "adult.data")), ("validation", ("adult-test.csv", "adult.test"))]
    splits: list[Split] = []
    for name, candidates in files:
        records = list(_census_records(_required(source, *candidates)))
        splits.append(Split(name, len(records), iter([records])))
    return splits


def iris(source: str) -> list[Split]:
    """Fisher's iris: four floats and `label`, 0 to 2; 120 to train and 30 to validate, drawn with a fixed seed."""
    path = _required(source, "iris.csv", "iris.data")
    records: list[bytes] = []
    for line, row in _csv_rows(path, len(IRIS_COLUMNS) + 1):
        features: dict[str, float] = {
            name: _number(text, path, line) for name, text in zip(IRIS_COLUMNS, row[:-1], strict=True)
        }
        if row[-1] not in IRIS_CLASSES:
            raise _bad_line(path, line, f"{row[-1]!r} is no class of iris")
        records.append(encode_example(features | {"label": IRIS_CLASSES.index(row[-1])}))
    order = np.random.default_rng(_IRIS_SPLIT_SEED).permutation(len(records))
    shuffled = [records[i] for i in order]
    train, validation = shuffled[:-_NUM_VALIDATION_IRISES], shuffled[-_NUM_VALIDATION_IRISES:]
    return [
        Split("train", len(train), iter([train])),
        Split("validation", len(validation), iter([validation])),
    ]


def _required(source: str, *names: str) -> str:
    """The first of the files that a directory has."""
    for name in names:
        path = os.path.join(source, name)
        if os.path.isfile(path) and os.access(path, os.R_OK):
            return path
    raise DataError(
        f"{source} has no readable file {' or '.join(names)}.", "Name the directory that holds it with --source."
    )


def _bad_line(path: str, line: int, what: str) -> DataError:
    return DataError(f"{path}, line {line}: {what}.", "The file is damaged or of another format.")


def _read_libfm(path: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of shape (rows, 10) and labels of a libfm file of lines `±1 id:1 … id:1`."""
    ids: list[list[int]] = []
    labels: list[int] = []
    with open(path, encoding="ascii", errors="replace") as file:
        for line, text in enumerate(file, 1):
            try:
                label, *fields = text.split()
                row = [int(field.removesuffix(":1")) for field in fields]
                labels.append(int(float(label) > 0))
            except ValueError as error:
                raise _bad_line(path, line, f"not a row of libfm ids: {error}") from error
            if len(row) != NUM_FRAPPE_FIELDS:
                raise _bad_line(path, line, f"has {len(row)} ids, not {NUM_FRAPPE_FIELDS}")
            ids.append(row)
    if not ids:
        raise DataError(f"{path} is empty.")
    return np.array(ids, np.int64), np.array(labels, np.int64)


def _census_records(path: str) -> Iterator[bytes]:
    for line, row in _csv_rows(path, len(CENSUS_COLUMNS) + 1):
        income = row[-1].rstrip(".")
        if income not in ("<=50K", ">50K"):
            raise _bad_line(path, line, f"{row[-1]!r} is neither <=50K nor >50K")
        features: dict[str, float | bytes | int] = {"label": int(income == ">50K")}
        for name, text in zip(CENSUS_COLUMNS, row, strict=False):
            features[name] = _number(text, path, line) if name in CENSUS_NUMERIC_COLUMNS else text.encode()
        yield encode_example(features)


def _csv_rows(path: str, num_columns: int) -> Iterator[tuple[int, Sequence[str]]]:
    """Line number and cells of each row; blank rows, a header and UCI's comment line (`|…`) are left out."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(file, skipinitialspace=True)
        for row in rows:
            if not row or row[0].startswith("|"):
                continue
            if len(row) != num_columns:
                raise _bad_line(path, rows.line_num, f"has {len(row)} columns, not {num_columns}")
            if rows.line_num == 1 and not row[0][:1].isdigit():
                continue
            yield rows.line_num, row


def _number(text: str, path: str, line: int) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise _bad_line(path, line, f"{text!r} is no number") from error
