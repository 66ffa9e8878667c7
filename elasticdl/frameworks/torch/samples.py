"""Convert the result of the user's `feed` for the records of a task to minibatches of tensors.

`feed(records, mode, metadata)` gets the task's records as a list of bytes and returns one of

* columns: a tensor, an array, or a tuple or dictionary of them; the first dimension counts samples;
* a `torch.utils.data.Dataset`, or another object with samples by index;
* an iterable of samples, such as a generator.

A sample is (features, label) or (features, label, weight); for prediction only features.  The module's `collate_fn`, or
PyTorch's own, makes a minibatch of samples.

`table_feed`: the default feed for modules without a `feed`: samples from the columns of a table.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from elasticdl.data.reader import Metadata
from elasticdl.data.sources import need
from elasticdl.data.table_decoder import Column, FeedColumns, decode, table_of
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.user_code import num_taken
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import DataError, ModelDefinitionError

_MOST_SAMPLES_PER_RECORD = 1000
_SHOWN = 80  # maximum number of bytes quoted from a wrong text
_RETURNS = (
    "Return tensors, a torch.utils.data.Dataset or an iterable of samples; a sample is (features, label), or "
    "(features, label, weight), or features alone for prediction."
)


@dataclass(frozen=True, slots=True)
class AheadCopy:
    """A minibatch being copied to a GPU.

    Attributes:
        done: Event at the end of the copy.
    """

    samples: TensorSamples
    done: Any
    device: Any

    def taken(self) -> TensorSamples:
        """Return it for the stream that computes, which waits for it."""
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(self.done)
        for part in (self.samples.features, self.samples.labels, self.samples.weights):
            mapped(lambda one: one.record_stream(computing) if isinstance(one, torch.Tensor) else None, part)
        return self.samples


@dataclass(frozen=True, slots=True)
class TensorSamples:
    """A minibatch, taken apart; `labels` and `weights` may be None."""

    features: Any
    labels: Any = None
    weights: Any = None
    ahead: AheadCopy | None = None

    def on(self, device: Any) -> TensorSamples:
        """Return these samples with their tensors on a device."""
        if self.ahead is not None and self.ahead.device == device:
            return self.ahead.taken()
        return TensorSamples(*(moved(part, device) for part in (self.features, self.labels, self.weights)))

    def copied_ahead(self, stream: Any) -> TensorSamples:
        """Return these samples in pinned memory, with a started copy to a GPU.

        Args:
            stream: A stream of that GPU, not the one that computes.
        """
        pinned = TensorSamples(*(mapped(_pinned, part) for part in (self.features, self.labels, self.weights)))
        with torch.cuda.stream(stream):
            copy = AheadCopy(pinned.on(stream.device), stream.record_event(), stream.device)
        return replace(pinned, ahead=copy)

    def parts(self, size: int, part_size: int) -> list[tuple[float, TensorSamples]]:
        """Cut a minibatch into parts; return each with its share of the samples.

        Args:
            size: Samples in the minibatch.
            part_size: Samples in each part except the last; 0: do not cut.

        Raises:
            ModelDefinitionError: The first dimension of some value does not count samples.
        """
        if not 0 < part_size < size:
            return [(1.0, self)]
        whole = (self.features, self.labels, self.weights)
        return [
            ((end - start) / size, TensorSamples(*(_cut(part, slice(start, end), size) for part in whole)))
            for start, end in pairwise([*range(0, size, part_size), size])
        ]


class Feed:
    """The user's `feed` for one mode."""

    def __init__(
        self, feed: Callable[..., Any], collate: Callable[..., Any] | None, mode: Mode, metadata: Any, size: int
    ) -> None:
        """
        Args:
            feed: The user's function.
            collate: The user's `collate_fn`; None: PyTorch's.
            mode: Passed to `feed`.
            metadata: Passed to `feed`.
            size: Samples per minibatch.
        """
        self._feed = feed
        self._collate = collate
        self._mode = mode
        self._arguments = (mode.value, metadata)[: num_taken(feed)]
        self._size = size

    @classmethod
    def of(cls, definition: ModelDefinition, mode: Mode, metadata: Metadata, size: int) -> Feed:
        """Return the feed of a module, or the default feed for a table."""
        feed = definition.feed or table_feed(definition.path, mode, metadata)
        return cls(feed, definition.collate_fn, mode, metadata, size)

    def minibatches(self, records: Sequence[bytes]) -> Iterator[tuple[int, TensorSamples]]:
        """Yield each minibatch with its number of samples: (number, minibatch).

        Raises:
            ModelDefinitionError: `feed` returns an invalid value, or is endless.
        """
        most = len(records) * _MOST_SAMPLES_PER_RECORD
        count = 0
        for size, element in self._elements(self._feed(list(records), *self._arguments)):
            count += size
            if count > most:
                raise ModelDefinitionError(
                    f"feed makes more than {_MOST_SAMPLES_PER_RECORD} samples a record.", "Does it ever end?"
                )
            yield size, self._taken_apart(element)

    def _elements(self, made: Any) -> Iterator[tuple[int, Any]]:
        if type(made) is TensorDataset:
            made = made.tensors
        if isinstance(made, TableSamples) and self._collate is None:
            for start in range(0, len(made), self._size):
                yield min(self._size, len(made) - start), made[start : start + self._size]
        elif isinstance(made, tuple | Mapping | torch.Tensor | np.ndarray):
            yield from self._cut(mapped(_as_tensor, made))
        elif isinstance(made, Sequence | Dataset) and not isinstance(made, IterableDataset | str | bytes):
            yield from self._indexed(made)
        elif isinstance(made, Iterable) and not isinstance(made, str | bytes):
            samples = iter(made)
            while chunk := list(islice(samples, self._size)):
                yield len(chunk), self._together(chunk)
        else:
            raise ModelDefinitionError(
                f"feed(records, {self._mode.value!r}, metadata) returned a {type(made).__name__}.", _RETURNS
            )

    def _cut(self, columns: Any) -> Iterator[tuple[int, Any]]:
        lengths = {int(column.shape[0]) if column.dim() else -1 for column in leaves(columns)}
        if len(lengths) != 1 or -1 in lengths:
            raise ModelDefinitionError(
                f"feed(records, {self._mode.value!r}, metadata) returned tensors of {sorted(lengths)} samples.",
                "Their first dimension is that of the samples, the same for all.",
            )
        (length,) = lengths
        for start in range(0, length, self._size):
            end = min(start + self._size, length)
            if self._collate is None:
                yield end - start, mapped(itemgetter(slice(start, end)), columns)
            else:
                samples = [mapped(itemgetter(k), columns) for k in range(start, end)]
                yield end - start, self._collate(samples)

    def _indexed(self, dataset: Any) -> Iterator[tuple[int, Any]]:
        length = len(dataset)
        several = getattr(dataset, "__getitems__", None)
        for start in range(0, length, self._size):
            indices = list(range(start, min(start + self._size, length)))
            samples = several(indices) if several else [dataset[index] for index in indices]
            yield len(samples), self._together(samples)

    def _together(self, samples: list[Any]) -> Any:
        return (self._collate or default_collate)(samples)

    def _taken_apart(self, element: Any) -> TensorSamples:
        if self._mode is Mode.PREDICTION:
            return TensorSamples(element)
        if not isinstance(element, tuple | list) or len(element) not in (2, 3):
            count = f" of {len(element)}" if isinstance(element, tuple | list) else ""
            raise ModelDefinitionError(
                f"feed(records, {self._mode.value!r}, metadata) makes minibatches that are a "
                f"{type(element).__name__}{count}.",
                _RETURNS,
            )
        return TensorSamples(*element)


def mapped(function: Callable[[Any], Any], parts: Any) -> Any:
    """Apply a function to each leaf of a structure of tuples, lists and dictionaries."""
    if isinstance(parts, tuple) and hasattr(parts, "_fields"):
        return type(parts)(*(mapped(function, part) for part in parts))
    if isinstance(parts, tuple | list):
        return type(parts)(mapped(function, part) for part in parts)
    if isinstance(parts, Mapping):
        return {key: mapped(function, part) for key, part in parts.items()}
    return function(parts)


def leaves(parts: Any) -> list[Any]:
    """Return the leaves of a structure, in order."""
    found: list[Any] = []
    mapped(found.append, parts)
    return found


def moved(parts: Any, device: Any) -> Any:
    """Return a structure with its tensors on a device; a copy to the CPU is complete on return."""
    is_early = torch.device(device).type != "cpu"
    return mapped(lambda part: part.to(device, non_blocking=is_early) if hasattr(part, "to") else part, parts)


def _pinned(part: Any) -> Any:
    can_be = isinstance(part, torch.Tensor) and part.device.type == "cpu" and part.layout == torch.strided
    return part.pin_memory() if can_be else part


def _cut(part: Any, of: slice, size: int) -> Any:
    """Return a range of samples of a part of a minibatch."""
    if part is None or isinstance(part, str | bytes):
        return part
    if isinstance(part, torch.Tensor | np.ndarray):
        if part.ndim and len(part) == size:
            return part[of]
    elif isinstance(part, list) and len(part) == size and all(isinstance(one, str | list) for one in part):
        return part[of]  # a list of texts, from a table
    elif isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_cut(one, of, size) for one in part))
    elif isinstance(part, tuple | list):
        return type(part)(_cut(one, of, size) for one in part)
    elif isinstance(part, Mapping):
        return {key: _cut(one, of, size) for key, one in part.items()}
    what = f"of shape {list(part.shape)}" if isinstance(part, torch.Tensor | np.ndarray) else f"a {type(part).__name__}"
    raise ModelDefinitionError(
        f"--accumulate_steps: a minibatch of {size} samples holds something {what}, which cannot be cut into parts.",
        "The first dimension of all its tensors counts samples; else leave --accumulate_steps out.",
    )


def _as_tensor(column: Any) -> Any:
    if isinstance(column, torch.Tensor):
        return column
    array = np.asarray(column)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class TableSamples(Sequence[Any]):
    """Samples of a task, held as columns: (features by name, label), or features alone for prediction."""

    def __init__(self, features: Any, labels: Any, length: int) -> None:
        """
        Args:
            features: Tensors and lists of texts by name, or one tensor.
            labels: Labels of all samples; None: for prediction.
            length: Number of samples.
        """
        self._features = features
        self._labels = labels
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, or for a slice a minibatch."""
        features = self._features
        part = {name: column[index] for name, column in features.items()} if type(features) is dict else features[index]
        return part if self._labels is None else (part, self._labels[index])


def table_feed(path: str, mode: Mode, metadata: Metadata) -> Callable[..., TableSamples]:
    """Return a `feed` for one mode: features by column name, and the label.

    Args:
        path: Path of the user's module, for messages.
        mode: The mode.
        metadata: Metadata of the data source.

    Raises:
        ModelDefinitionError: The data have no columns, or no label is named.
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
    return [_text(name, value) for value in column]


def _text(name: str, value: Any) -> Any:
    try:
        return [_text(name, one) for one in value] if isinstance(value, list) else value.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"A record has {value[:_SHOWN]!r} in the column {name}, which is not UTF-8.",
            "Leave a column of bytes out by --columns, or define feed; --max_bad_records=N leaves such records out.",
        ) from error


def _converted(pillow: Any, image: Any, channels: int) -> Any:
    """Return an image with pixels from 0 to 255; 16-bit pixels become fractions, since Pillow would clip them at 255.

    Raises:
        DataError: The pixels have no known range.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # "I": older Pillow
        return pillow.fromarray((np.asarray(image) / 257).astype(np.float32))
    if image.mode.startswith(("I", "F")):
        raise DataError(
            f"A record holds an image of {image.format} in mode {image.mode}, whose pixels have no range.",
            "Write it with 8 or 16 bits a pixel, or define feed; --max_bad_records=N leaves such records out.",
        )
    return image.convert("RGB" if channels == 3 else "L")


def _image(data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a decoded, resized image like torchvision's ToTensor: float32 [channels, height, width], 0 to 1."""
    pillow = need("PIL.Image", "Images", "pillow")
    height, width, channels = shape
    try:
        with pillow.open(io.BytesIO(data)) as opened:
            image = _converted(pillow, opened, channels).resize((width, height), pillow.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"A record holds no image: {error}.", "Write the file again or remove it.") from error
    pixels = np.asarray(image, np.float32).reshape(height, width, -1) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1).expand(channels, height, width).contiguous()
