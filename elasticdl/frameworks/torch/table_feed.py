"""The default feed: samples of the columns of a table, for modules without a `feed`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elasticdl.data.default_feed import FeedColumns, table_of
from elasticdl.data.extras import need
from elasticdl.data.reader import Metadata
from elasticdl.data.table_decoder import Column, decode
from elasticdl.frameworks.framework import Mode
from elasticdl_client.errors import DataError


class TableSamples(Sequence[Any]):
    """Samples of a task, held as columns: (features by name, label), or features alone for prediction."""

    def __init__(self, features: Any, labels: Any, length: int) -> None:
        """
        Args:
            features: tensors and lists of texts by name, or one tensor.
            labels: of all samples; None: for prediction.
        """
        self._features = features
        self._labels = labels
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """A sample; for a slice, a minibatch."""
        features = self._features
        part = {name: column[index] for name, column in features.items()} if type(features) is dict else features[index]
        return part if self._labels is None else (part, self._labels[index])


def table_feed(path: str, mode: Mode, metadata: Metadata) -> Callable[..., TableSamples]:
    """A `feed` for one mode: features by column name, and the label.

    Args:
        path: of the user's module, for messages.

    Raises:
        ModelDefinitionError: the data are no table, or no label is named.
    """
    table = table_of(metadata, mode is Mode.PREDICTION, path)

    def feed(records: Sequence[bytes], *_: Any) -> TableSamples:
        columns = {name: _taken(table, name, column) for name, column in decode(records, table).items()}
        features: Any = {name: columns[name] for name in table.features}
        if table.is_one_image:
            features = columns[table.features[0]]
        return TableSamples(features, columns[table.label] if table.label else None, len(records))

    return feed


def _taken(table: FeedColumns, name: str, column: Column) -> Any:
    if isinstance(column, np.ndarray):
        return torch.from_numpy(column)
    if table.dtypes[name] == "image":
        return torch.stack([_image(data, table.shapes[name]) for data in column])
    return [_text(value) for value in column]


def _text(value: Any) -> Any:
    return [_text(one) for one in value] if isinstance(value, list) else value.decode(errors="replace")


def _of_8_bits(pillow: Any, image: Any) -> Any:
    """Of 16 bits a pixel, which Pillow would cut off at 255, the upper 8."""
    return pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode.startswith("I") else image


def _image(data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """As torchvision's ToTensor gives it: float32 [channels, height, width], 0 to 1; resized."""
    pillow = need("PIL.Image", "Images", "pillow")
    height, width, channels = shape
    try:
        with pillow.open(io.BytesIO(data)) as opened:
            image = _of_8_bits(pillow, opened).convert("RGB" if channels == 3 else "L")
            image = image.resize((width, height), pillow.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"A record holds no image: {error}.", "Write the file again or remove it.") from error
    pixels = np.asarray(image, np.float32).reshape(height, width, channels) / 255
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
