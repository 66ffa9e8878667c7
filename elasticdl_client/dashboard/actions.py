"""Actions of the page on jobs: delete, resume and scale, as the commands of these names.

A local job that is resumed gets a client of its own, which the dashboard's end does not end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from elasticdl_client import job_dir, scaling
from elasticdl_client.choices import Runtime
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.jobs.options import Options
from elasticdl_client.jobs.store import JobInfo, JobStore, Phase

_DELETE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 30.0  # a client that resumes has taken the job's directory by then, or has said why not
_LOOK_S = 0.1


class Action(StrEnum):
    """The name of the command that does the same."""

    DELETE = "delete"
    RESUME = "resume"
    SCALE = "scale"


def possible(job: JobInfo, store: JobStore) -> frozenset[Action]:
    """Return the actions that a job's state and the client's own rights allow.

    Raises:
        ElasticDLError: the cluster does not say what its user may do.
    """
    wanted = {Action.DELETE}
    if job.phase is Phase.STOPPED:
        wanted.add(Action.RESUME)
    if not job.has_ended and _can_be_scaled(job):
        wanted.add(Action.SCALE)
    return frozenset(action for action in wanted if store.may(job, action))


def _can_be_scaled(job: JobInfo) -> bool:
    try:
        return job.spec is not None and scaling.parse(str(job.spec.num_workers), job.spec).least >= 0
    except FlagError:
        return False


def perform(action: Action, job: JobInfo, store: JobStore, options: Options, num_workers: str = "") -> str:
    """Perform the action; return a message for people.

    Args:
        options: of the dashboard, for the command that resumes a local job.
        num_workers: of the job that is scaled, as the user has written it.

    Raises:
        ElasticDLError: it cannot be done.
    """
    if action is Action.DELETE:
        store.delete(job, _DELETE_TIMEOUT_S)
        return f"Job {job.name} is deleted."
    if action is Action.SCALE:
        if job.has_ended or job.spec is None:
            raise JobError(f"Job {job.name} is {job.phase.lower()}: it cannot be scaled.")
        number = scaling.parse(num_workers, job.spec)
        return f"Job {job.name} is scaled: workers {store.scale(job, number)} → {number}."
    if job.phase is not Phase.STOPPED:
        raise JobError(f"Job {job.name} is {job.phase.lower()}: there is nothing to resume.")
    if job.runtime is Runtime.LOCAL:
        _resume_here(job, options)
    else:
        store.resume(job)
    return f"Job {job.name} is resumed."


def command(verb: str, job: JobInfo, options: Options, *more: str) -> Sequence[str]:
    """`elasticdl VERB JOB` for this job and no other, as arguments of a process."""
    where = [f"--runtime={job.runtime.value}"]
    if job.runtime is Runtime.LOCAL:
        where.append(f"--job_dir={job.directory}")
    else:
        where.append(f"--namespace={job.namespace}")
        where += [f"--context={job.context}"] if job.context else []
        where += ["--force_use_kube_config_file"] if options.force_use_kube_config_file else []
    return [sys.executable, "-m", "elasticdl_client.main", verb, job.name, *where, *more]


def _resume_here(job: JobInfo, options: Options) -> None:
    directory = Path(job.directory)
    said = directory / "logs" / "resume.txt"
    with said.open("wb") as file:
        client = subprocess.Popen(
            command(Action.RESUME, job, options),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not job_dir.holders(directory):
        with suppress(subprocess.TimeoutExpired):
            if client.wait(_LOOK_S):
                raise JobError(f"Job {job.name} was not resumed: {said.read_text(errors='replace').strip()[-2000:]}")
            return
        if time.monotonic() > deadline:
            raise JobError(f"Job {job.name} does not start; its client's output is in {said}.")
