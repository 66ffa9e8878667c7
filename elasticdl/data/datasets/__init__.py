"""Splits of data sets: each has a known number of records, in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a data set.

    Attributes:
        name: Name of its directory: "train" or "validation".
        num_records: Exact number of records.
        blocks: Its records in lists of any length; can be iterated once.
    """

    name: str
    num_records: int
    blocks: Iterator[list[bytes]]
