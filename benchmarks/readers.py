"""Reading typed sources as records, against pyarrow's own scan of the same file, in the same run.

``python -m benchmarks.readers [--quick] [--json]``: 6 floats, 4 whole numbers and 2 texts a row, in tasks of 512
records one after the other; then those records back to columns, as the default feed of PyTorch does it.  CPU time, so
that other processes on the machine count little.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from elasticdl.data.factory import create_reader
from elasticdl.data.table_decoder import decode, table_of
from elasticdl.data.tfrecord import framed
from elasticdl.protocol import Shard

TASK_RECORDS = 512
CHUNK_ROWS = 20_000


def cpu_seconds(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def write(directory: Path, num_rows: int) -> dict[str, str]:
    """Write the same rows in every format; return the path of each."""
    random = np.random.default_rng(1)
    floats = {f"f{i}": random.normal(size=num_rows) for i in range(6)}
    numbers = {f"n{i}": random.integers(0, 10 ** (2 * i + 1), num_rows) for i in range(4)}
    texts = {f"t{i}": np.char.add("text", random.integers(0, 100_000, num_rows).astype(str)) for i in range(2)}
    table = pa.table({name: pa.array(column) for name, column in (floats | numbers | texts).items()})
    pq.write_table(table, directory / "rows.parquet", row_group_size=CHUNK_ROWS)
    pyarrow.feather.write_feather(table, directory / "rows.feather", chunksize=CHUNK_ROWS)
    np.savez(directory / "rows.npz", allow_pickle=False, **floats, **numbers, **texts)
    with sqlite3.connect(directory / "rows.db") as database:
        names = ", ".join(table.column_names)
        kinds = {"f": "real", "n": "bigint", "t": "text"}
        declared = ", ".join(f"{name} {kinds[name[0]]}" for name in table.column_names)
        database.execute(f"create table t (id integer primary key, {declared})")
        marks = ", ".join("?" * table.num_columns)
        columns = [table.column(name).to_pylist() for name in table.column_names]
        database.executemany(f"insert into t ({names}) values ({marks})", zip(*columns, strict=True))
    database.close()
    write_tfrecord(directory)
    files = {kind: f"{directory}/rows.{kind}" for kind in ("parquet", "feather", "npz", "tfrecord")}
    return files | {"sqlite": f"sqlite:///{directory}/rows.db?table=t"}


def write_tfrecord(directory: Path) -> None:
    with open(directory / "rows.tfrecord", "wb") as file:
        file.writelines(framed(record) for record in read_all(str(directory / "rows.parquet")))


def tasks(origin: str) -> list[Sequence[bytes]]:
    reader = create_reader(origin)
    (shard,) = reader.shards()
    starts = range(0, shard.end, TASK_RECORDS)
    return [reader.read(Shard(shard.name, start, min(start + TASK_RECORDS, shard.end))) for start in starts]


def read_all(origin: str) -> list[bytes]:
    return [record for task in tasks(origin) for record in task]


def scan_with_pyarrow(path: str) -> int:
    """Row groups in lists of 512 rows, each made Python objects."""
    file = pq.ParquetFile(path)
    return sum(len(batch.to_pylist()) for batch in file.iter_batches(TASK_RECORDS, use_threads=False))


def scan_columns_with_pyarrow(path: str) -> int:
    """Return the same rows as Arrow columns."""
    return sum(batch.num_rows for batch in pq.ParquetFile(path).iter_batches(TASK_RECORDS, use_threads=False))


def measure(num_rows: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        origins = write(Path(name), num_rows)
        figures: dict[str, float] = {"num_rows": num_rows}
        for kind, origin in origins.items():
            figures[f"{kind}_index_ms"] = cpu_seconds(create_reader(origin).shards) * 1000
            figures[f"{kind}_records_per_s"] = num_rows / cpu_seconds(partial(tasks, origin))
        parquet = origins["parquet"]
        figures["pyarrow_rows_per_s"] = num_rows / cpu_seconds(lambda: scan_with_pyarrow(parquet))
        figures["pyarrow_columns_per_s"] = num_rows / cpu_seconds(lambda: scan_columns_with_pyarrow(parquet))
        table, read = table_of(create_reader(parquet).metadata(), True, ""), tasks(parquet)
        figures["decoded_records_per_s"] = num_rows / cpu_seconds(lambda: [decode(task, table) for task in read])
    figures["parquet_to_pyarrow_rows_ratio"] = figures["parquet_records_per_s"] / figures["pyarrow_rows_per_s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    figures = measure(20_000 if arguments.quick else 200_000)
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
        return
    for name, value in figures.items():
        print(f"{name:36} {value:14,.2f}")


if __name__ == "__main__":
    main()
