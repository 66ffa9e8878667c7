"""``make stress``: runs tests many times while other processes want every core, and counts the failures.

    python -m tests.stress TEST … [-n 20] [--cpus 0.5]

The processors are kept busy by one process each.  With --cpus the tests are limited to that
number of processors as well, which needs root and the cgroup controller "cpu" (of either version).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.e2e_kubernetes.waiting import wait_until

CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # ends with its parent, however that ends


@contextlib.contextmanager
def busy_processors() -> Iterator[None]:
    """One process for each processor that never rests."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def limited_to(cpus: float) -> Iterator[Path | None]:
    """A cgroup with a limit of processors, as the file that takes the id of a process; 0: None.

    Raises:
        OSError: it cannot be made.
    """
    if not cpus:
        yield None
        return
    is_second = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if is_second else CGROUPS / "cpu") / f"elasticdl-stress-{os.getpid()}"
    group.mkdir()
    try:
        quota = int(cpus * _PERIOD_US)
        if is_second:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        yield group / "cgroup.procs"
    finally:
        members = group / "cgroup.procs"  # a process that a test has started may end a moment after pytest
        wait_until("the processes of the tests have ended", lambda: not members.read_text())
        group.rmdir()


def run_once(tests: list[str], log: Path, members: Path | None) -> int:
    """The exit code of pytest, whose output goes to `log`."""

    def join() -> None:
        if members is not None:
            members.write_text(str(os.getpid()))

    argv = [sys.executable, "-m", "pytest", "-x", "-q", *tests]
    with log.open("w") as output:
        return subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT, preexec_fn=join).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="+", metavar="TEST", help="files or names, as pytest takes them")
    parser.add_argument("-n", "--times", type=int, default=20)
    parser.add_argument("--cpus", type=float, default=0.0, help="processors that the tests get; 0: all")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="elasticdl-stress-") as directory, busy_processors():
        with limited_to(options.cpus) as members:
            for number in range(1, options.times + 1):
                log, started = Path(directory) / f"{number}.log", time.monotonic()
                code = run_once(options.tests, log, members)
                print(f"run {number}: exit code {code}, {time.monotonic() - started:.1f} s", flush=True)
                if code:
                    failures += 1
                    print(log.read_text(errors="replace"), flush=True)
    print(f"{options.times} runs under load: {options.times - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
