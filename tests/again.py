"""Tests on a whole cluster, with a second chance: a failed test is run once more, alone.

    python -m tests.again OPTION_OF_PYTEST …

A cluster has faults that are not ours: a daemon that is slow to come back, a pod that the kubelet forgets, a controller
that evicts no pod any more after a moment without a node.  A test that fails and then passes alone is printed as flaky,
with the output of both runs above, and fails no change.  Unit tests get no second chance: theirs is a fault of ours.

ELASTICDL_FRESH_CLUSTER: a shell command that makes the cluster anew for the second run, where it may be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 3  # more failures than these are no accident
_TESTS_FAILED = 1  # pytest's exit code
# Just before the time-out of most of these tests: the dump of a process whose threads run on may end it by SIGSEGV.
_STACKS_AFTER_S = 880


def failed_tests(cache: Path) -> list[str]:
    """Names of the tests that failed in the run with this cache of pytest's."""
    try:
        found: dict[str, bool] = json.loads((cache / "v" / "cache" / "lastfailed").read_text())
    except FileNotFoundError:
        return []
    return sorted(found)


def run_with_second_chance(options: list[str]) -> int:
    """The exit code of pytest: of its second run where there was one."""
    with tempfile.TemporaryDirectory(prefix="elasticdl-tests-") as directory:
        settings = ("-o", f"cache_dir={directory}", "-o", f"faulthandler_timeout={_STACKS_AFTER_S}")
        argv = [sys.executable, "-m", "pytest", *settings, *options]
        code = subprocess.run(argv).returncode
        failed = failed_tests(Path(directory))
        if code != _TESTS_FAILED or not 0 < len(failed) <= MOST:
            return code
        print(f"==> {len(failed)} failed; once more, alone: {' '.join(failed)}", flush=True)
        if make_anew := os.environ.get("ELASTICDL_FRESH_CLUSTER"):
            subprocess.run(make_anew, shell=True, check=True)
        second = subprocess.run([*argv, "-n", "0", "--last-failed"]).returncode
        failed_twice = failed_tests(Path(directory))
        for name in failed:
            print(f"{'FAILED twice' if name in failed_twice else 'flaky'}: {name}", flush=True)
        return second


if __name__ == "__main__":
    sys.exit(run_with_second_chance(sys.argv[1:]))
