"""Create the `Reader` for a data source, and cut its shards to the size given by `--records_per_shard`.

Files are not read for this: the kind is the `reader_type` of `--data_reader_params`, or follows from the scheme of a
URL, the content of a directory, or the extensions of the files.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticdl.data.npz import npz_reader
from elasticdl.data.reader import Metadata, PartsReader, Reader
from elasticdl.data.recordio import RecordIOReader
from elasticdl.data.sample_files import check_same_classes, class_names, holds_images, image_reader, webdataset_reader
from elasticdl.data.sources import find_files, need, reading, shard_not_of_source
from elasticdl.data.sql import sql_reader
from elasticdl.data.table_encoder import Selection
from elasticdl.data.text import TextReader, TextRules
from elasticdl.data.tfrecord import TFRecordFile
from elasticdl.protocol import Shard
from elasticdl_client.data_sources import (
    DIRECTORIES,
    check_kind_of_storage,
    check_params,
    is_url,
    known_type,
    split_columns,
    split_sources,
    type_by_ending,
)
from elasticdl_client.errors import DataError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.partitions import Partitions, keys_of
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import is_remote

_log = logging.getLogger("elasticdl.data")
_DTYPES = ("int64", "float64", "string")


def create_reader(
    data_origin: str,
    reader_params: Mapping[str, object] | None = None,
    seed: int = 0,
    *,
    columns: Sequence[str] = (),
    label_column: str = "",
    records_per_shard: int = 0,
    is_exact: bool = False,
    is_raw: bool = False,
    find: Callable[[str], list[str]] | None = None,
) -> Reader:
    """Create the reader for a file, a directory, a glob pattern, a table, or several of them separated by commas.

    Args:
        data_origin: The value of `--training_data` or a similar flag.
        reader_params: The value of `--data_reader_params`: `reader_type`, and the parameters of that type (see
            `elasticdl_client.data_sources`).
        seed: Seed of the job, for the metadata.
        columns: The value of --columns; empty: all.
        label_column: The value of --label_column.
        records_per_shard: Maximum number of records per shard; 0: a shard is a whole file or table.
        is_exact: See `Selection`.
        is_raw: User code parses the rows of CSV files: leave them unchanged, without columns from partitions.
        find: Replaces `find_files`; called once per source.

    Raises:
        DataError: There are no such data, or a parameter is wrong.
    """
    params = dict(reader_params or {})
    given_type = params.pop("reader_type", None)
    wanted = None if given_type is None else known_type(given_type)
    sources = split_sources(data_origin) or [""]
    with reading(hide(data_origin)):
        find = functools.cache(find or find_files)  # list a directory only once
        kinds = {source: wanted or _kind(source, find) for source in sources}
    kind = kinds[sources[0]]
    other = next((source for source in sources if kinds[source] != kind), None)
    if other is not None:
        raise DataError(
            f"{hide(sources[0])} is read as {kind}, {hide(other)} as {kinds[other]}.",
            "All sources of a flag must be of one kind; reader_type=… in --data_reader_params names it.",
        )
    check_params(kind, params, data_origin)
    partition_dtypes = _partition_dtypes(params)
    dtypes = _column_dtypes(params, _DTYPES if kind == "CSV" else ("float64",))
    selection = replace(_selection(params, columns, label_column), is_exact=is_exact, dtypes=dtypes)
    with reading(hide(data_origin)):
        parts = _parts(sources, kind, find)
        why_none = _why_no_partitions(kind, params, is_raw)
        partitions = _partitions(sources, kind, find, partition_dtypes, why_none)
        reader = _create(_Wanted(data_origin, parts, params, selection, seed, partitions), kind)
    return SlicedReader(reader, records_per_shard) if records_per_shard else reader


def open_source(
    spec: JobSpec,
    origin: str,
    reader_params: Mapping[str, object] | None = None,
    is_exact: bool = False,
    is_raw: bool = False,
    find: Callable[[str], list[str]] | None = None,
) -> Reader:
    """Create the reader for one of a job's data sources, as its flags specify.

    Args:
        spec: The job's flags.
        origin: The data source.
        reader_params: Replace those of `--data_reader_params`.
        is_exact: See `Selection`.
        is_raw: See `create_reader`.
        find: See `create_reader`.

    Raises:
        DataError: See `create_reader`; or image folders for validation have other classes than those for training.
    """
    params = spec.data_reader_params_dict()
    if reader_params is not None:
        decided = {name: params[name] for name in ("partition_dtypes",) if name in params}  # set by the job's master
        params = decided | dict(reader_params)
    if origin == spec.validation_data and known_type(params.get("reader_type", "ImageFolder")) == "ImageFolder":
        with reading(hide(f"{spec.training_data}, {origin}")):
            sources = [*split_sources(spec.training_data), *split_sources(origin)]
            check_same_classes(list(filter(_has_classes, sources)))
    return create_reader(
        origin,
        params,
        spec.seed,
        columns=split_columns(spec.columns),
        label_column=spec.label_column,
        records_per_shard=spec.records_per_shard,
        is_exact=is_exact,
        is_raw=is_raw,
        find=find,
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    source: str  # the source as the user named it
    parts: list[str]
    params: Mapping[str, object]
    selection: Selection
    seed: int
    partitions: Partitions


def _kind(source: str, find: Callable[[str], list[str]]) -> str:
    if is_url(source):
        return "SQL"
    if not is_remote(source) and os.path.isdir(source):
        if _is_saved_dataset(source):
            return "HuggingFace"
        if _holds_images(source):
            return "ImageFolder"
    found = {type_by_ending([path]): path for path in reversed(find(source))}
    if len(found) > 1:
        listed = ", ".join(f"{os.path.basename(path)} ({kind})" for kind, path in sorted(found.items()))
        raise DataError(
            f"The files of {hide(source)} are of several kinds by their names: {listed}.",
            "Name some of them by a pattern, such as DIRECTORY/*.csv, or the kind of all: "
            "--data_reader_params=reader_type=CSV.",
        )
    return next(iter(found))


def _has_classes(source: str) -> bool:
    """Return whether a source is a directory with a directory of images per class."""
    return os.path.isdir(source) and _holds_images(source) and bool(class_names(source))


def _holds_images(directory: str) -> bool:
    try:
        return holds_images(directory)
    except OSError as error:
        raise DataError(f"The directory {error.filename or directory} cannot be listed: {error.strerror}.") from error


def _is_saved_dataset(directory: str) -> bool:
    """Return whether a directory was written by Hugging Face's `save_to_disk`."""
    return any(os.path.isfile(os.path.join(directory, name)) for name in ("state.json", "dataset_dict.json"))


def _parts(sources: Sequence[str], kind: str, find: Callable[[str], list[str]]) -> list[str]:
    """Return the names of all files, directories or tables, without duplicates."""
    found: list[str] = []
    for source in sources:
        if kind == "SQL":
            found.append(source)
        elif kind in DIRECTORIES:
            check_kind_of_storage(kind, source)
            if not os.path.isdir(source):
                raise DataError(f"The data source {source} is not a directory.", f"{kind} reads whole directories.")
            found.append(source)
        else:
            found += find(source)
    times = Counter(found)
    repeated = next((part for part in found if times[part] > 1), None) if len(sources) > 1 else None
    if repeated is not None:
        raise DataError(f"{hide(repeated)} is in two of the data sources.", "Name it once.")
    return found


def _why_no_partitions(kind: str, params: Mapping[str, object], is_raw: bool) -> str:
    """Return why partition columns (in names of directories) are not read; empty: they are read."""
    if kind in ("Parquet", "Arrow", "JSONL"):
        return ""
    if kind != "CSV":
        return f"{kind} files are read as they are"
    if not _header(params, True):
        return "CSV files without a header are read as they are"
    return "a feed or script of your own gets rows of CSV files as they are" if is_raw else ""


def _partitions(
    sources: Sequence[str],
    kind: str,
    find: Callable[[str], list[str]],
    dtypes: Mapping[str, str],
    why_none: str,
) -> Partitions:
    """Return the partition columns, in the names of directories; warn if they cannot be used."""
    if kind == "SQL" or kind in DIRECTORIES:
        return Partitions({})
    files = ((source, path) for source in sources for path in find(source))
    if not why_none:
        return Partitions.of(files, dtypes)
    keys = keys_of(files)
    if keys:
        _log.warning(
            "%s in the names of directories of %s %s no column: %s",
            ", ".join(keys),
            hide(", ".join(sources)),
            "is" if len(keys) == 1 else "are",
            why_none,
        )
    return Partitions({})


def _create(wanted: _Wanted, kind: str) -> Reader:
    match kind:
        case "RecordIO":
            return RecordIOReader(wanted.source, wanted.parts, wanted.seed)
        case "TFRecord":
            return PartsReader(wanted.source, wanted.parts, TFRecordFile, lambda: Metadata(seed=wanted.seed))
        case "CSV" | "Text":
            return _text_reader(wanted, kind == "CSV")
        case "Parquet" | "Arrow":
            need("pyarrow", f"{kind} files", "pyarrow")
            from elasticdl.data.arrow import table_reader

            partitions, selection = wanted.partitions, wanted.selection
            return table_reader(wanted.source, wanted.parts, partitions, selection, wanted.seed, kind == "Parquet")
        case "JSONL":
            need("pyarrow", "JSON Lines files", "pyarrow")
            from elasticdl.data.jsonl import jsonl_reader

            return jsonl_reader(wanted.source, wanted.parts, wanted.partitions, wanted.selection, wanted.seed)
        case "NumPy":
            return npz_reader(wanted.source, wanted.parts, wanted.selection, wanted.seed)
        case "ImageFolder":
            size = _image_size(wanted.params)
            return image_reader(wanted.source, wanted.parts, wanted.selection, size, wanted.seed)
        case "WebDataset":
            size = _image_size(wanted.params)
            return webdataset_reader(wanted.source, wanted.parts, wanted.selection, size, wanted.seed)
        case "HuggingFace":
            need("datasets", "Hugging Face data sets", "datasets")
            from elasticdl.data.arrow import huggingface_reader

            split = str(wanted.params.get("split", ""))
            return huggingface_reader(wanted.source, wanted.parts, wanted.selection, split, wanted.seed)
    return sql_reader(wanted.parts, str(wanted.params.get("key", "")), wanted.selection, wanted.seed)


def _text_reader(wanted: _Wanted, is_csv: bool) -> TextReader:
    params = wanted.params
    rules = TextRules(is_csv, _header(params, is_csv), _delimiter(params, wanted.parts) if is_csv else b",")
    return TextReader(wanted.source, wanted.parts, rules, wanted.partitions, wanted.selection, wanted.seed)


def _selection(params: dict[str, object], columns: Sequence[str], label_column: str) -> Selection:
    """Return the columns given by the flags, or else by --data_reader_params."""
    listed = params.pop("columns", ())
    names = split_columns(listed) if isinstance(listed, str) else listed
    label = params.pop("label_col", "")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DataError(f"The data reader's parameter columns is {listed!r}, not a list of names.", "Use --columns.")
    if not isinstance(label, str):
        raise DataError(f"The data reader's parameter label_col is {label!r}, not a name.", "Use --label_column.")
    return Selection(tuple(columns) or tuple(names), label_column or label)


def _header(params: Mapping[str, object], default: bool) -> bool:
    value = params.get("header", default)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    what = f"The data reader's parameter header is {value!r}, not true or false."
    raise DataError(what, "Write header=False where the first row of a file is a record.")


def _delimiter(params: Mapping[str, object], paths: Sequence[str]) -> bytes:
    by_ending = "\t" if all(path.lower().endswith(".tsv") for path in paths) else ","
    value = params.get("delimiter", by_ending)
    if isinstance(value, str) and len(value.encode()) == 1 and value not in '"\r\n':
        return value.encode()
    raise DataError(
        f"The data reader's parameter delimiter is {value!r}, not one ASCII character other than a quote.",
        r"""Write it in quotes: --data_reader_params='delimiter=";"'; a tab is "\t".""",
    )


def _column_dtypes(params: Mapping[str, object], known: Sequence[str]) -> dict[str, str]:
    value = params.get("column_dtypes", {})
    if isinstance(value, dict) and all(dtype in known for dtype in value.values()):
        return {str(name): str(dtype) for name, dtype in value.items()}
    raise DataError(
        f"The data reader's parameter column_dtypes is {value!r}.",
        f'Write column_dtypes={{"age": "float64"}}; a type is {", ".join(known)}.',
    )


def _partition_dtypes(params: dict[str, object]) -> dict[str, str]:
    value = params.pop("partition_dtypes", {})
    if isinstance(value, dict) and all(dtype in ("int64", "string") for dtype in value.values()):
        return {str(key): str(dtype) for key, dtype in value.items()}
    raise DataError(
        f"The data reader's parameter partition_dtypes is {value!r}.",
        'Write partition_dtypes={"dt": "string"}; a type is int64 or string.',
    )


def _image_size(params: Mapping[str, object]) -> tuple[int, ...]:
    """Return (height, width, channels), with 3 channels by default; empty if no size is given."""
    value = params.get("image_size", ())
    numbers = [value, value] if isinstance(value, int) else value
    if isinstance(numbers, list | tuple) and all(isinstance(number, int) and number > 0 for number in numbers):
        if len(numbers) == 2:
            return (*numbers, 3)
        if not numbers or (len(numbers) == 3 and numbers[2] in (1, 3)):
            return tuple(numbers)
    raise DataError(
        f"The data reader's parameter image_size is {value!r}.",
        "Write image_size=[height, width] or with 1 or 3 channels.",
    )


class SlicedReader:
    """Cuts shards: `name#0000`, `name#1000`, … are the part's name and the number of the first record.

    The numbers of a part have the same width, so that sorting by name keeps the order of records.
    """

    def __init__(self, reader: Reader, records_per_shard: int) -> None:
        self._reader = reader
        self._size = records_per_shard

    def shards(self) -> list[Shard]:
        found = []
        for shard in self._reader.shards():
            width = len(str(shard.end))
            for start in range(0, shard.end, self._size):
                name, length = f"{shard.name}#{start:0{width}}", min(self._size, shard.end - start)
                found.append(Shard(name, 0, length, shard.identity))
        return sorted(found)

    def read(self, shard: Shard) -> Sequence[bytes]:
        name, _, number = shard.name.rpartition("#")
        if not name or not number.isdigit() or not 0 <= shard.start <= shard.end <= self._size:
            raise shard_not_of_source(shard, name or shard.name)
        first = int(number)
        return self._reader.read(Shard(name, first + shard.start, first + shard.end, shard.identity))

    def metadata(self) -> Metadata:
        return self._reader.metadata()
