"""Damaged records of tables, which no checksum of their file betrays: decoded, or refused as data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from random import Random

import pytest

from elasticdl.analysis.analysis import Analysis
from elasticdl.analysis.cells import Columns
from elasticdl.data.example import parse_all, parse_examples
from elasticdl.data.reader import Metadata
from elasticdl.data.table_decoder import decode, table_of
from elasticdl_client.errors import DataError
from tests.data import typed_sources as typed
from tests.fuzz.mutations import damage
from tests.fuzz.scale import rounds

_NAMES = ("f", "n", "t")
_DTYPES = (("f", "float64"), ("n", "int64"), ("t", "string"))
_EXAMPLES = Metadata(_NAMES, _DTYPES, label_column="n")
_ROWS = Metadata(_NAMES, _DTYPES, label_column="n", delimiter=",")
_MADE = typed.rows(20)
_ENCODED = typed.records(_MADE)
_LINES = [f'{row["f"]},{row["n"]},"{row["t"]}"'.encode() for row in _MADE]


def decoded(metadata: Metadata) -> Callable[[Sequence[bytes]], object]:
    return lambda records: decode(records, table_of(metadata, False, "model.py"))


def analysed(metadata: Metadata) -> Callable[[Sequence[bytes]], object]:
    def analyse(records: Sequence[bytes]) -> object:
        found = Analysis()
        found.add(Columns(metadata).cells(records), len(records))
        return found.statistics(4, 10)

    return analyse


WAYS: dict[str, tuple[list[bytes], Callable[[Sequence[bytes]], object]]] = {
    "examples_to_columns": (_ENCODED, decoded(_EXAMPLES)),
    "rows_to_columns": (_LINES, decoded(_ROWS)),
    "examples_to_statistics": (_ENCODED, analysed(_EXAMPLES)),
    "rows_to_statistics": (_LINES, analysed(_ROWS)),
    "examples_by_the_general_parser": (_ENCODED, lambda records: parse_examples(records, dict.fromkeys(_NAMES, ()))),
    "all_features_of_examples": (_ENCODED, parse_all),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_record_is_decoded_or_refused(way: str) -> None:
    good, read = WAYS[way]
    read(good)
    for seed in range(rounds(2000)):
        random = Random(seed)
        records = list(good)
        number = random.randrange(len(records))
        records[number] = damage(records[number], random)
        with contextlib.suppress(DataError):
            read(records)
