"""Hugging Face data sets as `save_to_disk` leaves them, read by record number through the package `datasets`."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from elasticdl.data.checksums import check_directory
from elasticdl.data.columns import ColumnType, Selection, check_same, describe
from elasticdl.data.reader import Metadata, PartsReader
from elasticdl.data.sources import need
from elasticdl_client.errors import DataError


def is_saved_dataset(directory: str) -> bool:
    """Whether `save_to_disk` has written a directory."""
    return any(os.path.isfile(os.path.join(directory, name)) for name in ("state.json", "dataset_dict.json"))


class SavedDataset:
    """The rows of one data set."""

    def __init__(self, path: str, split: str, selection: Selection) -> None:
        """
        Raises:
            DataError: it cannot be read, or has several splits and none was named.
        """
        datasets = need("datasets", "Hugging Face data sets", "datasets")
        from elasticdl.data import arrow

        self._encode = arrow.encode
        self._path = path
        try:
            found = datasets.load_from_disk(path)
        except Exception as error:  # any error of that package: the data cannot be read
            raise DataError(
                f"The Hugging Face data set {path}, byte 0: {str(error).splitlines()[0] if str(error) else error!r}.",
                "Write it again with Dataset.save_to_disk.",
            ) from error
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                named = f"no split {split}" if split else "several splits"
                raise DataError(
                    f"The data set {path} has {named}.",
                    f"Name one: --data_reader_params='split={next(iter(found))}'; it has {', '.join(found)}.",
                )
            found = found[split]
        flat = arrow.flat_schema(found.data.schema)
        wanted = selection.of(flat.names, path)
        self.types = {name: arrow.column_type(flat.field(name), path) for name in wanted}
        self._rows: Any = found.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, end: int) -> list[bytes]:
        from elasticdl.data.arrow import flat_table

        table = self._rows[start:end]
        table.validate(full=True)
        return self._encode(flat_table(table).select(list(self.types)), self._path)


def huggingface_reader(source: str, paths: Sequence[str], selection: Selection, split: str, seed: int) -> PartsReader:
    """The `Reader` over Hugging Face data sets on disk."""

    first = min(paths)

    @functools.cache
    def types_of_first() -> dict[str, ColumnType]:
        return SavedDataset(first, split, selection).types

    def open_set(path: str) -> SavedDataset:
        found = SavedDataset(path, split, selection)
        check_same(found.types, path, types_of_first(), first)
        return found

    def metadata() -> Metadata:
        return describe(types_of_first(), selection, seed)

    return PartsReader(source, paths, open_set, metadata, check_directory)
