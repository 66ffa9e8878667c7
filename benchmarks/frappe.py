"""DeepFM on the frappe app-usage log: ten epochs over its 57,722 records, from the command to its exit.

A real job, `elasticdl train --runtime=local` with 2 parameter servers and 4 workers, its final evaluation included;
against plain Keras, one process, the same model, minibatch and epochs.  The data is that of ../shared/data/frappe, or
of $ELASTICDL_TEST_DATA/frappe.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from benchmarks.measured_job import ROOT, BenchmarkError, Contention, read_status, running_job, story
from benchmarks.peers.environment import environment

SOURCE = Path(os.environ.get("ELASTICDL_TEST_DATA", ROOT.parent / "shared" / "data")) / "frappe"
NUM_RECORDS = 57_722
EPOCHS, QUICK_EPOCHS = 10, 3
MINIBATCH = 256
MINIBATCHES_PER_TASK = 16
WAIT_S = 300.0


def make_data(directory: Path) -> Path:
    """Write the records as RecordIO; return the directory."""
    output = directory / "frappe"
    if not output.exists():
        argv = [sys.executable, str(ROOT / "scripts" / "gen_dataset.py"), "frappe", f"--source={SOURCE}"]
        subprocess.run([*argv, f"--output={output}"], cwd=ROOT, check=True, stdout=sys.stderr)
    return output


def job_flags(data: Path, epochs: int) -> dict[str, object]:
    """Return the flags of a job on the records, without its number of workers."""
    return {
        "job_name": "frappe",
        "model_zoo": ROOT / "model_zoo",
        "model_def": "deepfm.deepfm_edl_embedding.custom_model",
        "training_data": data / "train",
        "validation_data": data / "validation",
        "num_ps_pods": 2,
        "num_epochs": epochs,
        "minibatch_size": MINIBATCH,
        "num_minibatches_per_task": MINIBATCHES_PER_TASK,
    }


def our_job(directory: Path, data: Path, epochs: int, more: Mapping[str, object]) -> dict[str, float]:
    """Run the job; return its wall seconds, AUC, and the times of events."""
    job_dir = directory / "job"
    flags = {**job_flags(data, epochs), "num_workers": 4, **more}
    began = time.time()
    with running_job(job_dir, flags) as job:
        code = job.wait(WAIT_S)
    wall_s = time.time() - began
    status = read_status(job_dir)
    if code != 0 or status is None:
        raise BenchmarkError(f"the job failed\n{story(job_dir)}")
    exact = all((one.committed, one.repeated, one.lost) == (NUM_RECORDS, 0, 0) for one in status.coverage)
    if not exact or len(status.coverage) != epochs:
        raise BenchmarkError(f"the coverage is not exact: {status.coverage}")
    return {"wall_s": wall_s, "auc": status.metrics["auc"], **timeline(job_dir, began, began + wall_s)}


def timeline(job_dir: Path, began: float, ended: float) -> dict[str, float]:
    """Seconds from the command to each of the job's stations, as its logs have them."""
    (master,) = (job_dir / "logs").glob("*-master.log")
    lines = master.read_text().splitlines()
    workers = [file.read_text() for file in (job_dir / "logs").glob("*-worker-*.log")]
    stations = {
        "master_s": lines[:1],
        "first_epoch_s": [line for line in lines if "Epoch 1:" in line or "Epoch 1 " in line],
        "trained_s": [line for line in lines if re.search(r"Epoch \d+.*committed", line)],
        "evaluated_s": [line for line in lines if "Evaluation metrics" in line],
    }
    found = {name: _seconds(at[-1]) - began for name, at in stations.items() if at}
    steps = [_seconds(line) for text in workers for line in text.splitlines() if "Loss = " in line]
    if steps:
        found["first_loss_s"] = min(steps) - began
    return {name: at for name, at in found.items() if 0 <= at <= ended - began}


def _seconds(line: str) -> float:
    """Of the time with which a log line begins."""
    found = re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})", line)
    return datetime.fromisoformat(f"{found[1]}.{found[2]}").timestamp() if found else -1.0


def plain_keras(data: Path, epochs: int, minibatch: int) -> dict[str, float]:
    """Run one process of plain Keras; return the wall seconds from the command to its exit, and the AUC."""
    argv = [sys.executable, "-m", "benchmarks.peers.frappe_fit", str(data / "train"), str(data / "validation")]
    began = time.perf_counter()
    done = subprocess.run(
        [*argv, str(epochs), str(minibatch)], cwd=ROOT, capture_output=True, text=True, env=environment(), check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(done.stderr[-3000:])
    return {"keras_wall_s": time.perf_counter() - began, "keras_auc": float(done.stdout.split()[-1])}


def measure(epochs: int, rounds: int, directory: Path, more: Mapping[str, object]) -> dict[str, float]:
    """Medians over the rounds."""
    data = make_data(directory)
    runs: list[dict[str, float]] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=directory) as place, Contention() as contention:
            run = our_job(Path(place), data, epochs, more)
        runs.append({**run, "share_of_others": contention.others})
        print(" ".join(f"{name} {value:.3f}" for name, value in runs[-1].items()), file=sys.stderr, flush=True)
    names = set.intersection(*(set(run) for run in runs))
    ours = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name in names}
    ours["auc_min"] = min(run["auc"] for run in runs)
    return {**ours, **plain_keras(data, epochs, int(str(more.get("minibatch_size", MINIBATCH))))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EPOCHS} epochs")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--rounds", type=int, default=1, help="how often; the median counts")
    arguments, flags = parser.parse_known_args()
    if not SOURCE.is_dir():
        raise SystemExit(f"{SOURCE} is not here: name the directory that has frappe/ in $ELASTICDL_TEST_DATA")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    more = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    with tempfile.TemporaryDirectory(prefix="elasticdl-frappe-") as directory:
        figures = measure(QUICK_EPOCHS if arguments.quick else EPOCHS, arguments.rounds, Path(directory), more)
    if arguments.json:
        print(json.dumps({"benchmark": "frappe", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:12,.3f}")


if __name__ == "__main__":
    main()
