"""Starts the front of a local job: a process of its own (`__main__.py`), so that the job outlives this one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

from elasticdl_client.job_dir import JobDir

LOG = "front.log"


def start(job_dir: JobDir, master_command: Sequence[str]) -> threading.Event:
    """Start the front of a prepared job, to which the lock of its directory passes.

    Returns:
        An event that is set when the front has ended.
    """
    command = [sys.executable, "-m", "elasticdl_client.sdk", str(job_dir.path), str(job_dir.lock_fd)]
    try:
        with (job_dir.logs / LOG).open("ab") as log:
            process = subprocess.Popen(
                [*command, *master_command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(job_dir.lock_fd,),
                start_new_session=True,  # a Ctrl-C in the terminal or the notebook does not reach the job
            )
    finally:
        os.close(job_dir.lock_fd)
    has_ended = threading.Event()

    def reap() -> None:
        process.wait()
        has_ended.set()

    threading.Thread(target=reap, name=f"front of {job_dir.path.name}", daemon=True).start()
    return has_ended
