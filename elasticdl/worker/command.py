"""``python -m elasticdl.worker.command DIRECTORY PROGRAM ARGUMENT …``: becomes the user's own command (--job_command).

There is no shell and no parent: the process of the pod is the command, so its exit code, signals and output are the
pod's.  It finds the job through its environment: MASTER_ADDR, WORKER_ID, WORKER_NUM, the file of the token, and
TF_CONFIG if the job asks for it.  DIRECTORY is --model_zoo: the command runs in it, and may import from it and from its
parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

NOT_STARTED = 127  # the exit code that a shell uses


def environment_of(environment: Mapping[str, str], directory: str) -> dict[str, str]:
    """Return the environment of the command: this Python first on PATH, the model zoo on PYTHONPATH."""
    path = [os.path.dirname(sys.executable), environment.get("PATH", os.defpath)]
    modules = [directory, os.path.dirname(directory), environment.get("PYTHONPATH", "")]
    return {
        **environment,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(part for part in modules if part)),
    }


def main(directory: str, command: Sequence[str]) -> int:
    """Execute the command; return an exit code only if it cannot be started."""
    directory = os.path.abspath(directory)
    environment = environment_of(os.environ, directory)
    try:
        os.chdir(directory)
    except OSError as error:
        sys.stderr.write(
            f"--job_command: the directory {directory} cannot be entered: {error.strerror}\n"
            "  → The command runs in --model_zoo: name a directory of the image, or give --code.\n"
        )
        return NOT_STARTED
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        sys.stderr.write(
            f"--job_command: {command[0]} cannot be run in {directory}: {error.strerror}\n"
            "  → Programs are looked for on PATH, or with a slash in their name from that directory (--model_zoo).\n"
        )
    return NOT_STARTED


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python -m elasticdl.worker.command DIRECTORY PROGRAM ARGUMENT …")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
