"""Chooses the `Reader` for a data source.

Never looks into a file: the kind is the `reader_type` of `--data_reader_params`, else it follows from the ending of the
files' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elasticdl.data.reader import Reader
from elasticdl.data.recordio import RecordIOReader
from elasticdl.data.sources import find_files
from elasticdl.data.text import TextReader
from elasticdl.data.text_rows import TextRules
from elasticdl_client.errors import DataError

_PARAMS = {"CSV": {"header", "delimiter"}, "Text": {"header"}, "RecordIO": set[str]()}


def create_reader(data_origin: str, reader_params: Mapping[str, object] | None = None, seed: int = 0) -> Reader:
    """The reader for a file, a directory or a glob pattern.

    Args:
        data_origin: of `--training_data` and the like.
        reader_params: of `--data_reader_params`: `reader_type` (RecordIO, CSV, Text), for text also `header` (whether
            the first row names the columns; true for CSV) and for CSV `delimiter`.
        seed: of the job; goes into the metadata.

    Raises:
        DataError: if there is no such data, or a parameter is wrong.
    """
    params = dict(reader_params or {})
    paths = find_files(data_origin)
    given_type = params.pop("reader_type", None)
    reader_type = _by_ending(paths) if given_type is None else _known_type(given_type)
    unknown = sorted(set(params) - _PARAMS[reader_type])
    if unknown:
        known = ", ".join(["reader_type", *sorted(_PARAMS[reader_type])])
        raise DataError(
            f"The {reader_type} reader of {data_origin} does not know the parameter {unknown[0]}.",
            f"--data_reader_params may have: {known}.",
        )
    if reader_type == "RecordIO":
        return RecordIOReader(data_origin, paths, seed)
    is_csv = reader_type == "CSV"
    delimiter = _delimiter(params, paths) if is_csv else b","
    return TextReader(data_origin, paths, TextRules(is_csv, delimiter), _header(params, is_csv), seed)


def _by_ending(paths: Sequence[str]) -> str:
    endings = {path.rpartition(".")[2].lower() for path in paths}
    if endings <= {"csv", "tsv"}:
        return "CSV"
    return "Text" if endings == {"txt"} else "RecordIO"


def _known_type(reader_type: object) -> str:
    for known in _PARAMS:
        if str(reader_type).lower() == known.lower():
            return known
    raise DataError(
        f"The reader type {reader_type} is not supported.",
        f"reader_type may be {', '.join(_PARAMS)}; for other data define custom_data_reader in your module.",
    )


def _header(params: Mapping[str, object], default: bool) -> bool:
    value = params.get("header", default)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise DataError(f"The data reader's parameter header is {value!r}, not true or false.")


def _delimiter(params: Mapping[str, object], paths: Sequence[str]) -> bytes:
    by_ending = "\t" if all(path.lower().endswith(".tsv") for path in paths) else ","
    value = params.get("delimiter", by_ending)
    if isinstance(value, str) and len(value.encode()) == 1 and value not in '"\r\n':
        return value.encode()
    raise DataError(f"The data reader's parameter delimiter is {value!r}, not one ASCII character other than a quote.")
