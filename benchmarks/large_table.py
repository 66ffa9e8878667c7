"""A large embedding table on one parameter server: memory, pull and push speed, checkpoint and restore.

A real PS process and our own client, rows of 16 floats and Adagrad's accumulators beside them.  `--rows` says how many:
50 M rows need about 8 GB of memory and 7 GB of disk.  The stall is the longest fused push and pull of a loop of them
while the checkpoint is written in the background.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.lone_ps import TOKEN, LonePs, lone_ps
from benchmarks.measured_job import BenchmarkError, Contention
from elasticdl.frameworks.framework import ModelReport, Parameters, Table, Variable
from elasticdl.ps.client import PsClient, Pull, Push

ROWS, QUICK_ROWS = 50_000_000, 2_000_000
DIM = 16
INSERT = 200_000
BATCH_IDS = {"512x10": 5_120, "4096x10": 40_960}
UNIFORM = {"class_name": "RandomUniform", "config": {"minval": -0.05, "maxval": 0.05, "seed": None}}
ADAGRAD = {"class_name": "Adagrad", "config": {"learning_rate": 0.05}}
TABLE = Table("rows", DIM, json.dumps({"module": "keras", **UNIFORM}))
REPORT = ModelReport((Variable("bias", (1024,), True),), (TABLE,), json.dumps({"module": "keras", **ADAGRAD}), ())
GB = 1e9


def client_of(ps: LonePs) -> PsClient:
    return PsClient(ps.partition, REPORT, TOKEN, timeout_s=120)


class Pushes:
    """Fused pushes and pulls of random ids, one after another, each under a name of its own."""

    def __init__(self, client: PsClient, rows: int, num_ids: int) -> None:
        self._client = client
        self._random = np.random.default_rng(num_ids)
        self._rows = rows
        self._num_ids = num_ids
        self._count = 0
        self._values = self._random.standard_normal((num_ids, DIM), np.float32)
        self._dense = np.zeros(1024, np.float32), np.zeros(0, np.float32)

    def one(self) -> float:
        """Seconds of the next one."""
        ids, following = (self._random.integers(0, self._rows, self._num_ids) for _ in range(2))
        push = Push(1, self._num_ids, 0, self._count, *self._dense, {TABLE.name: (ids, self._values)})
        self._count += 1
        began = time.perf_counter()
        self._client.exchange(push, Pull(dense=True, ids={TABLE.name: following}))
        return time.perf_counter() - began


def fill(client: PsClient, rows: int) -> float:
    """Create all rows by pulling them; return rows per second."""
    began = time.perf_counter()
    for start in range(0, rows, INSERT):
        client.exchange(None, Pull(dense=False, ids={TABLE.name: np.arange(start, min(rows, start + INSERT))}))
    return rows / (time.perf_counter() - began)


def speed(client: PsClient, rows: int, seconds: float) -> dict[str, float]:
    """Ids per second of pulls, and of fused pushes and pulls, by batch."""
    found: dict[str, float] = {}
    for name, num_ids in BATCH_IDS.items():
        pushes = Pushes(client, rows, num_ids)
        random = np.random.default_rng(1)

        def pull(num_ids: int = num_ids, random: np.random.Generator = random) -> None:
            client.exchange(None, Pull(dense=False, ids={TABLE.name: random.integers(0, rows, num_ids)}))

        for kind, call in (("pull", pull), ("fused", pushes.one)):
            call()
            began, calls = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - began) < seconds:
                call()
                calls += 1
            found[f"{kind}_{name}_ids_per_s"] = calls * num_ids / elapsed
    return found


def saving(ps: LonePs, client: PsClient, rows: int, place: Path) -> Iterator[tuple[str, float]]:
    """Write a checkpoint during pushes; yield its seconds and size, and the times of pushes before and meanwhile."""
    pushes = Pushes(client, rows, 5_121)
    before = [pushes.one() for _ in range(200)]
    saved: list[float] = []
    errors: list[BaseException] = []

    def save() -> None:
        began = time.perf_counter()
        try:
            ps.save(place, 1)
        except BaseException as error:  # noqa: BLE001  raised below, in the main thread
            errors.append(error)
        saved.append(time.perf_counter() - began)

    saver = threading.Thread(target=save)
    saver.start()
    meanwhile = [pushes.one()]
    while saver.is_alive():
        meanwhile.append(pushes.one())
    saver.join()
    if errors:
        raise BenchmarkError(f"the checkpoint failed: {errors[0]}")
    size_bytes = sum(file.stat().st_size for file in (place / "version-1").iterdir())
    yield "checkpoint_gb", size_bytes / GB
    yield "checkpoint_s", saved[0]
    yield "checkpoint_gb_per_s", size_bytes / GB / saved[0]
    yield "push_before_ms", 1e3 * statistics.median(before)
    yield "push_before_longest_ms", 1e3 * max(before)
    yield "push_meanwhile_ms", 1e3 * statistics.median(meanwhile)
    yield "push_meanwhile_longest_ms", 1e3 * max(meanwhile)
    yield "pushes_meanwhile", float(len(meanwhile))
    yield "memory_after_checkpoint_gb", ps.memory_bytes()[0] / GB
    yield "memory_most_gb", ps.memory_bytes()[1] / GB


def measure(rows: int, seconds: float, directory: Path) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {"rows": rows, "dim": DIM}
    sample = np.random.default_rng(5).integers(0, rows, 10_000)
    read_sample = Pull(dense=False, ids={TABLE.name: sample}, read_only=True)
    with lone_ps(directory) as ps:
        client = client_of(ps)
        empty = ps.memory_bytes()[0]
        client.initialize(
            Parameters(np.zeros(1024, np.float32), np.zeros(0, np.float32)), (TABLE,), REPORT.optimizer, 1
        )
        figures["fill_rows_per_s"] = fill(client, rows)
        figures["memory_gb"] = ps.memory_bytes()[0] / GB
        figures["memory_bytes_per_row"] = (ps.memory_bytes()[0] - empty) / rows
        figures |= speed(client, rows, seconds)
        figures |= dict(saving(ps, client, rows, directory / "checkpoints"))
        # Pushes meanwhile may be in the checkpoint or not: write another one, of a model at rest.
        ps.save(directory / "checkpoints", 2)
        expected = client.exchange(None, read_sample).rows[TABLE.name]
        client.close()
    with lone_ps(directory, restore_from=str(directory / "checkpoints" / "version-2")) as ps:
        client = client_of(ps)
        figures["restore_s"] = ps.ready_s
        figures["restored_memory_most_gb"] = ps.memory_bytes()[1] / GB
        restored = client.exchange(None, read_sample).rows[TABLE.name]
        client.close()
    if not np.array_equal(expected, restored):
        raise BenchmarkError("the restored rows are not those that were saved")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS:,} rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--rows", type=int, default=0, help=f"(default {ROWS:,})")
    parser.add_argument("--directory", default=None, help="where the checkpoints go; they are removed")
    arguments = parser.parse_args()
    rows = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    directory = Path(tempfile.mkdtemp(prefix="elasticdl-large-table-", dir=arguments.directory))
    try:
        with Contention() as contention:
            figures = measure(rows, 1.0 if arguments.quick else 5.0, directory)
    finally:
        shutil.rmtree(directory)
    figures["share_of_others"] = contention.others
    if arguments.json:
        print(json.dumps({"benchmark": "large_table", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:32} {value:18,.3f}")


if __name__ == "__main__":
    main()
