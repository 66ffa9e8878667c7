"""Damaged files of every format: refused by name or read as they were written, where the format can tell.

Each is read by another process, so that a crash and a hang of a library are found and belong to one file.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.fuzz import damaged_files
from tests.fuzz.damaged_files import FORMATS, Outcome
from tests.fuzz.scale import SCALE, rounds

pytestmark = [pytest.mark.ci, pytest.mark.timeout(60 + 1200 * SCALE)]

_HANG_S = 30.0  # a file of some kilobytes is read in milliseconds


@pytest.fixture(scope="module")
def reading_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path, reading_process: ProcessPoolExecutor) -> None:
    damaged_files.write(name, tmp_path / "good")
    outcomes: dict[int, Outcome] = {}
    for seed in range(rounds(500)):
        read = reading_process.submit(damaged_files.read_damaged, name, tmp_path / "good", tmp_path / "damaged", seed)
        outcomes[seed] = read.result(_HANG_S)  # a crash of the process is an error of the pool
    bad = {"traceback", "other"} if FORMATS[name].has_checksums else {"traceback"}
    wrong = {seed: outcome for seed, outcome in outcomes.items() if outcome.kind in bad}
    assert not wrong, Counter(outcome.text.splitlines()[0] if outcome.text else "" for outcome in wrong.values())
