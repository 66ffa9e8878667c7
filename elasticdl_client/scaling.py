"""The number of workers of a running job: the user's request, and the job's limits.

It is a number, or a range in which the number follows the gain: data beside the job, which outlives client and master:
an annotation of the job's ConfigMap, a file in the directory of a local job.  Client and master read it by the same
rules.
"""

from __future__ import annotations

from elasticdl_client import worker_range
from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.worker_range import WorkerRange

FILE = "num_workers"  # in the directory of a local job


def parse(text: str, spec: JobSpec) -> WorkerRange:
    """Return the number of workers, or the range, that a user has written down for a job.

    Raises:
        FlagError: it is none, or one that the job cannot have.
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
    is_all_reduce = spec.distribution_strategy is DistributionStrategy.ALL_REDUCE and spec.job_type is JobType.TRAIN
    found = worker_range.parse(text, spec.min_workers if is_all_reduce else 1)
    number = found.least
    if not number and (is_all_reduce or spec.job_command):
        raise FlagError(
            f"The workers of job {spec.job_name} hold its model: with 0 of them it would be lost.", "Give 1 or more."
        )
    if is_all_reduce and number < spec.min_workers:
        raise FlagError(
            f"{number} workers are fewer than --min_workers={spec.min_workers}: training would never continue.",
            f"Give {spec.min_workers} or more.",
        )
    return found


def wanted(text: str, spec: JobSpec, status: JobStatus) -> int:
    """Return how many workers a job is to have now.

    Args:
        text: the user's request; empty: none.
        status: the last one that the master wrote.
    """
    present = status.workers_wanted if status.started_at else spec.num_workers
    try:
        return parse(text, spec).nearest(present)
    except FlagError:  # the master has refused it: nothing has changed
        return present


def describe(status: JobStatus) -> str:
    """Return one line about a number of workers that follows the gain; empty while it is fixed."""
    scaling = status.scaling
    if scaling is None:
        return ""
    line = f"{scaling.workers}, {scaling.state}"
    if scaling.gain is not None:
        share = f"{100 * max(0.0, scaling.gain):.0f} % of a worker's rate"
        line += f", another worker adds {share}" if scaling.bottleneck else f", each of the last workers adds {share}"
    return line + (f", bottleneck: {scaling.bottleneck}" if scaling.bottleneck else "")


def check_current(job_name: str, wanted_now: int, current: int | None) -> None:
    """Check the precondition of a change.

    Raises:
        JobError: not `current` workers are wanted now.
    """
    if current is not None and current != wanted_now:
        raise JobError(f"Job {job_name} has {wanted_now} workers, not {current}: it was not scaled.")
