"""Read samples that are files: image folders, and WebDataset tar files.

An image folder has a directory for each class, as in torchvision and Keras.  A record contains `image` (the bytes of
the file), `label` (the index of its directory, sorted by name) and `path`.  A folder without directories has images
without labels.  The order of records depends only on the names of the files and mixes the classes, so that no task
consists of a single class.  Images are not decoded: the feed does that.

WebDataset: tar files, read by sample number, in which the files of a sample are next to each other.  The files of a
sample share the part of their name before the first dot, which is the column `__key__`; the part after the dot is the
column (`7.jpg`, `7.cls`).  `cls` and `id` are whole numbers; all other columns are the bytes of their files.  The index
is built in one pass over the headers of a tar file; contents are read from the tar file directly.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.files import Arrays, FileView, cached, open_file
from elasticdl.data.identity import identity_of
from elasticdl.data.reader import Metadata, PartsReader
from elasticdl.data.sources import check_content, check_name, read_manifest
from elasticdl.data.table_encoder import ColumnType, Numbers, Selection, TableColumn, Texts, describe, encode_table
from elasticdl_client.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


def holds_images(directory: str) -> bool:
    """Return whether a directory, or one directly below it, contains an image."""
    for entry in os.scandir(directory):
        if entry.is_dir() and not entry.name.startswith((".", "_")):
            if any(_is_image(below.name) for below in os.scandir(entry.path)):
                return True
        elif _is_image(entry.name):
            return True
    return False


class ImageFolder:
    """The images of one folder."""

    def __init__(self, root: str, selection: Selection) -> None:
        """List the files, or load the cached list.

        Raises:
            DataError: The folder cannot be read.
        """
        self._root = root
        try:
            classes = class_names(root)
            index = cached(
                os.path.join(root, "images"), "images", lambda: _index(root, classes), classes, partial(_holds, root)
            )
        except OSError as error:
            raise DataError(f"The folder of images {root} cannot be listed: {error.strerror}.") from error
        self._sums = read_manifest(root)
        self._paths, self._labels = index["paths"], index["labels"]
        names = ("image", "label", "path") if classes else ("image", "path")
        self.columns = [name for name in selection.of(names, root) if name != "path" or "path" in selection.features]

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def identity(self) -> str:
        """The identity of the folder, made of the names of its files; see `elasticdl.data.identity`."""
        return identity_of(len(self._paths), [self._paths.tobytes(), self._labels.tobytes()])

    def read(self, start: int, end: int) -> list[bytes]:
        paths = self._paths[start:end].tolist()
        columns: dict[str, TableColumn] = {}
        if "image" in self.columns:
            columns["image"] = Texts([self._bytes(path.decode()) for path in paths])
        if "label" in self.columns:
            columns["label"] = Numbers(self._labels[start:end])
        if "path" in self.columns:
            columns["path"] = Texts(paths)
        return encode_table(columns, end - start)

    def _bytes(self, path: str) -> bytes:
        whole = os.path.join(self._root, path)
        try:
            with open(whole, "rb") as file:
                data = file.read()
        except OSError as error:
            raise DataError(f"The image {whole} cannot be read: {error.strerror}.") from error
        if not data:
            raise DataError(f"The image {whole}, byte 0: the file is empty.", "Write it again or remove it.")
        if self._sums is not None:
            check_content(self._sums, self._root, path, data)
        return data


def class_names(root: str) -> list[str]:
    """Return the directories of an image folder, in the order of their labels.

    Raises:
        DataError: A name is not UTF-8.
    """
    found = [entry for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith((".", "_"))]
    for entry in found:
        check_name(entry.path)
    return sorted(entry.name for entry in found)


def check_same_classes(roots: Sequence[str]) -> None:
    """Check that labels have the same meaning in several image folders.

    Raises:
        DataError: The directories of two folders have different names.
    """
    for first, root in pairwise(roots):
        of_first = class_names(first)
        if different := sorted(set(of_first).symmetric_difference(class_names(root))):
            lacking, other = (root, first) if different[0] in of_first else (first, root)
            raise DataError(
                f"The folder of images {lacking} lacks the class {different[0]} of {other}.",
                "A label is the number of its directory in order of name: make a directory for each class, also an "
                "empty one.",
            )


def image_reader(
    source: str, roots: Sequence[str], selection: Selection, image_shape: tuple[int, ...], seed: int
) -> PartsReader:
    """Return the `Reader` over image folders.

    Args:
        source: The source as the user named it, for messages.
        roots: Paths of the folders.
        selection: Selected columns.
        image_shape: (height, width, channels) to which the default feed resizes images; empty: not given.
        seed: Seed of the job, for the metadata.
    """
    first = min(roots)

    def open_folder(root: str) -> ImageFolder:
        check_same_classes([first, root])
        return ImageFolder(root, selection)

    def metadata() -> Metadata:
        kinds = {"image": ColumnType("image", image_shape), "label": ColumnType("int64"), "path": ColumnType("string")}
        label = selection.label or "label"
        columns = ImageFolder(first, selection).columns
        return describe({name: kinds[name] for name in columns}, Selection(selection.features, label), seed)

    @functools.cache
    def identify(root: str) -> str:
        return ImageFolder(root, selection).identity

    return PartsReader(source, roots, open_folder, metadata, None, identify)


def _index(root: str, classes: list[str]) -> Arrays:
    found: list[tuple[bytes, bytes, int]] = []
    folders: dict[bytes, int] = {}  # with the time of the last change, read before listing
    for label, name in enumerate(classes or ["."]):
        below = [name]
        while below:
            folder = below.pop()
            folders[folder.encode()] = _changed(root, folder)
            for entry in os.scandir(os.path.join(root, folder)):
                path = os.path.normpath(os.path.join(folder, entry.name))
                if _is_image(entry.name) and not entry.is_dir():
                    check_name(entry.path)
                    found.append((hashlib.blake2b(path.encode(), digest_size=8).digest(), path.encode(), label))
                elif classes and entry.is_dir(follow_symlinks=False) and not entry.name.startswith((".", "_")):
                    check_name(entry.path)
                    below.append(path)
    found.sort()
    return {
        "paths": np.array([path for _, path, _ in found], np.bytes_),
        "labels": np.array([label for _, _, label in found], np.int64),
        "folders": np.array(list(folders), np.bytes_),
        "changed": np.array(list(folders.values()), np.int64),
    }


def _holds(root: str, index: Arrays) -> bool:
    """Return whether no file was added to or removed from a folder since it was listed."""
    try:
        changed = [_changed(root, folder.decode()) for folder in index["folders"].tolist()]
    except OSError:
        return False
    return bool(changed == index["changed"].tolist())


def _changed(root: str, folder: str) -> int:
    return os.stat(os.path.join(root, folder)).st_mtime_ns


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith((".", "_"))


KEY = "__key__"
_NUMBERS = frozenset({"cls", "cls2", "index", "inx", "id"})  # the same as in the decoders of webdataset
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_BLOCK_BYTES = 512  # block size of the tar format
_HINT = "The file was cut off, changed or is compressed: write it again as an uncompressed tar file, or remove it."


class TarFile:
    """The samples of one tar file."""

    def __init__(self, path: str) -> None:
        """Build the index, or load the cached one.

        Raises:
            DataError: The file cannot be read, or is not a WebDataset tar file.
        """
        self.path = path
        self._file = open_file(path)
        index = cached(path, "webdataset", self._index, self._file.stamp)
        self.columns: list[str] = [name.decode() for name in index["columns"].tolist()]
        self._keys, self._offsets, self._sizes = index["keys"], index["offsets"], index["sizes"]

    def __len__(self) -> int:
        return len(self._keys)

    def column(self, name: str, start: int, end: int) -> TableColumn:
        """Return a column of samples ``start`` to ``end`` - 1; a sample without that file has no value.

        Raises:
            DataError: A value is not a whole number, although the column requires it; or the file has become shorter.
        """
        if name == KEY:
            return Texts(self._keys[start:end].tolist())
        if name not in self.columns:
            return _numbers([None] * (end - start)) if name in _NUMBERS else Texts([b""] * (end - start))
        place = self.columns.index(name)
        contents = self._contents(self._offsets[start:end, place].tolist(), self._sizes[start:end, place].tolist())
        if name not in _NUMBERS:
            return Texts([content or b"" for content in contents])
        return _numbers(
            [None if text is None else self._number(text, name, start + i) for i, text in enumerate(contents)]
        )

    def _number(self, text: bytes, name: str, sample: int) -> int:
        number: int | None
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not -(2**63) <= number < 2**63:
            offset = int(self._offsets[sample, self.columns.index(name)])
            raise DataError(
                f"{self.path}, byte {offset}: {self._keys[sample].decode()}.{name} holds {text[:50]!r}, "
                "not a whole number of 64 bits.",
                f"Write a class number in ASCII digits, or give the files another ending than .{name}.",
            )
        return number

    def _contents(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes | None]:
        """Return the bytes of one file per sample; None for a sample without that file (offset -1)."""
        there = [(offset, size) for offset, size in zip(offsets, sizes, strict=True) if offset >= 0]
        found = self._file.pread_all(there)
        for (offset, size), content in zip(there, found, strict=True):
            if len(content) < size:
                raise self._damaged(offset, "the file has become shorter since it was indexed")
        contents = iter(found)
        return [None if offset < 0 else bytes(next(contents)) for offset in offsets]

    def _index(self) -> Arrays:
        columns: dict[str, int] = {}
        samples: dict[str, dict[int, tuple[int, int]]] = {}
        last = ""
        for member in self._members():
            name = _NAME.fullmatch(member.name)
            if not member.isfile() or name is None:
                continue  # directories, hidden files, notes
            key = name[1]
            files = samples.setdefault(key, {})
            if files and key != last:
                raise self._damaged(member.offset, f"the files of the sample {key} do not follow one another")
            column = columns.setdefault(name[2].lower(), len(columns))
            if column in files:
                raise self._damaged(member.offset, f"{member.name} is there twice")
            files[column] = (member.offset_data, member.size)
            last = key
        shape = len(samples), len(columns)
        offsets, sizes = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        for row, files in enumerate(samples.values()):
            for column, (offset, size) in files.items():
                offsets[row, column], sizes[row, column] = offset, size
        return {"columns": _texts(columns), "keys": _texts(samples), "offsets": offsets, "sizes": sizes}

    def _members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the headers of the archive's members.

        Raises:
            DataError: A header is damaged, or the end marker is missing; `tarfile` treats both as the end.
        """
        end = 0
        try:
            with self._headers() as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # else all members stay in memory
                    end = member.offset_data + -(-member.size // _BLOCK_BYTES) * _BLOCK_BYTES
                    yield member
        except tarfile.TarError as error:
            raise self._damaged(end, str(error)) from error
        if self._file.pread(_BLOCK_BYTES, end) != bytes(_BLOCK_BYTES):
            raise self._damaged(end, "there is no end of the archive")

    def _headers(self) -> IO[bytes]:
        """Return a stream for reading headers; for a local file it skips the contents between them."""
        return cast("IO[bytes]", FileView(self._file)) if self._file.is_local else self._file.scan()

    def _damaged(self, offset: int, what: str) -> DataError:
        return DataError(f"Tar file {self.path}, byte {offset}: {what}.", _HINT)


class _Samples:
    """The records of one tar file, with the selected columns."""

    def __init__(self, file: TarFile, columns: Sequence[str]) -> None:
        self._file = file
        self._columns = columns

    def __len__(self) -> int:
        return len(self._file)

    def read(self, start: int, end: int) -> list[bytes]:
        return encode_table({name: self._file.column(name, start, end) for name in self._columns}, end - start)


def webdataset_reader(
    source: str, paths: Sequence[str], selection: Selection, image_shape: tuple[int, ...], seed: int
) -> PartsReader:
    """Return the `Reader` over tar files; it has the columns of all files, and `__key__` if --columns contains it.

    Args:
        source: The source as the user named it, for messages.
        paths: Paths of the files.
        selection: Selected columns.
        image_shape: (height, width, channels) to which the default feed resizes images; empty: not given.
        seed: Seed of the job, for the metadata.
    """

    @functools.cache
    def types() -> dict[str, ColumnType]:
        available = sorted({column for path in sorted(paths) for column in TarFile(path).columns})
        wanted = selection.of([KEY, *available], source)
        if KEY not in selection.features:
            wanted.remove(KEY)
        return {name: _type_of(name, image_shape) for name in wanted}

    def metadata() -> Metadata:
        return describe(types(), selection, seed)

    return PartsReader(source, paths, lambda path: _Samples(TarFile(path), list(types())), metadata)


def _type_of(column: str, image_shape: tuple[int, ...]) -> ColumnType:
    if f".{column.rpartition('.')[2]}" in ENDINGS:
        return ColumnType("image", image_shape)
    return ColumnType("int64" if column in _NUMBERS else "string")


def _numbers(values: Sequence[int | None]) -> Numbers:
    missing = np.array([value is None for value in values], np.bool_)
    return Numbers(np.array([value or 0 for value in values], np.int64), missing if missing.any() else None)


def _texts(values: Iterable[str]) -> NDArray[np.bytes_]:
    return np.array([value.encode() for value in values], np.bytes_)
