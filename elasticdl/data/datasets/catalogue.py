"""The available data sets by name, and `write_split`, which writes their splits to files.

The files are RecordIO files `<output>/<split>/data-00000`, …, and their `SHA256SUMS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain, islice

from elasticdl.data.datasets import Split
from elasticdl.data.datasets.imagenet import imagenet
from elasticdl.data.datasets.images import cifar10, digits, mnist
from elasticdl.data.datasets.tables import ClickLog, census, criteo, frappe, iris
from elasticdl.data.recordio import Compressor, RecordIOWriter
from elasticdl.data.sources import write_manifest
from elasticdl_client.errors import DataError

NAMES = ("digits", "mnist", "cifar10", "imagenet", "frappe", "census", "criteo", "iris", "clicks")


def open_dataset(name: str, source: str = "", click_log: ClickLog | None = None) -> list[Split]:
    """Return the splits of a data set.

    Args:
        name: One of `NAMES`.
        source: Directory of the original files; not needed for digits and clicks; if it is empty, cifar10, imagenet and
            criteo are generated.
        click_log: The click log to generate, for clicks.

    Raises:
        DataError: The name is unknown, or the source is missing or invalid.
    """
    if name == "digits":
        return digits()
    if name == "clicks":
        return (click_log or ClickLog(num_records=100_000)).splits()
    generated: dict[str, Callable[[str], list[Split]]] = {"cifar10": cifar10, "imagenet": imagenet, "criteo": criteo}
    if name in generated and not source:
        return generated[name]("")
    from_files: dict[str, Callable[[str], list[Split]]] = {
        **generated,
        "mnist": mnist,
        "frappe": frappe,
        "census": census,
        "iris": iris,
    }
    if name not in from_files:
        raise DataError(f"There is no data set {name}.", f"Known are {', '.join(NAMES)}.")
    if not source:
        raise DataError(f"The data set {name} is made from files.", "Name the directory that holds them with --source.")
    if not os.path.isdir(source):
        raise DataError(f"The source directory {source} does not exist.", "Check --source.")
    return from_files[name](source)


_BLOCK_SIZE = 4096


def write_split(
    split: Split,
    output: str,
    records_per_shard: int,
    compressor: Compressor = Compressor.NONE,
    on_progress: Callable[[int, int], None] = lambda num_records, num_files: None,
) -> list[str]:
    """Write one split.

    Args:
        split: The split; its records are consumed.
        output: Directory in which a directory for the split is made.
        records_per_shard: Records in each file, except the last one.
        compressor: Compression of the files.
        on_progress: Called repeatedly, and at the end, with the numbers of records and files written so far.

    Returns:
        The paths of the files.

    Raises:
        DataError: The split's directory is not empty, or cannot be written.
    """
    directory = os.path.join(output, split.name)
    _make_empty(directory)
    records = chain.from_iterable(split.blocks)
    paths: list[str] = []
    written = 0
    while written < split.num_records:
        path = os.path.join(directory, f"data-{len(paths):05d}")
        wanted = min(records_per_shard, split.num_records - written)
        with RecordIOWriter(path, compressor) as writer:
            while writer.num_records < wanted:
                _write_block(writer, records, min(_BLOCK_SIZE, wanted - writer.num_records), split)
                if writer.num_records < wanted:
                    on_progress(written + writer.num_records, len(paths))
        written += wanted
        paths.append(path)
        on_progress(written, len(paths))
    try:
        write_manifest(directory, paths)
    except OSError as error:
        raise DataError(f"The checksums of {directory} cannot be written: {error.strerror}.") from error
    return paths


def _write_block(writer: RecordIOWriter, records: Iterator[bytes], size: int, split: Split) -> None:
    before = writer.num_records
    writer.write_all(islice(records, size))
    if writer.num_records - before < size:
        raise DataError(f"The {split.name} split has fewer than the {split.num_records} records it should have.")


def _make_empty(directory: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        there = os.listdir(directory)
    except OSError as error:
        raise DataError(f"The directory {directory} cannot be made: {error.strerror}.") from error
    if there:
        raise DataError(
            f"The directory {directory} is not empty: it holds {len(there)} files, {sorted(there)[0]} the first.",
            "Name another --output or remove it; shards of two runs must not mix.",
        )
