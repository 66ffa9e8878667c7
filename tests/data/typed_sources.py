"""Data sources of every typed kind, small, with what their readers must give; for the contract and the feeds."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
from PIL import Image

from elasticdl.data.example import encode_example
from elasticdl.data.tfrecord import framed


def rows(count: int, first: int = 0) -> list[dict[str, object]]:
    """Rows of one float, one whole number and one text; whole numbers and texts of all lengths."""
    return [
        {
            "f": float(np.float32(i / 7)),
            "n": (-1) ** i * (1 << (i % 62)) + i,
            "t": f"é{i}" * (i % 4),
        }
        for i in range(first, first + count)
    ]


def records(made: list[dict[str, object]]) -> list[bytes]:
    """Return a typed reader's records of rows: float features first."""
    return [encode_example(row) for row in made]  # type: ignore[arg-type]


def write_parquet(path: Path, made: list[dict[str, object]], rows_in_a_group: int = 100) -> None:
    pq.write_table(pa.Table.from_pylist(made), path, row_group_size=rows_in_a_group, write_page_checksum=True)


def write_arrow(path: Path, made: list[dict[str, object]], rows_in_a_batch: int = 100, compression: str = "") -> None:
    table = pa.Table.from_pylist(made)
    pyarrow.feather.write_feather(table, path, compression=compression or "lz4", chunksize=rows_in_a_batch)


def write_arrow_stream(path: Path, made: list[dict[str, object]], rows_in_a_batch: int = 100) -> None:
    table = pa.Table.from_pylist(made)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_in_a_batch)


def write_jsonl(path: Path, made: list[dict[str, object]]) -> None:
    """One object a line, without a line end behind the last."""
    path.write_text("\n".join(json.dumps(row) for row in made))


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> None:
    """A tar file as WebDataset's writers leave it: the files KEY.COLUMN of one sample after those of another."""
    with tarfile.open(path, "w") as archive:
        for key, files in samples.items():
            for column, content in files.items():
                member = tarfile.TarInfo(f"{key}.{column}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_npz(path: Path, made: list[dict[str, object]], compressed: bool = False) -> None:
    arrays = {name: np.array([row[name] for row in made]) for name in made[0]}
    (np.savez_compressed if compressed else np.savez)(path, **arrays)  # type: ignore[arg-type]


def write_tfrecord(path: Path, payloads: list[bytes]) -> None:
    with open(path, "wb") as file:
        file.writelines(framed(payload) for payload in payloads)


def write_sqlite(path: Path, made: list[dict[str, object]], key: str = "integer primary key") -> None:
    """A table `t`; keys have gaps, and rows are not written in their order."""
    with sqlite3.connect(path) as database:
        database.execute(f"create table t (id {key}, f real, n bigint, t text)")
        numbered = [(3 * i + 1, row["f"], row["n"], row["t"]) for i, row in enumerate(made)]
        database.executemany("insert into t values (?, ?, ?, ?)", numbered[::-1])
    database.close()


def write_images(root: Path, classes: dict[str, int], size: tuple[int, int] = (4, 4)) -> dict[str, bytes]:
    """PNG files of one colour a class; their bytes by path below the root."""
    written: dict[str, bytes] = {}
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            path = root / name / f"{i:03d}.png"
            Image.new("RGB", size, (40 * number, i % 256, 7)).save(path)
            written[f"{name}/{path.name}"] = path.read_bytes()
    return written
