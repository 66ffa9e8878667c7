"""NumPy archives (`.npz`), read by record number: record i holds the i-th row of every array.

The arrays are mapped into memory where the archive holds them uncompressed (`numpy.savez`); compressed ones are
decompressed once, into files in a hidden directory beside the archive, or in memory where that cannot be written.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.columns import ColumnType, Selection, check_same, describe
from elasticdl.data.shard_files import PartsReader
from elasticdl.data.table_encoder import Numbers, TableColumn, TextLists, Texts, encode_table
from elasticdl_client.errors import DataError

_FOLDER = ".elasticdl"
_HINT = "The file was cut off or changed after it was written, or is no archive of NumPy: write it again or remove it."
_DTYPES = {"f": "float64", "i": "int64", "u": "int64", "b": "int64", "S": "string", "U": "string"}
_Failures = (OSError, ValueError, EOFError, zipfile.BadZipFile, struct.error)


class NpzFile:
    """The rows of one archive."""

    def __init__(self, path: str, selection: Selection) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                names = selection.of(list(members), path)
                self._arrays = {name: self._open(archive, members[name]) for name in names}
        except _Failures as error:
            raise DataError(f"NumPy file {path}, byte 0: {error or type(error).__name__}.", _HINT) from error
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
        return encode_table(columns, end - start)

    def _open(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
        try:
            if info.compress_type == zipfile.ZIP_STORED:
                return self._mapped(info)
            return self._decompressed(archive, info)
        except _Failures as error:
            raise DataError(
                f"NumPy file {self._path}, byte {info.header_offset}: {info.filename} cannot be read: {error}.",
                "Arrays of objects (pickles) are never read; else the file was cut off or changed: write it again.",
            ) from error

    def _mapped(self, info: zipfile.ZipInfo) -> NDArray[Any]:
        with open(self._path, "rb") as file:
            file.seek(info.header_offset + 26)  # of the local header: lengths of the name and of the extra field
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
        order: Any = "F" if is_fortran else "C"
        return np.memmap(self._path, dtype, "r", offset, shape, order)

    def _decompressed(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
        status = os.stat(self._path)
        folder = Path(self._path).absolute().parent / _FOLDER
        name = f"{os.path.basename(self._path)}.{status.st_size}.{status.st_mtime_ns}.{info.CRC:08x}.npy"
        target = folder / name
        if not target.exists():
            try:
                folder.mkdir(exist_ok=True)
                descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
            except OSError:
                with archive.open(info) as member:
                    return np.lib.format.read_array(member, allow_pickle=False)
            try:
                with os.fdopen(descriptor, "wb") as file, archive.open(info) as member:
                    while piece := member.read(1 << 20):
                        file.write(piece)
                os.chmod(temporary, 0o644)
                os.replace(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        mapped: NDArray[Any] = np.load(target, mmap_mode="r", allow_pickle=False)
        return mapped

    def _type(self, name: str, array: NDArray[Any]) -> ColumnType:
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


def npz_reader(source: str, paths: Sequence[str], selection: Selection, seed: int) -> PartsReader:
    """The `Reader` over NumPy archives."""

    first = min(paths)

    @functools.cache
    def types_of_first() -> dict[str, ColumnType]:
        return NpzFile(first, selection).types

    def open_file(path: str) -> NpzFile:
        file = NpzFile(path, selection)
        check_same(_dtypes(file.types), path, _dtypes(types_of_first()), first)
        return file

    return PartsReader(source, paths, open_file, lambda: describe(types_of_first(), selection, seed))


def _dtypes(types: Mapping[str, ColumnType]) -> dict[str, str]:
    return {name: kind.dtype for name, kind in types.items()}
