"""Statistics of columns, for the arguments of the layers.

Owns where they come from, in this order: the environment variable of one statistic, such as `_age_min`; the file that
`elasticdl analyze` wrote, whose path or URL is an argument, or in the environment variable ELASTICDL_STATISTICS; the
default.  It computes none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

STATISTICS = "ELASTICDL_STATISTICS"

T = TypeVar("T")
D = TypeVar("D")
StatisticsPath = str | os.PathLike[str] | None


def get_min(feature_name: str, default: D, statistics: StatisticsPath = None) -> float | D:
    """The smallest number of a column; environment variable ``_{feature_name}_min``.

    Args:
        default: the value where none has been computed.
        statistics: path, or URL in storage, of a file that `elasticdl analyze` wrote; None: that of
            ELASTICDL_STATISTICS, if it is set.

    Raises:
        ValueError: the variable holds no number, or the file cannot be read.
        StorageError: the storage refuses the file, or cannot be reached.
    """
    return _found(feature_name, "min", float, default, statistics)


def get_max(feature_name: str, default: D, statistics: StatisticsPath = None) -> float | D:
    """The largest number of a column; environment variable ``_{feature_name}_max``.  See `get_min`."""
    return _found(feature_name, "max", float, default, statistics)


def get_avg(feature_name: str, default: D, statistics: StatisticsPath = None) -> float | D:
    """The mean of a column; environment variable ``_{feature_name}_avg``.  See `get_min`."""
    return _found(feature_name, "avg", float, default, statistics)


def get_stddev(feature_name: str, default: D, statistics: StatisticsPath = None) -> float | D:
    """The standard deviation of a column; environment variable ``_{feature_name}_stddev``.  See `get_min`."""
    return _found(feature_name, "stddev", float, default, statistics)


def get_bucket_boundaries(feature_name: str, default: D, statistics: StatisticsPath = None) -> list[float] | D:
    """Boundaries of buckets that hold as many records each, rising; ``_{feature_name}_boundaries``, split by commas.

    See `get_min`.
    """
    return _found(feature_name, "boundaries", _boundaries, default, statistics)


def get_distinct_count(feature_name: str, default: D, statistics: StatisticsPath = None) -> int | D:
    """The number of different values of a column; environment variable ``_{feature_name}_distinct_count``.

    See `get_min`.
    """
    return _found(feature_name, "distinct_count", int, default, statistics)


def get_vocabulary(feature_name: str, default: D, statistics: StatisticsPath = None) -> str | list[str] | D:
    """The values of a column, the most frequent first, for `IndexLookup`.

    The environment variable ``_{feature_name}_vocab`` holds the path of a file with one a line.  See `get_min`.
    """
    return _found(feature_name, "vocab", lambda value: value, default, statistics)


def _boundaries(value: str | Sequence[float]) -> list[float]:
    parts = value.split(",") if isinstance(value, str) else value
    return sorted({float(part) for part in parts})


def _found(name: str, statistic: str, parse: Callable[[Any], T], default: D, path: StatisticsPath) -> T | D:
    variable = f"_{name}_{statistic}"
    value: Any = os.environ.get(variable)
    origin = f"the environment variable {variable}"
    if value is None:
        path = os.environ.get(STATISTICS) if path is None else path
        if not path:
            return default
        place = os.fspath(path)
        column = _columns(place if "://" in place else os.path.abspath(place), _state_of(place)).get(name, {})
        value = column.get(statistic)
        origin = f"{statistic!r} of column {name!r} in {path}"
        if value is None:
            return default
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{origin} is {value!r}: {error}.") from error


def _state_of(path: str) -> tuple[int, ...]:
    """Return numbers that differ when another analysis has written the file; none for a URL, which is read once."""
    try:
        found = os.stat(path)
    except OSError:  # the error of reading it says more
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=8)
def _columns(path: str, state: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    try:
        columns = json.loads(_content(path))["columns"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"The statistics {path} cannot be read: {type(error).__name__}: {error}.  `elasticdl analyze` writes them."
        ) from error
    return {str(name): dict(column) for name, column in columns.items()}


def _content(path: str) -> bytes:
    if "://" not in path:
        return Path(path).read_bytes()
    from elasticdl.storage.paths import path_of  # for URLs alone

    return path_of(path).read_bytes()
