"""Classes and functions that user code for the original ElasticDL subclasses or calls; only for compatibility."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np

from elasticdl.data.factory import create_reader
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError, ModelDefinitionError

default_logger = logging.getLogger("elasticdl.user")


def get_logger(name: str, level: str = "INFO") -> logging.Logger:
    """Return a logger below ElasticDL's own, so that its lines appear in the pod's log."""
    logger = default_logger.getChild(name)
    logger.setLevel(level.upper())
    return logger


class _Predictions(np.ndarray):
    """An array with the method `numpy` of an eager tensor, for processors that call it."""

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)


class BasePredictionOutputsProcessor:
    """Base class of a module's `PredictionOutputsProcessor`; `process` gets arrays with the method `numpy`."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "process" in vars(cls):
            cls.process = _with_numpy(cls.process)  # type: ignore[method-assign]

    def process(self, predictions: Any, worker_id: int) -> None:
        """Process the predictions of a minibatch; override it.

        Args:
            predictions: The model's output [records, …], or a dictionary of outputs.
            worker_id: Number of the worker.
        """
        raise NotImplementedError


def _with_numpy(process: Callable[..., None]) -> Callable[..., None]:
    @wraps(process)
    def with_numpy(self: Any, predictions: Any, *arguments: Any, **keywords: Any) -> None:
        process(self, _viewed(predictions), *arguments, **keywords)

    return with_numpy


def _viewed(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return {name: _viewed(output) for name, output in outputs.items()}
    if isinstance(outputs, list | tuple):
        viewed = [_viewed(output) for output in outputs]
        return type(outputs)(*viewed) if hasattr(outputs, "_fields") else type(outputs)(viewed)  # a namedtuple
    return np.asarray(outputs).view(_Predictions)


class AbstractDataReader:
    """Base class of the readers returned by `custom_data_reader`; define `create_shards()` and `read_records(task)`."""

    def __init__(self, **keywords: Any) -> None:
        pass


@dataclass
class OriginalMetadata:
    """The value of a reader's property `metadata`.

    Attributes:
        column_dtypes: Maps names of columns to dtypes.
    """

    column_names: Sequence[str] = ()
    column_dtypes: Mapping[str, Any] = field(default_factory=dict)


class OriginalRecordIOReader:
    """Reads several RecordIO files as one sequence of records."""

    def __init__(self, files: Sequence[str]) -> None:
        self._reader = create_reader(",".join(files), {"reader_type": "RecordIO"})
        self._shards = {shard.name: shard for shard in self._reader.shards()}
        missing = [file for file in files if file not in self._shards]
        if missing:
            raise DataError(f"{missing[0]} is not a RecordIO file with records.", "Name the files themselves.")
        self._files = list(files)

    def read_records(self, start: int, end: int) -> Iterator[bytes]:
        """Yield records `start` to `end` - 1."""
        begin = 0
        for file in self._files:
            size = len(self._shards[file])
            first, last = max(start - begin, 0), min(end - begin, size)
            if first < last:
                yield from self._reader.read(Shard(file, first, last, self._shards[file].identity))
            begin += size


class MaxComputeConfig:
    """The names of the environment variables for MaxCompute."""

    PROJECT_NAME = "MAXCOMPUTE_PROJECT"
    ACCESS_ID = "MAXCOMPUTE_AK"
    ACCESS_KEY = "MAXCOMPUTE_SK"
    ENDPOINT = "MAXCOMPUTE_ENDPOINT"
    TUNNEL_ENDPOINT = "MAXCOMPUTE_TUNNEL_ENDPOINT"


def is_odps_configured() -> bool:
    """Return whether the environment names a MaxCompute project and its keys."""
    names = (MaxComputeConfig.PROJECT_NAME, MaxComputeConfig.ACCESS_ID, MaxComputeConfig.ACCESS_KEY)
    return all(name in os.environ for name in names)


class ODPSWriter:
    """A class whose constructor always raises: MaxCompute is not supported."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise ModelDefinitionError(
            "ODPSWriter cannot write: MaxCompute is not supported.", "Write predictions with --prediction_outputs."
        )
