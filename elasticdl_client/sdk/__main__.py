"""The front of a local job that Python has started.

    python -m elasticdl_client.sdk DIRECTORY LOCK COMMAND …

DIRECTORY is prepared, LOCK is the inherited descriptor of its lock, COMMAND is what the master runs.  Prints what
`elasticdl train` prints, which goes to `logs/front.log`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elasticdl_client import local, main
from elasticdl_client.job_dir import JobDir, read_whole_spec


def _run(directory: str, lock_fd: str, *master_command: str) -> int:
    path = Path(directory)
    return local.run_prepared(read_whole_spec(path), JobDir(path, int(lock_fd)), master_command)


if __name__ == "__main__":
    main.exit_with(lambda: sys.exit(_run(*sys.argv[1:])))
