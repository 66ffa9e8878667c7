"""The words in which a job's end and its errors are told, by every command and for both runtimes.  Prints only."""

from __future__ import annotations

import sys

from elasticdl_client import progress
from elasticdl_client.choices import JobType
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import Ended
from elasticdl_client.news import MAX_UNTHINNED, metrics_text


def print_end(job_name: str, ended: Ended, *, written: str, logs: str, hint: str) -> None:
    """Prints the end of a job that was followed: coverage and metrics, where things are, and why it failed.

    Args:
        job_name: of the job.
        ended: how it ended.
        written: what the job has made and where it is; may be empty.
        logs: where the logs are, or the command that shows them.
        hint: what to do after a failure.
    """
    status = ended.status
    if status is not None:
        for line in progress.coverage_lines(status, MAX_UNTHINNED if len(status.coverage) <= MAX_UNTHINNED else 1):
            print(line)
        if status.metrics:
            when = f"final evaluation at step {status.metrics_step}" if status.metrics_step else "metrics"
            print(f"{when}: {metrics_text(status)}")
        if staleness := progress.staleness_text(status):
            print(f"staleness of gradients: {staleness}")
        if status.records_skipped:
            print(f"warning: {status.records_skipped:,} records were left out by --nan_policy=skip")
    if ended.exit_code == 0:
        if status is not None and not status.records_done and not status.records_total:
            print("warning: the commands have taken no data from ElasticDL: each has run by itself")
        print(f"Job {job_name} succeeded.")
        if written:
            print(written)
    print(f"logs: {logs}", flush=True)
    if ended.exit_code != 0:
        message = without_frames(ended.message) or "it did not say why."
        print(f"error: Job {job_name} failed: {message}", file=sys.stderr)
        print(f"  → {hint}", file=sys.stderr)


def written(spec: JobSpec) -> str:
    """What a job makes, and where; empty if there is nothing."""
    output = "statistics" if spec.job_type is JobType.ANALYZE else "model"
    made = {output: spec.output, "predictions": spec.prediction_outputs, "metrics": spec.metrics_output}
    return next((f"{name}: {path}" for name, path in made.items() if path), "")


def without_frames(text: str) -> str:
    """A message with the frames of tracebacks left out, and of their last lines those that it holds already.

    The pod's log has the whole; what a user needs first is the error.
    """
    kept: list[str] = []
    in_frames = False
    for line in text.splitlines():
        if line.strip() == "Traceback (most recent call last):":
            in_frames = True
        elif not in_frames or (line.strip() and not line.startswith(" ")):
            if not in_frames or not any(line in earlier for earlier in kept):
                kept.append(line)
            in_frames = False
    return "\n".join(kept).rstrip()
