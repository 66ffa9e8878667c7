"""Functions that read statistics of columns, for the arguments of the layers.

Each takes the first of these sources with a value: an environment variable for one statistic, such as `_age_min`; the
file written by `elasticdl analyze`, given as an argument or by the environment variable ELASTICDL_STATISTICS; the
default.  Nothing is computed here.
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
    """Return the smallest number of a column; environment variable ``_{feature_name}_min``.

    Args:
        feature_name: Name of the column.
        default: Returned if there is no such statistic.
        statistics: Path or storage URL of a file written by `elasticdl analyze`; None: the path in
            ELASTICDL_STATISTICS, if it is set.

    Raises:
        ValueError: The value is not a number, or the file cannot be read.
        StorageError: The storage refuses the file, or cannot be reached.
    """
    return _found(feature_name, "min", float, default, statistics)


def get_max(feature_name: str, default: D, statistics: StatisticsPath = None) -> float | D:
    """Return the largest number of a column; environment variable ``_{feature_name}_max``.  See `get_min`."""
    return _found(feature_name, "max", float, default, statistics)


def get_avg(feature_name: str, default: D, statistics: StatisticsPath = None) -> float | D:
    """Return the mean of a column; environment variable ``_{feature_name}_avg``.  See `get_min`."""
    return _found(feature_name, "avg", float, default, statistics)


def get_stddev(feature_name: str, default: D, statistics: StatisticsPath = None) -> float | D:
    """Return the standard deviation of a column; environment variable ``_{feature_name}_stddev``.  See `get_min`."""
    return _found(feature_name, "stddev", float, default, statistics)


def get_bucket_boundaries(feature_name: str, default: D, statistics: StatisticsPath = None) -> list[float] | D:
    """Return the boundaries of buckets with about the same number of records each, in ascending order.

    The environment variable ``_{feature_name}_boundaries`` contains numbers separated by commas.  See `get_min`.
    """
    return _found(feature_name, "boundaries", _boundaries, default, statistics)


def get_distinct_count(feature_name: str, default: D, statistics: StatisticsPath = None) -> int | D:
    """Return the number of distinct values of a column; environment variable ``_{feature_name}_distinct_count``.

    See `get_min`.
    """
    return _found(feature_name, "distinct_count", int, default, statistics)


def get_vocabulary(feature_name: str, default: D, statistics: StatisticsPath = None) -> str | list[str] | D:
    """Return the values of a column, the most frequent first, for `IndexLookup`.

    The environment variable ``_{feature_name}_vocab`` contains the path of a text file with one value per line; this
    path is then returned.  See `get_min`.
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
    """Return numbers that change when the file is rewritten; an empty tuple for a URL, which is read only once."""
    try:
        found = os.stat(path)
    except OSError:  # reading the file raises a better error
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
    from elasticdl.storage.paths import path_of  # needed only for URLs

    return path_of(path).read_bytes()
