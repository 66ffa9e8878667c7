"""Commands of the client, each in a process of its own, forked from one that has imported the client.

Else each would begin with half a second of a processor for Python and its imports, and tests on a cluster run hundreds
of them.  Those that are read while they run, and all that `make test` runs, start Python as a user does.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_IMPORTED = (
    *(f"elasticdl_client.{name}" for name in ("main", "help", "run_script", "explain.explanation")),
    *(f"elasticdl_client.jobs.{name}" for name in ("commands", "kubernetes_jobs")),
    *(f"elasticdl_client.kubernetes.{name}" for name in ("checks", "rbac", "submit")),
    *("fire", "kubernetes.client.api_client", "kubernetes.config"),
)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, *_IMPORTED])


def elasticdl(
    *arguments: str, timeout_s: float = 240.0, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` would in the root of the checkout.

    Raises:
        TimeoutExpired: it has not ended in time, and is killed.
    """
    with tempfile.TemporaryDirectory(prefix="elasticdl-client-") as directory:
        outputs = [Path(directory, name) for name in ("stdout", "stderr")]
        process = _FORKS.Process(target=_run, args=(arguments, dict(environment), *outputs))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(
                ["elasticdl", *arguments], timeout_s, *(file.read_bytes() for file in outputs)
            )
        stdout, stderr = (file.read_text(errors="replace") for file in outputs)
        return subprocess.CompletedProcess(["elasticdl", *arguments], process.exitcode, stdout, stderr)


def _run(arguments: tuple[str, ...], environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    from elasticdl_client.__main__ import main

    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = ["elasticdl", *arguments]
    main()
