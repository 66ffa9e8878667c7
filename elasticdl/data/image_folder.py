"""Folders of images, a directory for each class, as torchvision and Keras read them.

A record holds `image`, the bytes of the file, `label`, the number of its directory in order of name, and `path`.  A
folder without directories has images without labels.  Records are in an order that mixes the classes and depends on
the files' names alone, so that no task holds a single class.  Never decodes an image: that is the feed's work.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from elasticdl.data.checksums import check_content, read_manifest
from elasticdl.data.index_cache import Arrays, cached
from elasticdl.data.reader import Metadata, PartsReader
from elasticdl.data.table_encoder import ColumnType, Numbers, Selection, TableColumn, Texts, describe, encode_table
from elasticdl_client.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


def holds_images(directory: str) -> bool:
    """Whether a directory, or one below it, has an image."""
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
        """Lists the files, or finds the list.

        Raises:
            DataError: the folder cannot be read.
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
    """The directories of a folder of images, in order of their labels."""
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith((".", "_")))


def image_reader(
    source: str, roots: Sequence[str], selection: Selection, image_shape: tuple[int, ...], seed: int
) -> PartsReader:
    """The `Reader` over folders of images.

    Args:
        image_shape: (height, width, channels) that the default feed makes of images; empty: not said.
    """
    expected = class_names(min(roots))

    def open_folder(root: str) -> ImageFolder:
        if class_names(root) != expected:
            raise DataError(
                f"The folders of images {root} and {min(roots)} do not have the same classes.",
                "A class is a directory; all sources of a job must have the same ones.",
            )
        return ImageFolder(root, selection)

    def metadata() -> Metadata:
        kinds = {"image": ColumnType("image", image_shape), "label": ColumnType("int64"), "path": ColumnType("string")}
        label = selection.label or "label"
        columns = ImageFolder(min(roots), selection).columns
        return describe({name: kinds[name] for name in columns}, Selection(selection.features, label), seed)

    return PartsReader(source, roots, open_folder, metadata, check=None)


def _index(root: str, classes: list[str]) -> Arrays:
    found: list[tuple[bytes, bytes, int]] = []
    folders: dict[bytes, int] = {}  # and when each has changed last, before it was listed
    for label, name in enumerate(classes or ["."]):
        below = [name]
        while below:
            folder = below.pop()
            folders[folder.encode()] = _changed(root, folder)
            for entry in os.scandir(os.path.join(root, folder)):
                path = os.path.normpath(os.path.join(folder, entry.name))
                if _is_image(entry.name) and not entry.is_dir():
                    found.append((hashlib.blake2b(path.encode(), digest_size=8).digest(), path.encode(), label))
                elif classes and entry.is_dir(follow_symlinks=False) and not entry.name.startswith((".", "_")):
                    below.append(path)
    found.sort()
    return {
        "paths": np.array([path for _, path, _ in found], np.bytes_),
        "labels": np.array([label for _, _, label in found], np.int64),
        "folders": np.array(list(folders), np.bytes_),
        "changed": np.array(list(folders.values()), np.int64),
    }


def _holds(root: str, index: Arrays) -> bool:
    """Whether no folder has got or lost a file since it was listed."""
    try:
        changed = [_changed(root, folder.decode()) for folder in index["folders"].tolist()]
    except OSError:
        return False
    return bool(changed == index["changed"].tolist())


def _changed(root: str, folder: str) -> int:
    return os.stat(os.path.join(root, folder)).st_mtime_ns


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith((".", "_"))
