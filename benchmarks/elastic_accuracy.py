"""Does elasticity cost accuracy?  The AUC by step of a model: fixed numbers of workers against a changing one.

``python -m benchmarks.elastic_accuracy [--model=NAME] [--quick] [--json] [--picture=FILE.svg]``: real jobs on this
machine, two parameter servers, asynchronous steps: four workers, eight, and between four and eight, changed every few
seconds by `elasticdl scale`; each with three seeds.  `deepfm` trains on frappe, `wide_deep` and `xdeepfm` on a
generated log in the columns of Criteo's, whose labels come from a hidden model.  All are evaluated every epoch's number
of steps.  At each of these steps the elastic jobs are compared with all jobs of a fixed number: a t-test without the
assumption of equal variances, whose smallest p is multiplied by the number of steps (Bonferroni).  Below 0.05
elasticity would make a difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.frappe import MINIBATCH, NUM_RECORDS, SOURCE, job_flags, make_data
from benchmarks.measured_job import ROOT, BenchmarkError, read_status, running_job, story

JOB = "accuracy"
FEW, MANY = 4, 8
ELASTIC = f"{FEW} to {MANY}"
CHANGE_S = 5.0
WAIT_S = 900.0
_EVALUATION = re.compile(r"Evaluation metrics\[step=(\d+)\]: \{.*?'auc': ([\d.]+)")

Curve = dict[int, float]
"""AUC of the validation data by step."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and the data of a job.

    Attributes:
        model_def: of the zoo.
        data: one of the data sets of scripts/gen_dataset.py.
        num_records: of its training data.
    """

    model_def: str
    data: str
    num_records: int

    @property
    def evaluate_every(self) -> int:
        """Steps of an epoch."""
        return self.num_records // MINIBATCH

    def make_data(self, directory: Path) -> Path:
        """Write the records as RecordIO; return the directory.

        Raises:
            BenchmarkError: its files are not here.
        """
        if self.data == "frappe":
            if not SOURCE.is_dir():
                raise BenchmarkError(f"{SOURCE} is not here: name the directory of frappe/ in $ELASTICDL_TEST_DATA")
            return make_data(directory)
        argv = [
            sys.executable,
            str(ROOT / "scripts" / "gen_dataset.py"),
            self.data,
            f"--output={directory / self.data}",
        ]
        subprocess.run(argv, cwd=ROOT, check=True, stdout=sys.stderr)
        return directory / self.data


SUBJECTS = {
    "deepfm": Subject("deepfm.deepfm_edl_embedding.custom_model", "frappe", NUM_RECORDS),
    "wide_deep": Subject("criteo.wide_deep.custom_model", "criteo", 40_000),
    "xdeepfm": Subject("criteo.xdeepfm.custom_model", "criteo", 40_000),
}


def train(subject: Subject, directory: Path, data: Path, workers: str, seed: int, epochs: int) -> tuple[Curve, int]:
    """Run a job; return its curve, and how often the number of its workers was changed."""
    job_dir = directory / "job"
    is_elastic = workers == ELASTIC
    flags = {
        **job_flags(data, epochs),
        "job_name": JOB,
        "model_def": subject.model_def,
        "num_workers": FEW if is_elastic else workers,
        "evaluation_steps": subject.evaluate_every,
        "seed": seed,
    }
    changes = 0
    with running_job(job_dir, flags) as job:
        for number in itertools.cycle((MANY, FEW)):
            try:
                job.wait(CHANGE_S if is_elastic else WAIT_S)
                break
            except subprocess.TimeoutExpired:
                if not is_elastic:
                    raise BenchmarkError(f"the job does not end\n{story(job_dir)}") from None
            changes += _scale(job_dir, number)
    status = read_status(job_dir)
    if job.returncode != 0 or status is None:
        raise BenchmarkError(f"the job failed\n{story(job_dir)}")
    if any((one.committed, one.repeated, one.lost) != (subject.num_records, 0, 0) for one in status.coverage):
        raise BenchmarkError(f"the coverage is not exact: {status.coverage}")
    (log,) = (job_dir / "logs").glob("*-master.log")
    return {int(step): float(auc) for step, auc in _EVALUATION.findall(log.read_text())}, changes


def _scale(job_dir: Path, number: int) -> bool:
    """Return whether the number was changed; a job that has just ended cannot be scaled."""
    argv = [sys.executable, "-m", "elasticdl_client.main", "scale", JOB, f"--job_dir={job_dir}"]
    return subprocess.run([*argv, f"--num_workers={number}"], cwd=ROOT, capture_output=True).returncode == 0


def at(curve: Curve, steps: Sequence[int]) -> np.ndarray:
    """AUC [steps], on straight lines between evaluations: those of different jobs fall on slightly different steps."""
    known = sorted(curve)
    return np.interp(steps, known, [curve[step] for step in known])


def compare(fixed: np.ndarray, elastic: np.ndarray) -> dict[str, float]:
    """Figures of two sets of curves [jobs, steps]."""
    from scipy import stats  # type: ignore[import-untyped]

    p = stats.ttest_ind(elastic, fixed, axis=0, equal_var=False).pvalue
    difference = elastic.mean(axis=0) - fixed.mean(axis=0)
    return {
        "smallest_p": float(min(1.0, np.min(p) * fixed.shape[1])),
        "largest_difference": float(np.max(np.abs(difference))),
        "spread_of_fixed_there": float(np.ptp(fixed, axis=0)[np.argmax(np.abs(difference))]),
        "fixed_last_auc": float(fixed[:, -1].mean()),
        "elastic_last_auc": float(elastic[:, -1].mean()),
    }


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw all curves, those of a number of workers in one color."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "accuracy"  # the same ids in each run
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4))
    for (workers, several), color in zip(curves.items(), ("#8a94a6", "#e0a030", "#3f6fd8"), strict=True):
        for number, curve in enumerate(several):
            steps = sorted(curve)
            label = f"{workers} workers" if number == 0 else None
            axis.plot(steps, [curve[step] for step in steps], color=color, linewidth=1.3, label=label)
    axis.set_xlabel("step")
    axis.set_ylabel("AUC of the validation data")
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def measure(subject: Subject, directory: Path, seeds: int, epochs: int, picture: Path | None) -> dict[str, float]:
    """Train all jobs, one after the other, and compare them."""
    data = subject.make_data(directory)
    curves: dict[str, list[Curve]] = {str(FEW): [], str(MANY): [], ELASTIC: []}
    changes: list[int] = []
    for seed, workers in itertools.product(range(1, seeds + 1), curves):
        with tempfile.TemporaryDirectory(dir=directory) as place:
            curve, changed = train(subject, Path(place), data, workers, seed, epochs)
        curves[workers].append(curve)
        changes += [changed] if workers == ELASTIC else []
        last = curve[max(curve)]
        print(f"{workers} workers, seed {seed}: AUC {last:.4f}, {changed} changes", file=sys.stderr, flush=True)
    if picture is not None:
        draw(curves, picture)
    steps = range(subject.evaluate_every, subject.evaluate_every * epochs + 1, subject.evaluate_every)
    fixed = np.stack([at(curve, steps) for workers in (str(FEW), str(MANY)) for curve in curves[workers]])
    elastic = np.stack([at(curve, steps) for curve in curves[ELASTIC]])
    return {**compare(fixed, elastic), "fewest_changes": min(changes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SUBJECTS, default="deepfm", help="the model to train")
    parser.add_argument("--quick", action="store_true", help="two seeds of three epochs instead of three of ten")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--picture", type=Path, help="an SVG file to write; needs matplotlib")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    seeds, epochs = (2, 3) if arguments.quick else (3, 10)
    with tempfile.TemporaryDirectory(prefix="elasticdl-accuracy-") as directory:
        try:
            figures = measure(SUBJECTS[arguments.model], Path(directory), seeds, epochs, arguments.picture)
        except BenchmarkError as error:
            raise SystemExit(str(error)) from None
    if arguments.json:
        found = {"benchmark": "elastic_accuracy", "model": arguments.model, "quick": arguments.quick, **figures}
        print(json.dumps(found))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:10.4f}")


if __name__ == "__main__":
    main()
