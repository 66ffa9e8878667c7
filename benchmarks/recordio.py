"""Reading RecordIO against TensorFlow's TFRecordDataset, in the same run, by turns.

``python -m benchmarks.recordio [--quick] [--json]``: sequential reading in lists of 512 records of 100 bytes, and 1,000
records from the middle of an indexed file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from elasticdl.data.recordio import Compressor, RecordIOFile, RecordIOIndex, RecordIOWriter

RECORD_SIZE_BYTES = 100
BATCH_SIZE = 512
RANGE_SIZE = 1000
PYRECORDIO_CHUNK_SIZE_BYTES = 32 << 20


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def write_files(directory: Path, num_records: int) -> dict[str, float]:
    """Write the same records, equally long and of varying length, in all formats; return records per second."""
    generator = random.Random(1)
    pool = generator.randbytes(1 << 20)
    starts = [generator.randrange(len(pool) - 2 * RECORD_SIZE_BYTES) for _ in range(num_records)]
    equal = [pool[start : start + RECORD_SIZE_BYTES] for start in starts]
    varying = [pool[start : start + 50 + start % 101] for start in starts]

    def write(name: str, records: list[bytes], compressor: Compressor, chunk_size_bytes: int) -> None:
        with RecordIOWriter(str(directory / name), compressor, chunk_size_bytes) as writer:
            writer.write_all(records)

    def write_tfrecord() -> None:
        with tf.io.TFRecordWriter(str(directory / "tfrecord")) as writer:
            for record in equal:
                writer.write(record)

    rates = {
        "write_records_per_s": num_records / seconds(lambda: write("equal", equal, Compressor.NONE, 1 << 16)),
        "tfrecord_write_records_per_s": num_records / seconds(write_tfrecord),
    }
    write("varying", varying, Compressor.NONE, 1 << 16)
    write("snappy", equal, Compressor.SNAPPY, 1 << 16)
    write("large_chunks", equal, Compressor.NONE, PYRECORDIO_CHUNK_SIZE_BYTES)
    return rates


def scan_recordio(path: Path) -> int:
    """Read a file in lists of 512 records, its index included; return the number of records."""
    total = 0
    with RecordIOFile(str(path)) as file:
        for start in range(0, len(file), BATCH_SIZE):
            total += len(file.read(start, min(start + BATCH_SIZE, len(file))))
    return total


def scan_recordio_to_tensors(path: Path) -> int:
    """As `scan_recordio`, each list made a string tensor, which TFRecordDataset's batches are already."""
    total = 0
    with RecordIOFile(str(path)) as file:
        for start in range(0, len(file), BATCH_SIZE):
            total += int(tf.constant(file.read(start, min(start + BATCH_SIZE, len(file)))).shape[0])
    return total


def scan_tfrecord(path: Path) -> int:
    return sum(int(batch.shape[0]) for batch in tf.data.TFRecordDataset(str(path)).batch(BATCH_SIZE))


def sequential(directory: Path, num_records: int, rounds: int) -> dict[str, float]:
    """Median records per second of each reader; the readers take turns."""
    scans: dict[str, Callable[[], int]] = {
        "recordio": lambda: scan_recordio(directory / "equal"),
        "recordio_varying": lambda: scan_recordio(directory / "varying"),
        "recordio_snappy": lambda: scan_recordio(directory / "snappy"),
        "recordio_to_tensors": lambda: scan_recordio_to_tensors(directory / "equal"),
        "tfrecord": lambda: scan_tfrecord(directory / "tfrecord"),
    }
    for scan in scans.values():
        assert scan() == num_records
    times: dict[str, list[float]] = {name: [] for name in scans}
    for _ in range(rounds):
        for name, scan in scans.items():
            times[name].append(seconds(scan))
    return {f"{name}_records_per_s": num_records / statistics.median(times[name]) for name in scans}


def middle(directory: Path, name: str, rounds: int) -> dict[str, float]:
    """Milliseconds for 1,000 records from the middle: chunk never opened before, and opened before."""
    cold: list[float] = []
    warm: list[float] = []
    for number in range(rounds):
        with RecordIOFile(str(directory / name)) as file:
            start = len(file) // 2 + number * 7

            def read(file: RecordIOFile = file, start: int = start) -> list[bytes]:
                return file.read(start, start + RANGE_SIZE)

            cold.append(seconds(read) * 1000)
            warm.append(seconds(read) * 1000)
    return {f"{name}_range_first_ms": statistics.median(cold), f"{name}_range_again_ms": statistics.median(warm)}


def measure(num_records: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        figures: dict[str, float] = {"num_records": num_records, "record_size_bytes": RECORD_SIZE_BYTES}
        figures |= write_files(directory, num_records)
        figures["index_ms"] = seconds(lambda: RecordIOIndex.build(str(directory / "equal"))) * 1000
        figures |= sequential(directory, num_records, rounds)
        for file in ("equal", "varying", "snappy", "large_chunks"):
            figures |= middle(directory, file, 5 if file == "large_chunks" else 50)
    for reader in ("recordio", "recordio_varying", "recordio_snappy", "recordio_to_tensors"):
        figures[f"{reader}_to_tfrecord_ratio"] = figures[f"{reader}_records_per_s"] / figures["tfrecord_records_per_s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the records, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    figures = measure(100_000, 3) if arguments.quick else measure(1_000_000, 5)
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
        return
    for name, value in figures.items():
        print(f"{name:36} {value:14,.2f}")


if __name__ == "__main__":
    main()
