"""Adapt the result of the user's `custom_data_reader` to the port `Reader`, and check what it returns.

Two forms are accepted: the methods of the port (`shards`, `read`, `metadata`), and the original's `create_shards()`,
`read_records(task)` and property `metadata`.  This module runs user code, so only workers use it; an exception of the
user's code is raised unchanged.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import cast

from elasticdl.data.reader import Metadata, Reader
from elasticdl.data.sources import no_records, shard_not_of_source
from elasticdl.data.table_encoder import Selection
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError, ModelDefinitionError

_HINT = (
    "It must return an object with shards(), read(shard) and metadata() as in elasticdl.data.reader.Reader, or with "
    "create_shards() and read_records(task)."
)
_ALL_COLUMNS = Selection()


def adapt_reader(
    custom_data_reader: Callable[..., object],
    data_origin: str,
    records_per_task: int | None = None,
    reader_params: Mapping[str, object] | None = None,
    seed: int = 0,
    selection: Selection = _ALL_COLUMNS,
) -> Reader:
    """Call the user's ``custom_data_reader(data_origin, records_per_task=…, **reader_params)``, and adapt the result.

    Args:
        custom_data_reader: The user's function; its argument ``records_per_task`` is optional.
        data_origin: The value of `--training_data` or a similar flag.
        records_per_task: Minibatch size times minibatches per task.
        reader_params: The value of `--data_reader_params`.
        seed: Seed of the job, for the metadata.
        selection: Selected columns, for the metadata; the label is added if the reader has a column of that name.

    Raises:
        ModelDefinitionError: The function does not accept these arguments, or its result is not a reader.
    """
    arguments: dict[str, object] = dict(reader_params or {})
    signature = inspect.signature(custom_data_reader)
    parameters = signature.parameters.values()
    if "records_per_task" in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments.setdefault("records_per_task", records_per_task)
    try:
        signature.bind(data_origin, **arguments)
    except TypeError as error:
        raise ModelDefinitionError(
            f"custom_data_reader{signature} cannot be called with {', '.join(['data_origin', *arguments])}: {error}.",
            "Its signature should be custom_data_reader(data_origin, records_per_task=None, **kwargs).",
        ) from error
    reader = custom_data_reader(data_origin, **arguments)
    if _has(reader, "shards", "read", "metadata"):
        return _CheckedReader(cast(Reader, reader), data_origin, seed, selection)
    if _has(reader, "create_shards", "read_records"):
        return _CheckedReader(_OriginalReader(reader), data_origin, seed, selection)
    raise ModelDefinitionError(f"custom_data_reader returned a {type(reader).__name__}, which is not a reader.", _HINT)


def _has(reader: object, *verbs: str) -> bool:
    return all(callable(getattr(reader, verb, None)) for verb in verbs)


@dataclass(frozen=True, slots=True)
class CustomTask:
    """The task passed to the original's `read_records`.

    Attributes:
        shard: The records to read, with `name`, `start` and `end`, as in the original's newest version.
        shard_name: Name of the shard, for older versions, like `start` and `end`.
    """

    shard: Shard
    shard_name: str = field(init=False)
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard_name", self.shard.name)
        object.__setattr__(self, "start", self.shard.start)
        object.__setattr__(self, "end", self.shard.end)


class _OriginalReader:
    """Adapts a reader of the original's form to the port.

    The original's shards are slices, often several with one name.  Contiguous slices are merged to one shard; a shard
    that does not begin at 0 gets the name ``name@start``.
    """

    def __init__(self, reader: object) -> None:
        self._reader = reader
        self._places: dict[str, tuple[str, int]] = {}

    def shards(self) -> list[Shard]:
        create_shards = cast(Callable[[], object], self._reader.create_shards)  # type: ignore[attr-defined]
        shards = []
        for name, start, end in _merge(_slices(create_shards())):
            alias = name if start == 0 else f"{name}@{start}"
            self._places[alias] = (name, start)
            shards.append(Shard(alias, 0, end - start))
        return shards

    def read(self, shard: Shard) -> Sequence[bytes]:
        if not self._places:
            self.shards()
        name, offset = self._places.get(shard.name, (shard.name, 0))
        task = CustomTask(Shard(name, offset + shard.start, offset + shard.end))
        read_records = cast(Callable[[CustomTask], Iterable[object]], self._reader.read_records)  # type: ignore[attr-defined]
        # Take one more record than requested, to detect a reader that does not stop.
        return cast(Sequence[bytes], list(islice(read_records(task), len(shard) + 1)))

    def metadata(self) -> Metadata:
        metadata: object = getattr(self._reader, "metadata", None)
        if callable(metadata):
            metadata = metadata()
        if metadata is None:
            return Metadata()
        if isinstance(metadata, Metadata):
            return metadata
        names = getattr(metadata, "column_names", None) or ()
        dtypes = getattr(metadata, "column_dtypes", None) or {}
        pairs = dtypes.items() if isinstance(dtypes, Mapping) else dtypes
        return Metadata(tuple(map(str, names)), tuple((str(name), _type_name(dtype)) for name, dtype in pairs))


def _slices(created: object) -> list[tuple[str, int, int]]:
    """Return (name, start, end) for each result of `create_shards`: tuples (name, start, count), or a dict by name."""
    if isinstance(created, Mapping):
        created = [(name, *places) for name, places in created.items()]
    slices: list[tuple[str, int, int]] = []
    for created_shard in cast(Iterable[Sequence[object]], created):
        try:
            name, start, count = created_shard
            begin, length = int(cast(int, start)), int(cast(int, count))
        except (TypeError, ValueError) as error:
            raise ModelDefinitionError(
                f"create_shards() of the custom data reader returned {created_shard!r} as a shard.",
                "Each must be (name, start, number of records).",
            ) from error
        slices.append((str(name), begin, begin + length))
    return slices


def _merge(slices: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Merge contiguous slices of the same name; drop empty ones."""
    merged: list[tuple[str, int, int]] = []
    for name, start, end in sorted(piece for piece in slices if piece[2] > piece[1]):
        if merged and merged[-1][0] == name and start < merged[-1][2]:
            raise ModelDefinitionError(f"Two shards of the custom data reader overlap in {name} at record {start}.")
        if merged and merged[-1][0] == name and start == merged[-1][2]:
            merged[-1] = (name, merged[-1][1], end)
        else:
            merged.append((name, start, end))
    return merged


def _type_name(dtype: object) -> str:
    """Return "int64", "float64" or "string" for the name of a type, or for a NumPy or TensorFlow dtype."""
    name = str(getattr(dtype, "name", dtype)).lower()
    known = {"bigint": "int64", "int": "int64", "double": "float64", "float": "float64", "str": "string"}
    return known.get(name, name)


class _CheckedReader:
    """Checks a user's reader against the contract of the port; errors name the violation."""

    def __init__(self, reader: Reader, source: str, seed: int, selection: Selection) -> None:
        self._reader = reader
        self._source = source
        self._seed = seed
        self._selection = selection
        self._known: list[Shard] = []

    def shards(self) -> list[Shard]:
        if not self._known:
            self._known = self._checked_shards()
        return list(self._known)

    def _checked_shards(self) -> list[Shard]:
        shards = sorted(self._reader.shards())
        times = Counter(shard.name for shard in shards)
        for shard in shards:
            if shard.start != 0 or times[shard.name] > 1:
                raise ModelDefinitionError(
                    f"shards() of the custom data reader returned {shard}.",
                    "Each shard must start at 0 and have a name of its own.",
                )
        shards = [shard for shard in shards if len(shard) > 0]
        if not shards:
            raise no_records(self._source)
        return shards

    def read(self, shard: Shard) -> Sequence[bytes]:
        if not any(known.name == shard.name and 0 <= shard.start <= shard.end <= known.end for known in self.shards()):
            raise shard_not_of_source(shard, self._source)
        records = [_to_bytes(record, shard) for record in self._reader.read(shard)]
        if len(records) != len(shard):
            count = f"more than {len(shard)}" if len(records) > len(shard) else f"only {len(records)}"
            raise DataError(
                f"The custom data reader gave {count} records for {shard.name} {shard.start} to {shard.end}.",
                "It must give exactly the records of the range, also when asked again.",
            )
        return records

    def metadata(self) -> Metadata:
        """See `Reader.metadata`.

        Raises:
            DataError: --columns contains a column that the reader does not have.
        """
        metadata = self._reader.metadata()
        named = self._selection.label if self._selection.label in metadata.column_names else ""
        label = metadata.label_column or named
        selection = replace(self._selection, label=label)
        selection.of(metadata.column_names, "The custom data reader")
        return replace(
            metadata,
            seed=metadata.seed or self._seed,
            label_column=label,
            features=selection.features or metadata.features,
        )


def _to_bytes(record: object, shard: Shard) -> bytes:
    if isinstance(record, bytes):
        return record
    if isinstance(record, str):
        return record.encode()
    if isinstance(record, (bytearray, memoryview)):
        return bytes(record)
    raise DataError(
        f"The custom data reader gave a {type(record).__name__} as a record of {shard.name}.",
        "A record must be bytes or str; serialize it (for example as tf.train.Example) and parse it in feed.",
    )
