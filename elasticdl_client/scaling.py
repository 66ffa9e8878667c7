"""How many workers a running job is to have: the user's number, and which numbers a job can have.

The number is data beside the job, which outlives client and master: an annotation of the job's ConfigMap, a file in the
directory of a local job.  Client and master read it by the same rules.
"""

from __future__ import annotations

from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus

FILE = "num_workers"  # in the directory of a local job
MAX_WORKERS = 100_000
_MAX_TEXT = 40  # of what is no number


def parse(text: str, spec: JobSpec) -> int:
    """Return the number of workers that a user has written down for a job.

    Raises:
        FlagError: it is none, or more than the job can have.
    """
    if spec.distribution_strategy is DistributionStrategy.LOCAL:
        raise FlagError(
            f"Job {spec.job_name} cannot be scaled: the Local strategy has one worker.",
            "Start it with another --distribution_strategy.",
        )
    if spec.need_tf_config:
        raise FlagError(
            f"Job {spec.job_name} cannot be scaled: its TF_CONFIG names all workers from the start.",
            "Start it again with another --num_workers.",
        )
    text = text.strip()
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_WORKERS))
    if not is_number or int(text) > MAX_WORKERS:
        shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
        raise FlagError(f"'{shown}' is not a number of workers.", f"Give a number from 0 to {MAX_WORKERS}.")
    number = int(text)
    is_all_reduce = spec.distribution_strategy is DistributionStrategy.ALL_REDUCE and spec.job_type is JobType.TRAIN
    if not number and (is_all_reduce or spec.job_command):
        raise FlagError(
            f"The workers of job {spec.job_name} hold its model: with 0 of them it would be lost.", "Give 1 or more."
        )
    if is_all_reduce and number < spec.min_workers:
        raise FlagError(
            f"{number} workers are fewer than --min_workers={spec.min_workers}: training would never continue.",
            f"Give {spec.min_workers} or more.",
        )
    return number


def wanted(text: str, spec: JobSpec, status: JobStatus) -> int:
    """Return how many workers a job is to have now.

    Args:
        text: what the user has written down; empty: nothing.
        status: what the master wrote last.
    """
    try:
        return parse(text, spec)
    except FlagError:  # the master has refused it: nothing has changed
        return status.workers_wanted if status.started_at else spec.num_workers


def check_current(job_name: str, wanted_now: int, current: int | None) -> None:
    """Check the precondition of a change.

    Raises:
        JobError: not `current` workers are wanted now.
    """
    if current is not None and current != wanted_now:
        raise JobError(f"Job {job_name} has {wanted_now} workers, not {current}: it was not scaled.")
