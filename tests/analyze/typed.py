"""A table written in every kind of file that readers know."""

from __future__ import annotations

import csv
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elasticdl.data.example import encode_example
from elasticdl.data.recordio_format import RecordIOWriter

Rows = Sequence[dict[str, Any]]


def _csv(directory: Path, rows: Rows) -> str:
    with open(directory / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(directory / "table.csv")


def _parquet(directory: Path, rows: Rows) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), directory / "table.parquet", row_group_size=30)
    return str(directory / "table.parquet")


def _npz(directory: Path, rows: Rows) -> str:
    np.savez(directory / "table.npz", **{name: np.array([row[name] for row in rows]) for name in rows[0]})
    return str(directory / "table.npz")


def _recordio(directory: Path, rows: Rows) -> str:
    (directory / "table").mkdir()
    with RecordIOWriter(str(directory / "table" / "data-00000")) as writer:
        for row in rows:
            writer.write(encode_example(row))
    return str(directory / "table")


def _sql(directory: Path, rows: Rows) -> str:
    with sqlite3.connect(directory / "table.db") as database:
        database.execute("create table t (id integer primary key, n bigint, f real, t text)")
        database.executemany("insert into t (n, f, t) values (?, ?, ?)", [(r["n"], r["f"], r["t"]) for r in rows])
    database.close()
    return f"sqlite:///{directory / 'table.db'}?table=t"


SOURCES: dict[str, Callable[[Path, Rows], str]] = {
    "csv": _csv,
    "parquet": _parquet,
    "npz": _npz,
    "recordio": _recordio,
    "sql": _sql,
}
