"""DeepFM on a synthetic click log: a whole local job of ours against TensorFlow's own ways, in the same run.

Ours: `elasticdl train --runtime=local` with one parameter server and one worker, reading RecordIO.  Peers: `model.fit`
in one process, and `tf.distribute.ParameterServerStrategy` with one parameter server and one worker; both read the
same records as TFRecord files.  Everyone has the same model and Adagrad, and the machine for itself while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measured_job import POLL_S, ROOT, read_status, running_job, story
from benchmarks.peers.environment import environment

BATCH = 512
RECORDS_PER_SHARD = 100_000


@dataclass(frozen=True, slots=True)
class Size:
    """How long everything takes."""

    records: int
    epochs: int  # of our job
    peer_seconds: float  # after the warm-up


QUICK = Size(records=200_000, epochs=2, peer_seconds=8)
FULL = Size(records=1_000_000, epochs=2, peer_seconds=30)


def make_data(directory: Path, records: int) -> tuple[Path, Path]:
    """Write the click log as RecordIO and as TFRecord; return both directories."""
    recordio, tfrecord = directory / "recordio", directory / "tfrecord"
    command = [sys.executable, str(ROOT / "scripts" / "gen_dataset.py"), "clicks", "--output", str(recordio)]
    sizes = ["--num_records", str(records), "--records_per_shard", str(RECORDS_PER_SHARD)]
    subprocess.run([*command, *sizes], cwd=ROOT, check=True, stdout=sys.stderr)
    convert = [sys.executable, "-m", "benchmarks.peers.to_tfrecord", str(recordio / "train"), str(tfrecord)]
    subprocess.run(convert, cwd=ROOT, check=True, stdout=sys.stderr)
    return recordio / "train", tfrecord


def peer(name: str, tfrecord: Path, seconds: float) -> float:
    """Samples per second of a peer."""
    argv = [sys.executable, "-m", f"benchmarks.peers.{name}", str(tfrecord), f"--batch={BATCH}", f"--seconds={seconds}"]
    done = subprocess.run(
        argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["samples_per_second"])


def our_job(directory: Path, recordio: Path, epochs: int) -> dict[str, float]:
    """Run the job; return samples per second in the steady state and over the whole run of the command."""
    job_dir = directory / "job"
    flags = {
        "job_name": "local-train-benchmark",
        "model_zoo": ROOT / "benchmarks",
        "model_def": "zoo.deepfm_clicks.custom_model",
        "training_data": recordio,
        "num_ps_pods": 1,
        "num_workers": 1,
        "num_epochs": epochs,
        "minibatch_size": BATCH,
        "num_minibatches_per_task": 32,
        "seed": 1,
    }
    began = time.perf_counter()
    points: list[tuple[float, int]] = []
    total = 0
    with running_job(job_dir, flags) as job:
        while job.poll() is None:
            if status := read_status(job_dir):
                total = max(total, status.records_total)
                if not points or status.updated_at > points[-1][0]:
                    points.append((status.updated_at, status.records_done))
            time.sleep(POLL_S)
    elapsed = time.perf_counter() - began
    if job.returncode != 0:
        raise SystemExit(f"the job failed:\n{story(job_dir)}")
    return {"steady": _steady(points, total), "whole_job": total / elapsed}


def _steady(points: list[tuple[float, int]], total: int) -> float:
    """Return the rate between the first point after a tenth of the records and the last one before the end."""
    inside = [point for point in points if total / 10 <= point[1] < total]
    if len(inside) < 2:
        raise SystemExit("the job was over too soon for a steady state: give it more records")
    (first_time, first_done), (last_time, last_done) = inside[0], inside[-1]
    return (last_done - first_done) / (last_time - first_time)


def measure(size: Size, directory: Path) -> dict[str, float]:
    """All figures: samples per second, and ours divided by the peers'."""
    recordio, tfrecord = make_data(directory, size.records)
    ours = our_job(directory, recordio, size.epochs)
    fit = peer("keras_fit", tfrecord, size.peer_seconds)
    strategy = peer("strategy_loop", tfrecord, size.peer_seconds)
    return {
        "elasticdl_samples_per_second": ours["steady"],
        "elasticdl_whole_job_samples_per_second": ours["whole_job"],
        "keras_fit_samples_per_second": fit,
        "parameter_server_strategy_samples_per_second": strategy,
        "ratio_to_keras_fit": ours["steady"] / fit,
        "ratio_to_parameter_server_strategy": ours["steady"] / strategy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute; less exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with tempfile.TemporaryDirectory(prefix="elasticdl-local-train-") as directory:
        figures = measure(QUICK if arguments.quick else FULL, Path(directory))
    if arguments.json:
        print(json.dumps({"benchmark": "local_train", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:48} {value:12,.2f}")


if __name__ == "__main__":
    main()
