"""Rows behind the thousand that the types of CSV columns are guessed from, with values of another type."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from elasticdl.analysis.analysis import Analysis
from elasticdl.data.factory import create_reader
from elasticdl.frameworks.framework import FeedError, Inference, Mode, TaskRecords
from elasticdl.worker.inference.analysis import TableInput, columns_of
from elasticdl.worker.quarantine import Quarantine, inspected
from elasticdl_client.job_spec import JobSpec


def analysis(path: Path, row: str, quarantine: Quarantine | None = None, **flags: str) -> dict[str, Any]:
    """The statistics of 1,000 rows and one more."""
    path.write_text("\n".join(["age,income", *(f"{k % 90},{k}.5" for k in range(1000)), row]))
    spec = JobSpec(job_name="a", data=str(path), **flags)
    reader = create_reader(str(path), spec.data_reader_params_dict())
    (shard,) = reader.shards()
    table = cast(Inference, TableInput(columns_of(spec, reader.metadata())))
    task = TaskRecords(1, 0, reader.read(shard), shard.name, range(shard.start, shard.end))
    found = Analysis()
    for batch in inspected(table, Mode.PREDICTION, iter([task]), quarantine or Quarantine()):
        if not batch.end:
            found.add(batch.data, batch.size)
    return cast(dict[str, Any], found.statistics(4, 10)["columns"])


@pytest.mark.parametrize(
    ("row", "column", "value", "dtype"),
    [
        ("old,1.5", "age", "old", "int64"),
        ("7,much", "income", "much", "float64"),
        ("02134,1.5", "age", "02134", "int64"),
        ("7,1_000", "income", "1_000", "float64"),
        (f"{10**30},1.5", "age", str(10**30), "int64"),
    ],
)
def test_a_text_among_numbers_is_said_with_column_record_value_and_flags(
    tmp_path: Path, row: str, column: str, value: str, dtype: str
) -> None:
    path = tmp_path / "rows.csv"
    with pytest.raises(FeedError) as error:
        analysis(path, row)
    for words in (
        f"'{value}' in the column {column}, which is read as {dtype}",
        f"record 1000 of {path}",
        f'column_dtypes={{"{column}": "string"}}',
        f"--missing_values={value}",
        "--max_bad_records",
    ):
        assert words in str(error.value), error.value
    with pytest.raises(FeedError) as bad:
        analysis(path, row, Quarantine(limit=1))
    assert bad.value.bad_records == (1000,)


def test_what_the_flags_say_of_such_a_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    as_texts = analysis(path, "old,1.5", data_reader_params='column_dtypes={"age": "string"}')
    assert (as_texts["age"]["type"], as_texts["age"]["count"]) == ("string", 1001)
    left_out = analysis(path, "old,1.5", missing_values="old")
    assert (left_out["age"]["type"], left_out["age"]["missing"]) == ("int64", 1)


def test_a_fraction_among_whole_numbers_and_a_number_that_is_none_keep_a_column_of_numbers(tmp_path: Path) -> None:
    found = analysis(tmp_path / "rows.csv", "34.5,nan")
    assert (found["age"]["type"], found["age"]["count"], found["age"]["max"]) == ("float64", 1001, 89.0)
    assert (found["income"]["type"], found["income"]["missing"]) == ("float64", 1)


def test_a_row_with_a_line_end_outside_of_quotes_is_set_aside(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match="A row is not CSV") as bad:
        analysis(tmp_path / "rows.csv", "7,1\r.5", Quarantine(limit=1))
    assert bad.value.bad_records == (1000,)
