"""One PS's part of a checkpoint: a file of our own format, described in docs/checkpoint.md.

A part is written under a temporary name, synced, and renamed; whatever interrupts that leaves no part.  This module
owns the file; the manifest that makes parts a checkpoint is written by the master, and only read here.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Table
from elasticdl.ps.model import ModelSnapshot
from elasticdl.ps.parameters import DenseSnapshot, TableSnapshot
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import CheckpointError

Array = npt.NDArray[Any]

FORMAT = 1
MANIFEST = "MANIFEST.json"
_PREFIX = struct.Struct("<8sII")  # magic, size and crc32 of the header
_MAGIC = b"ELDLPS01"
_DTYPES = ("<f4", "<i8", "<i4")
_HINT = "take another checkpoint, or train again from the beginning"


@dataclass(frozen=True, slots=True)
class Part:
    """What one PS puts into a checkpoint: its part of the model, and the names that are in it."""

    ps_id: int
    num_ps: int
    incarnation: int
    model: ModelSnapshot
    applied: pb.AppliedSet = field(default_factory=pb.AppliedSet)


@dataclass(frozen=True, slots=True)
class PartFile:
    """A part on disk, as the manifest names it."""

    file: str
    size_bytes: int
    crc32: int


def file_name(ps_id: int, num_ps: int) -> str:
    """The name of a part within its directory."""
    return f"variables-{ps_id}-of-{num_ps}.ckpt"


def write_part(directory: Path, part: Part) -> PartFile:
    """Writes a part into an existing directory.

    Raises:
        CheckpointError: it cannot be written; no file of ours is left.
    """
    name = file_name(part.ps_id, part.num_ps)
    temporary = directory / f".{name}.{part.incarnation}.tmp"
    try:
        with open(temporary, "wb") as file:
            size_bytes, checksum = _write(file, part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / name)
        _sync_directory(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(
            f"the checkpoint {directory / name} cannot be written: {error.strerror}",
            "free or enlarge the volume of --checkpoint_dir and see that the job may write to it",
        ) from error
    return PartFile(name, size_bytes, checksum)


def read_part(path: Path, expected: PartFile | None = None) -> Part:
    """Reads a part, and the whole of it.

    Args:
        path: the file.
        expected: its size and checksum as the manifest says; None: only its own checksums are compared.

    Raises:
        CheckpointError: missing, truncated, damaged, or of another version; names the file.
    """
    try:
        with open(path, "rb") as file:
            return _read(file, path, expected)
    except OSError as error:
        raise CheckpointError(f"the checkpoint part {path} cannot be read: {error.strerror}", _HINT) from error
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"the checkpoint part {path} is damaged: {error}", _HINT) from error


def restore_part(directory: Path, ps_id: int, num_ps: int) -> Part:
    """The part of a PS in a committed checkpoint.

    Raises:
        CheckpointError: the checkpoint is not whole, or was written by another number of PS.
    """
    manifest = _read_manifest(directory / MANIFEST)
    try:
        parts = {part["ps_id"]: part for part in manifest["parts"]}
        if len(parts) != num_ps:
            raise CheckpointError(
                f"the checkpoint {directory} was written by {len(parts)} parameter servers, this job has {num_ps}",
                f"set --num_ps_pods={len(parts)}",
            )
        described = parts[ps_id]
        expected = PartFile(described["file"], described["size_bytes"], described["index_crc32c"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is damaged: {error!r}", _HINT) from error
    part = read_part(directory / expected.file, expected)
    if (part.ps_id, part.num_ps) != (ps_id, num_ps):
        raise CheckpointError(
            f"{directory / expected.file} holds the part {part.ps_id} of {part.num_ps}, not {ps_id} of {num_ps}", _HINT
        )
    return part


def _read_manifest(path: Path) -> Mapping[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", _HINT) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}", _HINT) from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} is damaged: not an object", _HINT)
    return manifest


def _write(file: BinaryIO, part: Part) -> tuple[int, int]:
    """Size and checksum of all that was written."""
    arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(part)}
    header = _header(part) | {
        "arrays": [
            {"name": name, "dtype": array.dtype.str, "shape": array.shape, "crc32": zlib.crc32(_bytes(array))}
            for name, array in arrays.items()
        ]
    }
    text = json.dumps(header).encode()
    start = _PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)) + text
    file.write(start)
    size_bytes, checksum = len(start), zlib.crc32(start)
    for array in arrays.values():
        file.write(_bytes(array))
        size_bytes += array.nbytes
        checksum = zlib.crc32(_bytes(array), checksum)
    return size_bytes, checksum


def _header(part: Part) -> dict[str, Any]:
    model = part.model
    return {
        "format": FORMAT,
        "ps_id": part.ps_id,
        "num_ps": part.num_ps,
        "incarnation": part.incarnation,
        "version": model.version,
        "num_applies": part.applied.num_applies,
        "optimizer": model.optimizer,
        "seed": model.seed,
        "tables": [
            {"name": t.name, "dim": t.dim, "initializer": t.initializer, "input_dim": t.input_dim} for t in model.tables
        ],
    }


def _arrays(part: Part) -> Iterator[tuple[str, Array]]:
    tasks = part.applied.tasks
    yield (
        "applied",
        np.array([(t.epoch, t.task, t.watermark, len(t.extras)) for t in tasks], np.int32).reshape(-1, 4),
    )
    yield "applied/extras", np.array([n for t in tasks for n in t.extras], np.int32)
    model = part.model
    yield "trainable", model.dense.values
    for slot, array in model.dense.slots.items():
        yield f"trainable/{slot}", array
    yield "non_trainable", model.non_trainable
    for number, table in enumerate(model.tables):
        snapshot = model.table_snapshots[table.name]
        yield f"table-{number}/ids", snapshot.ids
        yield f"table-{number}/rows", snapshot.rows
        for slot, array in snapshot.slots.items():
            yield f"table-{number}/rows/{slot}", array


def _read(file: BinaryIO, path: Path, expected: PartFile | None) -> Part:
    size_bytes = os.fstat(file.fileno()).st_size
    if expected is not None and size_bytes != expected.size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, the manifest says {expected.size_bytes}")
    prefix = file.read(_PREFIX.size)
    magic, header_size, header_checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ValueError("it does not begin like one")
    text = file.read(header_size) if header_size <= size_bytes else b""
    if len(text) != header_size or zlib.crc32(text) != header_checksum:
        raise ValueError("the checksum of its header does not match")
    header = json.loads(text)
    if header["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {header['format']}; this version reads {FORMAT}", _HINT)
    checksum = zlib.crc32(text, zlib.crc32(prefix))
    arrays = {}
    for described in header["arrays"]:
        array = _read_array(file, described, size_bytes)
        checksum = zlib.crc32(_bytes(array), checksum)
        arrays[described["name"]] = array
    if file.read(1):
        raise ValueError("it is longer than its header says")
    if expected is not None and checksum != expected.crc32:
        raise ValueError("its checksum is not the one in the manifest")
    return _part(header, arrays)


def _read_array(file: BinaryIO, described: Mapping[str, Any], limit: int) -> Array:
    if described["dtype"] not in _DTYPES:
        raise ValueError(f"array {described['name']} has the type {described['dtype']}")
    array: Array = np.empty(0, described["dtype"])
    count = int(np.prod(described["shape"], dtype=np.int64))
    if count * array.itemsize <= limit:
        array = np.fromfile(file, array.dtype, count)
    if len(array) != count:
        raise ValueError(f"it ends within the array {described['name']}")
    if zlib.crc32(_bytes(array)) != described["index_crc32c"]:
        raise ValueError(f"the checksum of the array {described['name']} does not match")
    return array.reshape(described["shape"])


def _part(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> Part:
    tables = tuple(Table(**table) for table in header["tables"])
    snapshots = {
        table.name: TableSnapshot(
            arrays[f"table-{number}/ids"], arrays[f"table-{number}/rows"], _slots(arrays, f"table-{number}/rows/")
        )
        for number, table in enumerate(tables)
    }
    model = ModelSnapshot(
        header["optimizer"],
        header["seed"],
        header["version"],
        DenseSnapshot(arrays["trainable"], _slots(arrays, "trainable/")),
        arrays["non_trainable"],
        tables,
        snapshots,
    )
    applied = pb.AppliedSet(num_applies=header["num_applies"])
    extras = iter(arrays["applied/extras"].tolist())
    for epoch, task, watermark, num_extras in arrays["applied"].tolist():
        of_task = [next(extras) for _ in range(num_extras)]
        applied.tasks.add(epoch=epoch, task=task, watermark=watermark, extras=of_task)
    return Part(header["ps_id"], header["num_ps"], header["incarnation"], model, applied)


def _slots(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
