"""The front of a local job that Python has started.

    python -m elasticdl_client.sdk DIRECTORY LOCK COMMAND …

DIRECTORY is prepared, LOCK is the inherited descriptor of its lock, COMMAND is what the master runs.  Prints what
`elasticdl train` prints, which goes to `logs/front.log`.  A pipe as standard input is held open by the process that the
job ends with.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from pathlib import Path

from elasticdl_client import local, main
from elasticdl_client.job_dir import JobDir, read_whole_spec


def _run(directory: str, lock_fd: str, *master_command: str) -> int:
    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        threading.Thread(target=_end_with_caller, daemon=True).start()
    path = Path(directory)
    return local.run_prepared(read_whole_spec(path), JobDir(path, int(lock_fd)), master_command)


def _end_with_caller() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main.exit_with(lambda: sys.exit(_run(*sys.argv[1:])))
