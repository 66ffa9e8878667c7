"""`elasticdl analyze` as a user runs it: every record counts once, whatever is killed; mistakes are said by name."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticdl.protocol import Role
from tests.analyze.typed import SOURCES
from tests.chaos.job import LocalJob

NUM_ROWS = 12_000
WORDS = ("red", "green", "blue", "?", "")


def write_table(path: Path, num_rows: int = NUM_ROWS) -> list[tuple[int, str, str]]:
    """A CSV file with columns number, fraction, word; its rows."""
    random = np.random.default_rng(5)
    numbers = random.integers(-1000, 1000, num_rows).tolist()
    rows = [(n, f"{n / 8:.3f}", WORDS[k]) for n, k in zip(numbers, random.integers(0, 5, num_rows), strict=True)]
    path.write_text("number,fraction,word\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    return rows


def job(directory: Path, data: object, **flags: object) -> LocalJob:
    given = {"job_name": "count", "data": data, "output": directory / "statistics.json", "num_workers": 2, **flags}
    return LocalJob(directory / "job", given, command="analyze")


def check(directory: Path, rows: list[tuple[int, str, str]]) -> dict[str, Any]:
    """The statistics are those of each row once, and nothing else is left of the parts."""
    found: dict[str, Any] = json.loads((directory / "statistics.json").read_text())
    number, fraction, word = (found["columns"][name] for name in ("number", "fraction", "word"))
    values = np.array([row[0] for row in rows])
    assert found["records"] == number["count"] == len(rows)
    assert dict(zip(number["vocab"], number["vocab_counts"], strict=True)) == Counter(map(str, values.tolist()))
    assert (number["min"], number["max"], number["avg"]) == (values.min(), values.max(), values.sum() / len(values))
    assert number["stddev"] == pytest.approx(values.std(), rel=1e-12)
    assert fraction["avg"] == pytest.approx(values.mean() / 8, rel=1e-12)
    assert fraction["distinct_count"] == number["distinct_count"] == len(set(values.tolist()))
    kept = Counter(row[2] for row in rows if row[2] not in ("", "?"))
    assert dict(zip(word["vocab"], word["vocab_counts"], strict=True)) == kept
    assert word["missing"] == len(rows) - kept.total()
    assert not (directory / "statistics.json.parts").exists()
    return found


def kill_a_worker(running: LocalJob, num_parts: int) -> None:
    """Once this number of tasks is done, while one works.  The status is a second late, too late for a fast machine."""
    parts = Path(f"{running.flags['output']}.parts")

    def is_time() -> bool:
        return len(list(parts.glob("part-*"))) >= num_parts and bool(running.pods(Role.WORKER))

    running.wait_until(f"{num_parts} parts and a worker", is_time)
    pid = running.pods(Role.WORKER)[0].pid
    assert pid
    os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(180)
def test_a_killed_worker_changes_no_count(tmp_path: Path) -> None:
    rows = write_table(tmp_path / "table.csv")
    running = job(tmp_path, tmp_path / "table.csv", missing_values="?", records_per_task=20).start()
    kill_a_worker(running, 20)
    assert running.wait() == 0, running.story()
    assert f"analysis: records {NUM_ROWS}, analyzed {NUM_ROWS}, repeated 0, lost 0" in "\n".join(running.output)
    check(tmp_path, rows)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_no_count_changes_however_many_workers_are_killed(tmp_path: Path) -> None:
    rows = write_table(tmp_path / "table.csv")
    whole = job(tmp_path, tmp_path / "table.csv", missing_values="?", records_per_task=1000)
    assert whole.start().wait() == 0, whole.story()
    undisturbed = check(tmp_path, rows)
    (tmp_path / "again").mkdir()
    running = job(tmp_path / "again", tmp_path / "table.csv", missing_values="?", records_per_task=10).start()
    for k in range(1, 6):
        kill_a_worker(running, k * 150)
    assert running.wait() == 0, running.story()
    assert check(tmp_path / "again", rows) == undisturbed


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_table(kind: str, tmp_path: Path) -> None:
    rows = [{"n": k % 7, "f": k / 2, "t": f"w{k % 3}"} for k in range(100)]
    running = job(tmp_path, SOURCES[kind](tmp_path, rows), records_per_task=9, columns="n,f,t").start()
    assert running.wait() == 0, running.story()
    columns = json.loads((tmp_path / "statistics.json").read_text())["columns"]
    assert sorted(columns) == ["f", "n", "t"]
    assert columns["n"]["vocab_counts"] == [15, 15, 14, 14, 14, 14, 14]
    assert (columns["f"]["min"], columns["f"]["max"], columns["f"]["avg"]) == (0, 49.5, 24.75)
    assert columns["t"]["vocab"] == ["w0", "w1", "w2"]


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_row_that_is_none_is_named_or_set_aside(tmp_path: Path) -> None:
    rows = write_table(tmp_path / "table.csv", 50)
    with open(tmp_path / "table.csv", "a") as table:
        table.write("1,2\n")
    flags = {"missing_values": "?", "records_per_task": 10, "num_workers": 1}
    failing = job(tmp_path, tmp_path / "table.csv", **flags).start()
    assert failing.wait() != 0
    assert "A row has 2 fields, the header 3: 1,2" in "\n".join(failing.output), failing.story()
    running = job(tmp_path, tmp_path / "table.csv", max_bad_records=1, **flags).start()
    assert running.wait() == 0, running.story()
    assert "analysis: records 51, analyzed 50, repeated 0, lost 0, quarantined 1" in "\n".join(running.output)
    check(tmp_path, rows)
