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

pytestmark = pytest.mark.timeout(60 + 1200 * SCALE)

_HANG_S = 30.0  # a file of some kilobytes is read in milliseconds


@pytest.fixture(scope="module")
def reading_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def outcomes(
    name: str, tmp_path: Path, process: ProcessPoolExecutor, num_files: int, with_manifest: bool
) -> dict[int, Outcome]:
    """Of files that are damaged by the seeds 0, 1, …"""
    good = tmp_path / "good"
    damaged_files.write(name, good, with_manifest)
    found = {}
    for seed in range(num_files):
        read = process.submit(damaged_files.read_damaged, name, good, tmp_path / "damaged", seed)
        found[seed] = read.result(_HANG_S)  # a crash of the process is an error of the pool
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path, reading_process: ProcessPoolExecutor) -> None:
    found = outcomes(name, tmp_path, reading_process, rounds(500), with_manifest=False)
    bad = {"traceback", "other"} if FORMATS[name].has_checksums else {"traceback"}
    wrong = {seed: outcome for seed, outcome in found.items() if outcome.kind in bad}
    assert not wrong, Counter(outcome.text.partition("\n")[0] for outcome in wrong.values())


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "sqlite"])
def test_no_damage_passes_the_checksums_beside_the_files(
    name: str, tmp_path: Path, reading_process: ProcessPoolExecutor
) -> None:
    found = outcomes(name, tmp_path, reading_process, rounds(100), with_manifest=True)
    assert {seed: outcome for seed, outcome in found.items() if outcome.kind != "refusal"} == {}
