"""Read NumPy archives (`.npz`) by record number: record i contains the i-th row of every array.

Uncompressed arrays (`numpy.savez`) are mapped into memory.  Compressed arrays are decompressed once, to files in a
hidden directory next to the archive, or to memory if that directory cannot be written.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.files import DataFile, open_file
from elasticdl.data.reader import PartsReader
from elasticdl.data.sources import check_file
from elasticdl.data.table_encoder import (
    ColumnType,
    Numbers,
    Selection,
    TableColumn,
    TextLists,
    Texts,
    check_same,
    describe,
    encode_table,
)
from elasticdl_client.errors import DataError, StorageError
from elasticdl_client.storage_kinds import is_remote

_FOLDER = ".elasticdl"
_HINT = "The file was cut off or changed after it was written, or is no archive of NumPy: write it again or remove it."
_DTYPES = {"f": "float64", "i": "int64", "u": "int64", "b": "int64", "S": "string", "U": "string"}
_PIECE_BYTES = 1 << 20


class NpzFile:
    """The rows of one archive."""

    def __init__(self, path: str, selection: Selection) -> None:
        self._path = path
        self._is_exact = selection.is_exact
        with _members(path, selection) as (archive, members):
            self._arrays = {name: self._open(archive, info) for name, info in members.items()}
        self.types = {name: self._type(name, array) for name, array in self._arrays.items()}
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(
                f"The arrays of {path} differ in their first dimension, which counts records: {listed}.",
                "Name those to read with --columns.",
            )
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, end: int) -> list[bytes]:
        columns = {name: self._column(name, np.asarray(array[start:end])) for name, array in self._arrays.items()}
        return encode_table(columns, end - start, self._is_exact)

    def _open(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any] | _RowsOfStorage:
        with _member(self._path, info):
            if info.compress_type == zipfile.ZIP_STORED:
                archive.open(info).close()  # compares both headers of the member
                return self._mapped(info)
            return self._decompressed(archive, info)

    def _mapped(self, info: zipfile.ZipInfo) -> NDArray[Any] | _RowsOfStorage:
        source = open_file(self._path)
        with contextlib.closing(source), source.scan() as file:
            file.seek(info.header_offset + 26)  # in the local header: lengths of the name and the extra field
            name_size, extra_size = struct.unpack("<HH", file.read(4))
            file.seek(info.header_offset + 30 + name_size + extra_size)
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, is_fortran, dtype = read_header(file)
            offset = file.tell()
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        if not shape or 0 in shape:
            return np.zeros(shape or (0,), dtype)
        if not source.is_local:
            return _RowsOfStorage(source, dtype, offset, shape, is_fortran)
        order: Any = "F" if is_fortran else "C"
        return np.memmap(self._path, dtype, "r", offset, shape, order)

    def _decompressed(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
        if is_remote(self._path):
            with archive.open(info) as member:
                return _whole(member)
        target = _decompressed_copy(self._path, info)
        if not target.exists():
            try:
                target.parent.mkdir(exist_ok=True)
                descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
            except OSError:
                with archive.open(info) as member:
                    return _whole(member)
            try:
                with os.fdopen(descriptor, "wb") as file, archive.open(info) as member:
                    while piece := member.read(_PIECE_BYTES):
                        file.write(piece)
                os.chmod(temporary, 0o644)
                os.replace(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        mapped: NDArray[Any] = np.load(target, mmap_mode="r", allow_pickle=False)
        return mapped

    def _type(self, name: str, array: NDArray[Any] | _RowsOfStorage) -> ColumnType:
        dtype = _DTYPES.get(array.dtype.kind)
        if dtype is None or not array.ndim:
            what = f"is of type {array.dtype}" if array.ndim else "has no dimension that counts records"
            raise DataError(
                f"NumPy file {self._path}: the array {name} {what}, which no record can hold.",
                "Name the arrays to read with --columns.",
            )
        return ColumnType(dtype, tuple(array.shape[1:]))

    def _column(self, name: str, rows: NDArray[Any]) -> TableColumn:
        if rows.dtype.kind not in "SU":
            if rows.dtype == np.uint64 and rows.size and rows.max() >= 1 << 63:
                raise DataError(
                    f"NumPy file {self._path}: the array {name} holds {rows.max()}, which no record can hold.",
                    "Whole numbers are less than 2**63: write it as another type, or leave it out of --columns.",
                )
            return Numbers(rows)
        encoded = np.char.encode(rows, "utf-8") if rows.dtype.kind == "U" else rows
        values = encoded.tolist()
        if rows.ndim == 1:
            return Texts(values)
        return TextLists([np.asarray(row, object).reshape(-1).tolist() for row in values])


class _RowsOfStorage:
    """An uncompressed array in storage, read by rows."""

    def __init__(
        self, file: DataFile, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], is_fortran: bool
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.ndim = len(shape)
        self._file = file
        self._offset = offset
        self._row_bytes = dtype.itemsize * math.prod(shape[1:])
        self._whole: NDArray[Any] | None = None
        if is_fortran and self.ndim > 1:  # the values of a row are not contiguous
            data = file.pread(self._row_bytes * shape[0], offset)
            self._whole = np.frombuffer(data, dtype).reshape(shape, order="F")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        if self._whole is not None:
            return self._whole[rows]
        start, end, _ = rows.indices(len(self))
        data = self._file.pread(self._row_bytes * (end - start), self._offset + self._row_bytes * start)
        return np.frombuffer(data, self.dtype).reshape(end - start, *self.shape[1:])


def _whole(member: IO[bytes]) -> NDArray[Any]:
    array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
    member.read()  # reaches the end, where zipfile compares the checksum
    return array


@contextlib.contextmanager
def _members(path: str, selection: Selection) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Return a context with the open archive and its selected members, by column name."""
    source = open_file(path).scan() if is_remote(path) else path
    try:
        archive = zipfile.ZipFile(source)
    except Exception as error:  # for damaged bytes it raises nearly anything
        raise DataError(f"NumPy file {path}, byte 0: {str(error) or repr(error)}.", _HINT) from error
    with archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        yield archive, {name: members[name] for name in selection.of(list(members), path)}


@contextlib.contextmanager
def _member(path: str, info: zipfile.ZipInfo) -> Iterator[None]:
    """Return a context that converts any error to a DataError about this member."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # for damaged bytes zipfile, zlib and NumPy raise nearly anything
        what = str(error) or repr(error)
        raise DataError(
            f"NumPy file {path}, byte {info.header_offset}: {info.filename} cannot be read: {what}.",
            "Arrays of objects (pickles) are never read; else the file was cut off or changed: write it again.",
        ) from error


def _decompressed_copy(path: str, info: zipfile.ZipInfo) -> Path:
    """Return the path for the decompressed copy of a member."""
    status = os.stat(path)
    name = f"{os.path.basename(path)}.{status.st_size}.{status.st_mtime_ns}.{info.CRC:08x}.npy"
    return Path(path).absolute().parent / _FOLDER / name


def _check(path: str, selection: Selection) -> None:
    """Read all arrays once to compare their checksums, because mapping them does not.

    Raises:
        DataError: An array is damaged.
    """
    check_file(path)
    with _members(path, selection) as (archive, members):
        for info in members.values():
            if info.compress_type == zipfile.ZIP_STORED:
                with _member(path, info), archive.open(info) as file:
                    while file.read(_PIECE_BYTES):  # zipfile compares the checksum at the end
                        pass
                continue
            copy = _decompressed_copy(path, info)
            if copy.exists() and _crc(copy) != info.CRC:
                raise DataError(f"{copy}, the decompressed copy of {path}, is damaged.", "Remove the copy.")


def _crc(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def npz_reader(source: str, paths: Sequence[str], selection: Selection, seed: int) -> PartsReader:
    """Return the `Reader` over NumPy archives."""

    first = min(paths)

    @functools.cache
    def types_of_first() -> dict[str, ColumnType]:
        return NpzFile(first, selection).types

    def open_file(path: str) -> NpzFile:
        file = NpzFile(path, selection)
        check_same(file.types, path, types_of_first(), first)
        return file

    return PartsReader(
        source,
        paths,
        open_file,
        lambda: describe(types_of_first(), selection, seed),
        lambda path: _check(path, selection),
    )
