"""Tabular data sets as tf.train.Example: frappe (libfm), census (CSV), iris (CSV), and click logs.

In frappe, census and iris each row becomes one record; an invalid row is an error with file and line.

The synthetic click log is of any size and the same for the same seed: learnable, skewed, and cheap to make. Each record
has `ids` (ten categories, Zipf-distributed over one id space; every field has its own popular ids), `dense` (thirteen
standard normal floats) and `label`. The label is drawn with the probability that a hidden logistic model of all ids and
floats gives, so the best possible AUC is about 0.85.

Criteo's display advertising data have `label`, `I1` to `I13` (floats), `C1` to `C26` (bytes).  A missing value has no
feature.  The rows come from a file, or are generated with the same columns: categories are Zipf-distributed, some
values are missing, and the label is drawn with the probability that a hidden factorization machine gives, so the best
possible AUC is about 0.91.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    """Return frappe from libfm files: `feature`, ten ids, and `label`, 1 or 0.

    `train` is frappe.train.libfm and `validation` is frappe.validation.libfm; if the first file is missing, they are
    frappe.validation.libfm and frappe.test.libfm.
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
    """Return UCI's Adult: numeric columns as floats, others as bytes (missing: `?`), `label` 1 for more than 50K."""
    files = [("train", ("adult-train.csv", "adult.data")), ("validation", ("adult-test.csv", "adult.test"))]
    splits: list[Split] = []
    for name, candidates in files:
        records = list(_census_records(_required(source, *candidates)))
        splits.append(Split(name, len(records), iter([records])))
    return splits


def iris(source: str) -> list[Split]:
    """Return Fisher's iris: four floats and `label`, 0 to 2; 120 to train and 30 to validate, with a fixed seed."""
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
    """Return the path of the first of these files that the directory has."""
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
    """Return the ids (rows, 10) and the labels of a libfm file with lines `±1 id:1 … id:1`."""
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
    """Yield line number and cells of each row, without blank rows, a header, and UCI's comment line (`|…`)."""
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


NUM_FIELDS = 10
NUM_DENSE = 13

_BLOCK_SIZE = 8192
_ZIPF_EXPONENT = 1.1
_ID_WEIGHT = 0.9
_DENSE_WEIGHT = 0.35
_BIAS = -0.6
_LARGE_PRIME = 2_654_435_761


@dataclass(frozen=True, slots=True)
class ClickLog:
    """A synthetic click log.

    Attributes:
        num_records: Records for training; there are a tenth as many, at most 100,000, for validation.
        num_ids: Size of the id space.
        seed: Seed of the hidden model and of the records.
    """

    num_records: int
    num_ids: int = 1_000_000
    seed: int = 0

    def splits(self) -> list[Split]:
        sizes = [("train", self.num_records), ("validation", min(100_000, max(1, self.num_records // 10)))]
        return [Split(name, size, self._blocks(number, size)) for number, (name, size) in enumerate(sizes)]

    def columns(self, split: int, block: int, size: int) -> dict[str, NDArray[np.float32] | NDArray[np.int64]]:
        """Return one block of records as arrays."""
        random = np.random.default_rng([self.seed, split, block])
        ids = self._ids(random, size)
        dense = random.standard_normal((size, NUM_DENSE), np.float32)
        clicked = random.random(size) < 1 / (1 + np.exp(-self._logits(ids, dense)))
        return {"ids": ids, "dense": dense, "label": clicked.astype(np.int64)}

    def _blocks(self, split: int, num_records: int) -> Iterator[list[bytes]]:
        for block, start in enumerate(range(0, num_records, _BLOCK_SIZE)):
            yield encode_examples(self.columns(split, block, min(_BLOCK_SIZE, num_records - start)))

    def _ids(self, random: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Return Zipf-distributed ids: ranks by inversion of the continuous distribution, spread per field."""
        power = 1 - _ZIPF_EXPONENT
        largest = (self.num_ids + 1) ** power - 1
        ranks = (1 + random.random((size, NUM_FIELDS)) * largest) ** (1 / power)
        ranks_from_zero = np.clip(ranks.astype(np.int64) - 1, 0, self.num_ids - 1)
        field_offsets = np.arange(NUM_FIELDS, dtype=np.int64) * (self.num_ids // NUM_FIELDS)
        spread: NDArray[np.int64] = (ranks_from_zero * self._stride() + field_offsets) % self.num_ids
        return spread

    def _stride(self) -> int:
        """Return a number coprime to the number of ids: multiples of it reach every id."""
        stride = _LARGE_PRIME % self.num_ids
        while math.gcd(stride, self.num_ids) != 1:
            stride += 1
        return stride

    def _logits(self, ids: NDArray[np.int64], dense: NDArray[np.float32]) -> NDArray[np.float64]:
        hidden = np.random.default_rng([self.seed, 2]).standard_normal(NUM_DENSE)
        logits: NDArray[np.float64] = (
            _BIAS + _ID_WEIGHT * self._id_weights(ids).sum(axis=1) + dense @ (_DENSE_WEIGHT * hidden)
        )
        return logits

    def _id_weights(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a hidden weight per id, uniform in [-1, 1): SplitMix64 of id and seed (Steele et al., 2014)."""
        state = ids.astype(np.uint64) + np.uint64((self.seed * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
        state = state * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
        weights: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1
        return weights


COUNTS = tuple(f"I{k}" for k in range(1, 14))
CATEGORIES = tuple(f"C{k}" for k in range(1, 27))
_FILES = ("train.txt", "criteo_sample.txt")
_VALIDATION_SHARE = 20  # one row in twenty
_CRITEO_BLOCK_SIZE = 1024

_GENERATED_TRAIN, _GENERATED_VALIDATION = 40_000, 8000
_DISTINCT = (  # as in the original, but at most 100
    100, 100, 100, 100, 100, 24, 100, 100, 3, 100, 100, 100, 100, 27, 100, 100, 10, 100, 100, 4, 100, 18, 15, 100, 100,
    100,
)  # fmt: skip
_MISSING = 0.15  # of the counts
_DIM = 4
_CRITEO_BIAS = -2.0


def criteo(source: str) -> list[Split]:
    """Return the rows of Kaggle's train.txt (tabs, no header) or of the sample (commas, a header); 5 % are validation.

    If `source` is empty, a log is generated: 40,000 rows for training and 8,000 for validation.

    Raises:
        DataError: There is no such file, or a row is invalid.
    """
    if not source:
        return generated(_GENERATED_TRAIN, _GENERATED_VALIDATION)
    path = next((path for name in _FILES if os.path.isfile(path := os.path.join(source, name))), None)
    if path is None:
        raise DataError(
            f"{source} has no file {' or '.join(_FILES)}.",
            "--source is the directory with Criteo's rows; without it a log is generated.",
        )
    num_rows = sum(1 for _ in _rows(path))
    num_validation = num_rows // _VALIDATION_SHARE
    return [
        Split("train", num_rows - num_validation, _blocks_of_file(path, validation=False, num_rows=num_rows)),
        Split("validation", num_validation, _blocks_of_file(path, validation=True, num_rows=num_rows)),
    ]


def generated(num_train: int, num_validation: int, seed: int = 0) -> list[Split]:
    """Generate a log; the same arguments give the same log."""
    hidden = _Hidden(seed)
    return [
        Split(name, count, _generated_blocks(hidden, count, [seed, k]))
        for k, (name, count) in enumerate([("train", num_train), ("validation", num_validation)])
    ]


def _rows(path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and the 40 cells of each row."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        first = file.readline()
        file.seek(0)
        rows = csv.reader(file, delimiter="\t" if "\t" in first else ",")
        for row in rows:
            if rows.line_num == 1 and row[:1] == ["label"]:
                continue
            if len(row) != 1 + len(COUNTS) + len(CATEGORIES):
                raise DataError(f"{path}, line {rows.line_num}: has {len(row)} columns, not 40.")
            yield rows.line_num, row


def _blocks_of_file(path: str, validation: bool, num_rows: int) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    last = num_rows // _VALIDATION_SHARE * _VALIDATION_SHARE
    for number, (line, row) in enumerate(_rows(path)):
        if (number % _VALIDATION_SHARE == _VALIDATION_SHARE - 1 and number < last) != validation:
            continue
        block.append(_record(path, line, row))
        if len(block) == _CRITEO_BLOCK_SIZE:
            yield block
            block = []
    yield block


def _record(path: str, line: int, row: Sequence[str]) -> bytes:
    try:
        features: dict[str, int | float | bytes] = {"label": int(row[0])}
        for name, cell in zip(COUNTS, row[1:], strict=False):
            if cell:
                features[name] = float(cell)
    except ValueError as error:
        raise DataError(f"{path}, line {line}: {error}.", "The file is damaged or of another format.") from error
    for name, cell in zip(CATEGORIES, row[1 + len(COUNTS) :], strict=True):
        if cell:
            features[name] = cell.encode()
    return encode_example(features)


class _Hidden:
    """The model that the labels of a generated log come from: a weight and a vector for each value of a category."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng([20_140_624, seed])
        self.weights = [random.normal(0, 0.45, count) for count in _DISTINCT]
        self.vectors = [random.normal(0, 0.2, (count, _DIM)) for count in _DISTINCT]
        self.slopes = random.normal(0, 0.25, len(COUNTS))

    def logits(self, counts: NDArray[np.float64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the logits [n] for counts [n, 13] and ids [n, 26]."""
        columns = range(len(CATEGORIES))
        vectors = np.stack([self.vectors[k][ids[:, k]] for k in columns], axis=1)
        pairs: NDArray[np.float64] = (vectors.sum(axis=1) ** 2 - (vectors**2).sum(axis=1)).sum(axis=1) / 2
        linear = sum(self.weights[k][ids[:, k]] for k in columns)
        return _CRITEO_BIAS + linear + pairs + (np.log1p(counts) - 1.5) @ self.slopes


def _generated_blocks(hidden: _Hidden, count: int, seed: list[int]) -> Iterator[list[bytes]]:
    random = np.random.default_rng(seed)
    for start in range(0, count, _CRITEO_BLOCK_SIZE):
        size = min(_CRITEO_BLOCK_SIZE, count - start)
        counts = np.floor(np.exp(random.normal(1.5, 1.2, (size, len(COUNTS)))))
        ranks = [np.floor(np.exp(random.random(size) * np.log(distinct))) for distinct in _DISTINCT]  # Zipf
        ids = np.stack(ranks, axis=1).astype(np.int64) - 1
        clicked = random.random(size) < 1 / (1 + np.exp(-hidden.logits(counts, ids)))
        missing = random.random((size, len(COUNTS))) < _MISSING
        yield [
            _generated_record(int(label), row_counts, row_ids, row_missing)
            for label, row_counts, row_ids, row_missing in zip(clicked, counts, ids, missing, strict=True)
        ]


def _generated_record(
    label: int, counts: NDArray[np.float64], ids: NDArray[np.int64], missing: NDArray[np.bool_]
) -> bytes:
    features: dict[str, int | float | bytes] = {"label": label}
    for name, value, is_missing in zip(COUNTS, counts, missing, strict=True):
        if not is_missing:
            features[name] = float(value)
    for k, (name, number) in enumerate(zip(CATEGORIES, ids, strict=True)):
        features[name] = b"%08x" % ((int(number) * 2_654_435_761 + k * 40_503) & 0xFFFFFFFF)
    return encode_example(features)
