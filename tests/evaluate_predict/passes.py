"""Jobs that evaluate or predict over the digits, what they leave behind, and what one process says of the same."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.api.examples import parse_examples
from elasticdl.data.factory import create_reader
from elasticdl.protocol import Role
from tests.chaos.job import REPOSITORY, LocalJob
from tests.evaluate_predict.gated import gated_zoo

NUM_RECORDS = 360
FLAGS = {"minibatch_size": 8, "num_minibatches_per_task": 2, "lease_timeout": 3.0, "num_workers": 2}
_START_S = 600.0  # a busy machine starts workers slowly
Floats = npt.NDArray[np.float32]


def make_digits(directory: Path) -> Path:
    output = directory / "digits"
    argv = [sys.executable, "scripts/gen_dataset.py", "digits", "--output", str(output), "--records_per_shard", "150"]
    subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True)
    return output


def records_of(data: Path) -> dict[str, Any]:
    """All records of the validation data, in order."""
    reader = create_reader(str(data / "validation"))
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    return parse_examples(records, {"image": (64,), "label": ()})


def one_pass(command: str, directory: Path, data: Path, **flags: object) -> LocalJob:
    """Not started yet."""
    source = "validation_data" if command == "evaluate" else "prediction_data"
    given = {"job_name": command, "model_def": "model.custom_model", source: data / "validation", **FLAGS, **flags}
    if given.get("distribution_strategy") == "Local":
        given["num_workers"] = 1
    return LocalJob(directory / "job", given, command)


def gated_pass(command: str, directory: Path, data: Path, torch_source: str = "", **flags: object) -> GatedJob:
    """The same, whose workers all stop in the middle of the data until the test opens the gate."""
    zoo, gate = gated_zoo(directory, torch_source, str(flags.pop("code", "")))
    return GatedJob(one_pass(command, directory, data, model_zoo=zoo, **flags), gate)


class GatedJob:
    """A job with a gate."""

    def __init__(self, job: LocalJob, gate: Path) -> None:
        self.job = job
        self._gate = gate

    def lose(self, *roles: Role) -> None:
        """Starts the job; SIGKILLs a pod of each role while all workers stand at the gate, then opens it."""
        try:
            with (self._gate / "lock").open("a") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                self._lose(roles)
            assert self.job.wait(600) == 0, self.job.story()
        finally:
            self.job.end()

    def _lose(self, roles: Sequence[Role]) -> None:
        job = self.job.start()
        workers = int(str(job.flags["num_workers"]))
        job.wait_until("all at the gate", lambda: len(list(self._gate.glob("waits-*"))) >= workers, _START_S)
        job.wait_until("done tasks", lambda: (s := job.status()) is not None and s.records_done > 0, _START_S)
        for role in roles:
            pid = job.pods(role)[-1].pid
            assert pid
            os.kill(pid, signal.SIGKILL)


def assert_exact(job: LocalJob, verb: str, quarantined: int = 0) -> None:
    status = job.status()
    assert status is not None
    (found,) = status.coverage
    counts = (found.verb, found.records, found.committed, found.repeated, found.lost, found.quarantined)
    assert counts == (verb, NUM_RECORDS, NUM_RECORDS - quarantined, 0, 0, quarantined), job.story()
    name = {"evaluated": "evaluation", "predicted": "prediction"}[verb]
    line = f"{name}: records {NUM_RECORDS}, {verb} {NUM_RECORDS - quarantined}, repeated 0, lost 0"
    assert line in job.master_log()
    assert line in "\n".join(job.output)


def metrics_of(logits: Floats, labels: npt.NDArray[np.int64]) -> dict[str, float]:
    """In one pass over everything, in float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
    return {"accuracy": float((logits.argmax(1) == labels).mean()), "crossentropy": float(losses.mean())}


def csv_rows(directory: Path) -> Floats:
    """All rows of all parts, in the order of the parts."""
    rows: list[list[str]] = []
    for part in parts_of(directory, "csv"):
        with open(part, newline="") as file:
            rows += list(csv.reader(file))[1:]
    return np.array(rows, np.float32)


def parts_of(directory: Path, extension: str) -> list[Path]:
    """Exactly those that the job has listed; nothing else is left in the directory."""
    parts = sorted(directory.glob(f"part-*.{extension}"))
    listed = json.loads((directory / "_SUCCESS").read_text())["parts"]
    assert [part.name for part in parts] == listed
    assert sorted(path.name for path in directory.iterdir()) == ["_SUCCESS", *listed]
    return parts
