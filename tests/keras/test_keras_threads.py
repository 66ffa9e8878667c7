"""TensorFlow computes with as many threads as a worker's container has processors."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.lean_import import LEAN_IMPORT

_PROGRAM = """
import json, os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from elasticdl.frameworks.keras import first_op  # an import of seconds: the processes under test are forked from here

for num_inter_op in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["TF_NUM_INTEROP_THREADS"] = num_inter_op
        first_op()
        told = {name: value for name, value in os.environ.items() if name.startswith("TF_NUM_")}
        print("found", json.dumps([told, len(os.listdir("/proc/self/task"))]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_threads_are_as_many_as_processors_unless_the_user_says_otherwise() -> None:
    program = [sys.executable, "-c", LEAN_IMPORT + _PROGRAM, "3", "1"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    lines = [line.removeprefix("found ") for line in done.stdout.splitlines() if line.startswith("found ")]
    (three, num_of_three), (_, num_of_one) = map(json.loads, lines)
    assert three == {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "3"}
    # By their difference, not by their names: TensorFlow 2.17 gives its threads none.
    assert num_of_three - num_of_one == 2
