"""`elasticdl tensorboard JOB`: shows the event files of a job.

Of a local job TensorBoard runs here, in the place of this process.  Of a job of a cluster see cluster_tensorboard.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.jobs.job import JobInfo
from elasticdl_client.storage_kinds import check_installed, is_remote

HOST = "127.0.0.1"
MODULE = "tensorboard.main"
COPY_MODULE = "elasticdl.storage.tensorboard_copy"


def log_dir_of(spec: JobSpec) -> str:
    """Where a job's event files are.

    Raises:
        JobError: it writes none.
    """
    if not spec.tensorboard_log_dir:
        raise JobError(
            f"Job {spec.job_name} writes no event files.",
            "Start it with --tensorboard_log_dir=DIRECTORY (local jobs that train: install tensorboard before); "
            "`elasticdl resume` cannot add it.",
        )
    return spec.tensorboard_log_dir


def command_of(directory: str, *arguments: str) -> list[str]:
    """The arguments of Python that show a directory: a copy of what storage has there."""
    if is_remote(directory):
        return ["-m", COPY_MODULE, directory, *arguments]
    return ["-m", MODULE, f"--logdir={directory}", *arguments]


def show_local(job: JobInfo, port: int) -> int:
    """Becomes TensorBoard, which prints its address and ends with Ctrl-C.

    Args:
        port: 0: the first free one from 6006 on.

    Raises:
        JobError: there is nothing to show, or no TensorBoard.
    """
    try:
        spec = JobSpec.from_json((Path(job.directory) / "spec.json").read_text())
    except OSError as error:
        raise JobError(f"The specification of job {job.name} cannot be read: {error}.") from error
    directory = log_dir_of(spec)
    if is_remote(directory):
        check_installed(directory)
    if importlib.util.find_spec("tensorboard") is None:
        raise JobError(
            "TensorBoard is not installed here.",
            "pip install tensorboard",
        )
    print(f"The event files of job {job.name} are in {directory}", flush=True)
    arguments = [f"--host={HOST}", *([f"--port={port}"] if port else [])]
    os.execv(sys.executable, [sys.executable, *command_of(directory, *arguments)])
