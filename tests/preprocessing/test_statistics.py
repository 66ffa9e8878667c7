"""Where the layers' arguments come from: one variable, a file of statistics, a default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticdl_preprocessing import (
    get_avg,
    get_bucket_boundaries,
    get_distinct_count,
    get_max,
    get_min,
    get_stddev,
    get_vocabulary,
)

COLUMN = {"min": 1, "max": 9.5, "avg": 4.25, "stddev": 2.0, "boundaries": [3, 1, 3.0], "distinct_count": 12,
          "vocab": ["b", "a"]}  # fmt: skip
FUNCTIONS = {
    "min": (get_min, "-3.5", -3.5, 1.0),
    "max": (get_max, "20", 20.0, 9.5),
    "avg": (get_avg, "0.5", 0.5, 4.25),
    "stddev": (get_stddev, "1e-3", 1e-3, 2.0),
    "boundaries": (get_bucket_boundaries, "3,1,2,1", [1.0, 2.0, 3.0], [1.0, 3.0]),
    "distinct_count": (get_distinct_count, "7", 7, 12),
    "vocab": (get_vocabulary, "/data/words.txt", "/data/words.txt", ["b", "a"]),
}


@pytest.fixture
def statistics(tmp_path: Path) -> Path:
    path = tmp_path / "statistics.json"
    path.write_text(json.dumps({"columns": {"hours-per-week": COLUMN, "empty": {}}}))
    return path


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_variable_comes_before_the_file_and_the_file_before_the_default(
    name: str, statistics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, text, from_variable, from_file = FUNCTIONS[name]
    assert function("hours-per-week", 42) == 42
    assert function("hours-per-week", 42, statistics) == from_file
    monkeypatch.setenv("ELASTICDL_STATISTICS", str(statistics))
    assert function("hours-per-week", 42) == from_file
    assert function("empty", 42) == 42
    assert function("unknown", None) is None
    monkeypatch.setenv(f"_hours-per-week_{name}", text)
    assert function("hours-per-week", 42) == from_variable


def test_another_analysis_into_the_same_file_is_read(statistics: Path) -> None:
    """As in a notebook, whose process stays."""
    assert get_avg("hours-per-week", 0.0, statistics) == 4.25
    text = statistics.read_text().replace("4.25", "5.125")
    statistics.unlink()
    statistics.write_text(text)
    assert get_avg("hours-per-week", 0.0, statistics) == 5.125


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"none\.json cannot be read"):
        get_min("age", 0, tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"`elasticdl analyze` writes them"):
        get_min("age", 0, tmp_path / "other.json")
    monkeypatch.setenv("_age_min", "young")
    with pytest.raises(ValueError, match="the environment variable _age_min is 'young'"):
        get_min("age", 0)
