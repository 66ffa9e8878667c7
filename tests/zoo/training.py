"""Trains a model of the zoo as a user would: its data, its command, and what the master says of it at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client.job_status import JobStatus
from tests.zoo.entries import REPOSITORY, SOURCES, Entry

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        log: the command's output, and the ends of the pods' logs where it failed.
        metrics: of the last evaluation.
    """

    exit_code: int
    seconds: float
    log: str
    metrics: dict[str, float]
    status: JobStatus | None


def make_data(entry: Entry, directory: Path) -> None:
    """Makes the data set of a model in `directory`, once."""
    output = directory / entry.data.name
    if entry.rows or output.exists():
        return
    unfinished = directory / f"{entry.data.name}.unfinished.{os.getpid()}"
    words = entry.data.generator(str(unfinished), str(SOURCES))
    subprocess.run([sys.executable, *words], cwd=REPOSITORY, check=True, capture_output=True)
    unfinished.rename(output)


def train(
    entry: Entry, data: Path, job_dir: Path, python: str = sys.executable,
    on_status: Callable[[JobStatus], None] = lambda status: None,
) -> Outcome:  # fmt: skip
    """Runs the command of a model to its end.

    Args:
        data: where `make_data` has put its data set.
        python: the interpreter that has the TensorFlow that it needs.
        on_status: told what the master last said, from time to time.
    """
    words = entry.command(str(data), str(SOURCES), str(job_dir))
    argv = [python, "-m", "elasticdl_client.main", *words[1:], f"--job_dir={job_dir}"]
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",  # a script is run with the same `python`
    }
    job_dir.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with job_dir.with_name(f"{job_dir.name}.log").open("w+") as log:
        with subprocess.Popen(argv, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
            while True:
                try:
                    code = process.wait(_LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    status = _status(job_dir)
                    if status is not None:
                        on_status(status)
                except BaseException:
                    process.terminate()  # the agent ends all of the job with its client
                    raise
        log.seek(0)
        story = log.read()
    if code:
        story += _ends_of_logs(job_dir)
    return Outcome(code, time.monotonic() - started, story, _metrics(job_dir), _status(job_dir))


def _status(job_dir: Path) -> JobStatus | None:
    try:
        return JobStatus.from_json((job_dir / "status.json").read_text())
    except (OSError, ValueError):
        return None


def _metrics(job_dir: Path) -> dict[str, float]:
    """Of the evaluation at the highest step that any pod printed: the master, or a script that evaluates by itself."""
    found: dict[int, dict[str, float]] = {}
    for path in (job_dir / "logs").glob("*.log"):
        for step, shown in re.findall(r"Evaluation metrics\[step=(\d+)\]: (\{.*\})", path.read_text(errors="replace")):
            found[int(step)] = json.loads(shown.replace("'", '"'))
    return found[max(found)] if found else {}


def _ends_of_logs(job_dir: Path) -> str:
    paths = sorted((job_dir / "logs").glob("*.log"))
    return "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)
