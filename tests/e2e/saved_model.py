"""The content of a checkpoint of parameter servers, put together from its parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elasticdl.ps.part_file import PartReader

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SavedModel:
    """Flat dense vectors, and each table's rows by id, in order of id."""

    trainable: Floats
    non_trainable: Floats
    tables: dict[str, tuple[npt.NDArray[np.int64], Floats]]


def read_checkpoint(directory: Path) -> SavedModel:
    manifest = json.loads((directory / "MANIFEST.json").read_text())
    trainable, non_trainable = [], []
    ids: dict[str, list[npt.NDArray[np.int64]]] = {}
    rows: dict[str, list[Floats]] = {}
    for part in sorted(manifest["parts"], key=lambda part: part["ps_id"]):
        with PartReader(directory / part["file"]) as reader:
            for blocks, parts in ((reader.index.trainable, trainable), (reader.index.non_trainable, non_trainable)):
                parts.append(np.empty(sum(block.num_items for block in blocks), np.float32))
                reader.dense(blocks, 0, parts[-1])
            for table in reader.index.tables:
                for chunk in reader.chunks(table):
                    ids.setdefault(table.table.name, []).append(chunk.ids)
                    rows.setdefault(table.table.name, []).append(chunk.rows)
    tables = {}
    for name in ids:
        all_ids, all_rows = np.concatenate(ids[name]), np.concatenate(rows[name])
        order = np.argsort(all_ids)
        tables[name] = (all_ids[order], all_rows[order])
    return SavedModel(np.concatenate(trainable), np.concatenate(non_trainable), tables)


def assert_same_bits(one: SavedModel, other: SavedModel) -> None:
    np.testing.assert_array_equal(one.trainable, other.trainable)
    np.testing.assert_array_equal(one.non_trainable, other.non_trainable)
    assert one.tables.keys() == other.tables.keys()
    for name, (ids, rows) in one.tables.items():
        np.testing.assert_array_equal(ids, other.tables[name][0])
        np.testing.assert_array_equal(rows, other.tables[name][1])
