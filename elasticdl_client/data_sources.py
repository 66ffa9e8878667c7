"""The data sources that flags describe: names, kinds of readers and the parameters of each.  Reads no file."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from elasticdl_client.errors import DataError
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import is_remote, scheme_of

ROW = "elasticdl_row"  # the column by which a SQL statement numbers its rows
OF_MODULE = "dataset()"  # the return value of the module's function
MANIFEST = "SHA256SUMS"
DESCRIPTIONS = frozenset({MANIFEST, "dataset_info.json", "dataset_infos.json"})  # of data; the latter by Hugging Face
SQL_SCHEMES = ("sqlite", "postgresql", "postgres", "mysql", "mariadb")

READER_PARAMS: Mapping[str, frozenset[str]] = {
    "RecordIO": frozenset(),
    "CSV": frozenset({"header", "delimiter", "column_dtypes"}),
    "Text": frozenset({"header"}),
    "TFRecord": frozenset(),
    "Parquet": frozenset({"column_dtypes"}),
    "Arrow": frozenset({"column_dtypes"}),
    "JSONL": frozenset({"column_dtypes"}),
    "NumPy": frozenset(),
    "WebDataset": frozenset({"image_size"}),
    "ImageFolder": frozenset({"image_size"}),
    "HuggingFace": frozenset({"split", "column_dtypes"}),
    "SQL": frozenset({"key", "column_dtypes"}),
}
DIRECTORIES = ("ImageFolder", "HuggingFace")  # kinds of which a part is a directory
# As the original's --data_reader_params had them, and the types of columns in the names of directories.
_OF_ALL = frozenset({"columns", "label_col", "partition_dtypes"})

_ENDINGS = {
    "csv": "CSV",
    "tsv": "CSV",
    "txt": "Text",
    "parquet": "Parquet",
    "pq": "Parquet",
    "arrow": "Arrow",
    "feather": "Arrow",
    "jsonl": "JSONL",
    "ndjson": "JSONL",
    "json": "JSONL",  # as Spark and DuckDB call them
    "npz": "NumPy",
    "tar": "WebDataset",
    "tfrecord": "TFRecord",
    "tfrecords": "TFRecord",
}


def split_sources(origin: str) -> list[str]:
    """Return the sources of a list separated by commas; an existing path or pattern may hold commas."""
    if "," not in origin or os.path.exists(origin) or (glob.has_magic(origin) and glob.glob(origin, recursive=True)):
        return [origin]
    return [part.strip() for part in origin.split(",") if part.strip()]


def paths_matching(pattern: str) -> list[str]:
    """Return the paths that a pattern matches, sorted.

    Those with a hidden part are left out, such as the `_temporary` of a job that writes.
    """
    named = Path(pattern).parts
    paths = sorted(glob.glob(pattern, recursive=True))
    return [path for path in paths if not _has_hidden_part(Path(path).parts, named)]


def _has_hidden_part(parts: Sequence[str], named: Sequence[str]) -> bool:
    """Return whether a part of a path is hidden from its part of a pattern, or from all parts between two `**`."""
    if "**" not in named:
        return any(is_hidden(part, [pattern]) for part, pattern in zip(parts, named, strict=True))
    num_first, num_last = named.index("**"), named[::-1].index("**")
    between = named[num_first : len(named) - num_last]
    patterns = [
        *([name] for name in named[:num_first]),
        *[between] * (len(parts) - num_first - num_last),
        *([name] for name in named[len(named) - num_last :]),
    ]
    return any(map(is_hidden, parts, patterns))


def is_hidden(name: str, patterns: Iterable[str] = ()) -> bool:
    """Return whether a name begins with a dot or an underscore and was not requested by a pattern.

    Args:
        patterns: of names: `_*` and `[_]a` mean hidden ones, `*`, `[!a]*` and `[A-z]*` do not.
    """
    return name.startswith((".", "_")) and not any(
        name[0] in _first_letters(pattern) and fnmatch.fnmatchcase(name, pattern) for pattern in patterns
    )


def _first_letters(pattern: str) -> str:
    """Return the first letters that a pattern names one by one, not those of a range or all but some."""
    if not pattern.startswith("["):
        return pattern[:1]
    letters = pattern[1 : pattern.find("]", 2)]
    return "" if letters.startswith("!") else re.sub(".-.", "", letters)


def split_columns(text: str) -> tuple[str, ...]:
    """Return the names of `--columns`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def names_in_header(fields: Iterable[str], path: str) -> tuple[str, ...]:
    """Return the names of the columns of a CSV file; one without a name, as of row numbers, is called as in pandas.

    Raises:
        DataError: two columns have one name.
    """
    names = tuple(field.strip() or f"Unnamed: {number}" for number, field in enumerate(fields))
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise DataError(
            f"The header of {path} names {times} columns {name}.",
            "Rename all but one; a file without a header needs --data_reader_params=header=False.",
        )
    return names


def is_url(source: str) -> bool:
    """Return whether a source is a database.

    Raises:
        DataError: it is a URL of a kind that is neither a database nor storage.
    """
    scheme, mark, _ = source.partition("://")
    if not mark or is_remote(source):
        return False
    if scheme.partition("+")[0] not in SQL_SCHEMES:
        raise DataError(
            f"{scheme}:// is not a data source.",
            "Name files or directories, also of storage (s3://BUCKET/DIRECTORY, https://HOST/FILE), or a table: "
            "sqlite:///PATH?table=NAME, postgresql://USER@HOST/DB?table=NAME, mysql://USER@HOST/DB?table=NAME.",
        )
    return True


def is_table(place: str) -> bool:
    """Return whether a name of data or of outputs is the URL of a database."""
    scheme, mark, _ = place.partition("://")
    return bool(mark) and scheme.lower().partition("+")[0] in SQL_SCHEMES


def type_by_ending(paths: Iterable[str]) -> str:
    """Return the kind of reader for files of these names."""
    kinds = {_type_of(os.path.basename(_without_query(path)).lower()) for path in paths}
    return kinds.pop() if len(kinds) == 1 else "RecordIO"


def _without_query(path: str) -> str:
    return path.partition("?")[0] if scheme_of(path) in ("http", "https") else path


def _type_of(name: str) -> str:
    if ".tfrecord" in name:  # data.tfrecord-00000-of-00010, too
        return "TFRecord"
    return _ENDINGS.get(name.rpartition(".")[2], "RecordIO") if "." in name else "RecordIO"


def known_type(reader_type: object) -> str:
    """Return the kind that `reader_type` of `--data_reader_params` names.

    Raises:
        DataError: there is none of that name.
    """
    for known in READER_PARAMS:
        if str(reader_type).lower() == known.lower():
            return known
    raise DataError(
        f"The reader type {reader_type} is not supported.",
        f"reader_type may be {', '.join(READER_PARAMS)}; for other data define custom_data_reader in your module.",
    )


def check_kind_of_storage(reader_type: str, source: str) -> None:
    """Check that a kind of reader can read a source.

    Raises:
        DataError: it reads mounted directories alone.
    """
    if reader_type in DIRECTORIES and is_remote(source):
        raise DataError(
            f"{reader_type} reads mounted directories alone, not {source}.",
            "Write the data as Parquet, Arrow or WebDataset files, or mount the bucket.",
        )


def check_params(reader_type: str, params: Iterable[str], where: str) -> None:
    """Check the names of `--data_reader_params`, `reader_type` excepted.

    Raises:
        DataError: one that this kind of reader does not know.
    """
    known = READER_PARAMS[reader_type] | _OF_ALL
    unknown = sorted(set(params) - known)
    if unknown:
        raise DataError(
            f"The {reader_type} reader of {hide(where)} does not know the parameter {unknown[0]}.",
            f"--data_reader_params may have: {', '.join(['reader_type', *sorted(known)])}.",
        )
