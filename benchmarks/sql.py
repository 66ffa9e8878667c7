"""Rows of PostgreSQL as the rows of jobs against COPY into Arrow, and models of the short form against scikit-learn.

``python -m benchmarks.sql [--quick] [--json] [--census=DIR]``: a server of its own, a table of 11 columns, which
`elasticdl sql` writes as files of a model's inputs, or for Kubernetes as a table of them, and COPY reads into one table
of Arrow, by turns, each in a fresh process; a master counts the rows of a table by its key.  With the census
(`adult-train.csv`, `adult-test.csv`) also the area under the ROC curve of the short form, and of the better of two
plain pipelines of scikit-learn on the same table, where that is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import multiprocessing
import os
import re
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow.csv

from elasticdl.data.factory import create_reader
from elasticdl_client.sql import snapshot
from elasticdl_client.sql.cluster import StagedRows
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.parser import parse_select
from elasticdl_client.sql.runtime import FileRows, RowStore
from elasticdl_client.sql.snapshot import LABEL, Field
from tests.data import postgres

ROUNDS = 3
TABLE = """
CREATE TABLE t AS SELECT i AS id, (random() * 1000)::int AS a, random() AS b, 'c' || (random() * 30)::int AS c,
    'dd' || (random() * 5000)::int AS d, (random() * 7)::int AS e, random() * 100 AS f,
    'text ' || (random() * 400)::int AS g, (random() * 100000)::int AS h, random() AS i,
    CASE WHEN random() > 0.5 THEN 'p' ELSE 'n' END AS y FROM generate_series(1, {}) AS i
"""
INPUTS = [(name, "text" if name in "cdg" else "number") for name in "abcdefghi"]
CENSUS = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"),
)
CENSUS_NUMBERS = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")


def copy_into_arrow(url: str) -> int:
    """Read the table by COPY into one table of Arrow; how many rows there are."""
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        content = io.BytesIO()
        with cursor.copy("COPY t TO STDOUT (FORMAT csv)") as copy:
            for row in copy:
                content.write(row)
    content.seek(0)
    options = pyarrow.csv.ReadOptions(autogenerate_column_names=True)
    return int(pyarrow.csv.read_csv(content, options).num_rows)


def write_files(url: str) -> int:
    """Write the table as `elasticdl sql` does for this machine; how many rows there are."""
    with tempfile.TemporaryDirectory() as name:
        return write_rows(Database(url), FileRows(Path(name) / "rows", Path(name) / "rows"))


def write_table(url: str) -> int:
    """Write the table as `elasticdl sql` does for Kubernetes; how many rows there are."""
    database = Database(url)
    store = StagedRows(database)
    try:
        return write_rows(database, store)
    finally:
        store.close()


def write_rows(database: Database, store: RowStore) -> int:
    """Write the table in the forms of a model's inputs; how many rows there are."""
    query = parse_select("SELECT * FROM t", "postgres")
    fields = [*snapshot.input_fields(INPUTS), Field(LABEL, "y", "class")]
    with database.snapshot() as reader:
        columns = reader.columns(query)
        rows = reader.rows(query, snapshot.only_numbers(fields))
        return store.write("train", rows, columns, fields, ["n", "p"], seed=0)


def count_by_key(url: str) -> int:
    """Find the shards of the table, as a master does; how many rows there are."""
    return sum(shard.end - shard.start for shard in create_reader(f"{url}&table=t&key=id").shards())


def measured(function: Callable[[str], int], url: str) -> tuple[int, float, float]:
    """Rows, seconds, and the megabytes that this process has taken at most."""
    started = time.perf_counter()
    num_rows = function(url)
    return num_rows, time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reading(num_rows: int) -> dict[str, float]:
    """Compare the ways of reading a table."""
    functions = (write_files, write_table, copy_into_arrow, count_by_key)
    found: dict[Callable[[str], int], list[tuple[int, float, float]]] = {function: [] for function in functions}
    with postgres.server() as url:
        with psycopg.connect(url) as connection:
            connection.execute(TABLE.format(num_rows))  # type: ignore[arg-type]
        for _ in range(ROUNDS):
            for function, results in found.items():
                with multiprocessing.get_context("spawn").Pool(1) as fresh:
                    results.append(fresh.apply(measured, (function, url)))
    assert all(rows == num_rows for results in found.values() for rows, _, _ in results)
    files_s, table_s, copy_s, count_s = (
        statistics.median(seconds for _, seconds, _ in results) for results in found.values()
    )
    return {
        "rows": num_rows,
        "files_s": files_s,
        "table_s": table_s,
        "copy_s": copy_s,
        "count_s": count_s,
        "files_to_copy_ratio": copy_s / files_s,
        "table_to_copy_ratio": copy_s / table_s,
        "files_peak_mb": max(peak for _, _, peak in found[write_files]),
        "table_peak_mb": max(peak for _, _, peak in found[write_table]),
        "count_peak_mb": max(peak for _, _, peak in found[count_by_key]),
    }


def load_census(directory: Path, path: Path) -> None:
    """Make a database of SQLite with the tables `train` and `test`."""
    listed = ", ".join(f"{name} {'INTEGER' if name in CENSUS_NUMBERS else 'TEXT'}" for name in CENSUS)
    marks = ", ".join("?" * len(CENSUS))
    with sqlite3.connect(path) as database:
        for split in ("train", "test"):
            database.execute(f"CREATE TABLE {split} ({listed})")
            lines = (directory / f"adult-{split}.csv").read_text().splitlines()
            rows = [[cell.strip().rstrip(".") for cell in line.split(",")] for line in lines]
            kept = [[None if cell == "?" else cell for cell in row] for row in rows if len(row) == len(CENSUS)]
            database.executemany(f"INSERT INTO {split} VALUES ({marks})", kept)
            database.execute(f"DELETE FROM {split} WHERE typeof(age) <> 'integer'")
    database.close()


def short_form(path: Path) -> float:
    """Train on `train` by the short form; return the area under the ROC curve on `test`."""
    statements = "SELECT * FROM train LABEL income INTO census; SELECT * FROM test TO EVALUATE auc USING census"
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", "sql", statements, "--distribution_strategy=Local"],
        check=True, capture_output=True, text=True,
        env={**os.environ, "HOME": str(path.parent), "ELASTICDL_DATASOURCE": f"sqlite:///{path}"},
    )  # fmt: skip
    return float(re.findall(r"^ +auc +(\S+)$", done.stdout, re.MULTILINE)[-1])


def scikit_learn(path: Path) -> float:
    """Train the usual pipelines on `train`; return the larger area under the ROC curve on `test`."""
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    def table(name: str) -> tuple[Any, Any]:
        with sqlite3.connect(path) as database:
            rows = database.execute(f"SELECT * FROM {name}").fetchall()
        database.close()
        cells = np.array([["" if cell is None else cell for cell in row[:-1]] for row in rows], object)
        return cells, np.array([row[-1] == ">50K" for row in rows])

    numbers = [at for at, name in enumerate(CENSUS[:-1]) if name in CENSUS_NUMBERS]
    texts = [at for at in range(len(CENSUS) - 1) if at not in numbers]
    linear = make_pipeline(
        make_column_transformer((StandardScaler(), numbers), (OneHotEncoder(handle_unknown="ignore"), texts)),
        LogisticRegression(max_iter=1000),
    )
    ordinal = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    trees = make_pipeline(
        make_column_transformer((ordinal, texts), (StandardScaler(), numbers)),
        HistGradientBoostingClassifier(categorical_features=list(range(len(texts))), random_state=0),
    )
    (inputs, labels), (test_inputs, test_labels) = table("train"), table("test")
    return max(
        float(roc_auc_score(test_labels, model.fit(inputs, labels).predict_proba(test_inputs)[:, 1]))
        for model in (linear, trees)
    )


def quality(directory: Path) -> dict[str, float]:
    """Compare models of the census."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "census.db"
        load_census(directory, path)
        found = {"census_auc": short_form(path)}
        if importlib.util.find_spec("sklearn") is None:
            print("scikit-learn is not installed: there is nothing to compare the model with.", file=sys.stderr)
            return found
        return found | {"scikit_learn_auc": scikit_learn(path)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--census", type=Path, help="directory of the census; without it, models are not compared")
    arguments = parser.parse_args()
    figures = reading(100_000 if arguments.quick else 1_000_000)
    if arguments.census is not None:
        figures |= quality(arguments.census)
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:14,.3f}")


if __name__ == "__main__":
    main()
