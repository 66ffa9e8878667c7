"""DeepFM on parameter servers against TensorFlow's own ways, in the same run.

The model: tables of 1 M × 16 and 1 M × 1, 10 random ids and 13 numbers a sample, a dense network of 128 and 64,
minibatches of 512, Adagrad and Adam.  Ours are real jobs (`elasticdl train --runtime=local`) reading RecordIO; peers
read the same records as TFRecord, parsed in whole minibatches.  They run one after another, `--rounds` times in turn,
and the median counts.  TensorFlow 2.15 gets a virtual environment of its own (benchmarks/peers/environment.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.measured_job import ROOT, Contention, steady_rate
from benchmarks.peers.environment import environment, python_with_tensorflow
from elasticdl.data.example import encode_examples
from elasticdl.data.recordio import RecordIOWriter

BATCH = 512
NUM_IDS, FIELDS, NUMBERS = 1_000_000, 10, 13
RECORDS_PER_SHARD = 100_000
WARM_UP_S = 4.0
OLD_TENSORFLOW = "2.15.1"
OUR_OPTIMIZERS = {"Adagrad": "optimizer", "Adam": "adam"}


@dataclass(frozen=True, slots=True)
class Size:
    """How long everything takes.

    Attributes:
        groups: of servers and workers, ours and the peers'.
    """

    records: int
    seconds: float
    rounds: int
    optimizers: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]


QUICK = Size(records=200_000, seconds=8, rounds=1, optimizers=("Adagrad",), groups=((1, 1), (1, 2)))
FULL = Size(records=1_000_000, seconds=20, rounds=1, optimizers=("Adagrad", "Adam"), groups=((1, 1), (1, 2), (2, 2)))


def make_data(directory: Path, records: int) -> tuple[Path, Path]:
    """Random ids, random numbers, random labels, as RecordIO and as TFRecord; made once."""
    recordio, tfrecord = directory / "recordio", directory / "tfrecord"
    if tfrecord.exists():
        return recordio, tfrecord
    recordio.mkdir(parents=True)
    random = np.random.default_rng(1)
    for shard, start in enumerate(range(0, records, RECORDS_PER_SHARD)):
        size = min(RECORDS_PER_SHARD, records - start)
        columns: dict[str, NDArray[np.int64] | NDArray[np.float32]] = {
            "ids": random.integers(0, NUM_IDS, (size, FIELDS)),
            "dense": random.standard_normal((size, NUMBERS), np.float32),
            "label": random.integers(0, 2, size),
        }
        with RecordIOWriter(str(recordio / f"data-{shard:05d}")) as writer:
            writer.write_all(encode_examples(columns))
    convert = [sys.executable, "-m", "benchmarks.peers.to_tfrecord", str(recordio), str(tfrecord)]
    subprocess.run(convert, cwd=ROOT, check=True, stdout=sys.stderr, env=environment())
    return recordio, tfrecord


def peer(python: str, name: str, tfrecord: Path, seconds: float, **options: object) -> float:
    """Samples per second of a peer."""
    argv = [python, "-m", f"benchmarks.peers.{name}", str(tfrecord), f"--batch={BATCH}", f"--seconds={seconds}"]
    argv += [f"--{option}={value}" for option, value in options.items()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["samples_per_second"])


def ours(
    directory: Path, recordio: Path, seconds: float, optimizer: str, num_ps: int, num_workers: int, more: list[str]
) -> float:
    """Samples per second of our job."""
    flags: dict[str, object] = {
        "job_name": "ps-training",
        "model_zoo": ROOT / "benchmarks",
        "model_def": "zoo.deepfm_clicks.custom_model",
        "optimizer": OUR_OPTIMIZERS[optimizer],
        "training_data": recordio,
        "num_ps_pods": num_ps,
        "num_workers": num_workers,
        "minibatch_size": BATCH,
        "num_minibatches_per_task": 64,
        "checkpoint_steps": 1 << 30,  # none: peers write none, either
        "seed": 1,
    }
    flags |= dict(flag.removeprefix("--").split("=", 1) for flag in more)
    with tempfile.TemporaryDirectory(prefix="job-", dir=directory) as place:
        return steady_rate(Path(place) / "job", flags, WARM_UP_S, seconds)


def contestants(size: Size, directory: Path, more: list[str]) -> dict[str, Callable[[], float]]:
    """Return the programs to compare, by name, ours first."""
    recordio, tfrecord = make_data(directory, size.records)
    old = python_with_tensorflow(OLD_TENSORFLOW)
    runs: dict[str, Callable[[], float]] = {}
    for optimizer in size.optimizers:
        key = optimizer.lower()
        for num_ps, num_workers in size.groups:
            runs[f"{key}_elasticdl_{num_ps}ps_{num_workers}w"] = lambda o=optimizer, p=num_ps, w=num_workers: ours(  # type: ignore[misc]
                directory, recordio, size.seconds, o, p, w, more
            )
        for version, python in (("215", old), ("221", sys.executable)):
            runs[f"{key}_keras_{version}"] = lambda python=python, o=optimizer: peer(  # type: ignore[misc]
                python, "keras_fit", tfrecord, size.seconds, optimizer=o
            )
        for name, python in (("strategy_fit", old), ("strategy_loop", sys.executable)):
            for num_ps, num_workers in size.groups:
                if num_workers > 1 or name == "strategy_loop":
                    runs[f"{key}_{name}_{num_ps}ps_{num_workers}w"] = (
                        lambda python=python, name=name, o=optimizer, p=num_ps, w=num_workers: peer(  # type: ignore[misc]
                            python, name, tfrecord, size.seconds, optimizer=o, num_ps=p, num_workers=w
                        )
                    )
    return runs


def ratios(rates: dict[str, float], optimizers: tuple[str, ...]) -> dict[str, float]:
    """Our best configuration against the best of each kind of peer, by optimizer."""
    found: dict[str, float] = {}
    for optimizer in (optimizer.lower() for optimizer in optimizers):
        best = {
            kind: max((rate for name, rate in rates.items() if name.startswith(f"{optimizer}_{kind}")), default=0.0)
            for kind in ("elasticdl", "strategy", "keras_215", "keras_221")
        }
        for kind, rate in best.items():
            if kind != "elasticdl" and rate and best["elasticdl"]:
                found[f"{optimizer}_ratio_to_{kind}"] = best["elasticdl"] / rate
    return found


def measure(size: Size, directory: Path, only: str, more: list[str]) -> dict[str, float]:
    """All figures: samples per second by contestant, ratios, and the share of the machine that others had."""
    runs = {name: run for name, run in contestants(size, directory, more).items() if only in name}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    others: list[float] = []
    for _ in range(size.rounds):
        for name, run in runs.items():
            with Contention() as contention:
                rates[name].append(run())
            others.append(contention.others)
            print(f"{name:40} {rates[name][-1]:12,.0f}  others {contention.others:.2f}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(measured) for name, measured in rates.items()}
    return {**medians, **ratios(medians, size.optimizers), "share_of_others": statistics.mean(others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Adagrad alone, about three minutes; less exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--rounds", type=int, default=0, help="how often each runs; the median counts")
    parser.add_argument("--only", default="", help="only those whose name has this in it, such as elasticdl_1ps")
    parser.add_argument("--data", default="", help="directory where the records stay for the next run")
    arguments, more = parser.parse_known_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    size = QUICK if arguments.quick else FULL
    if arguments.rounds:
        size = Size(size.records, size.seconds, arguments.rounds, size.optimizers, size.groups)
    with tempfile.TemporaryDirectory(prefix="elasticdl-ps-training-") as temporary:
        figures = measure(size, Path(arguments.data or temporary), arguments.only, more)
    if arguments.json:
        print(json.dumps({"benchmark": "ps_training", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:40} {value:12,.2f}")


if __name__ == "__main__":
    main()
