"""The splits of a data set, each a known number of records in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a data set.

    Attributes:
        name: of the directory it is written to: "train" or "validation".
        num_records: exact.
        blocks: its records, in lists of any length; can be run through once.
    """

    name: str
    num_records: int
    blocks: Iterator[list[bytes]]
