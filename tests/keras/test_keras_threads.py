"""TensorFlow computes with as many threads as a worker's container has processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.lean_import import LEAN_IMPORT

_PROGRAM = """
import json, os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from elasticdl.frameworks.keras import first_op
first_op()
told = {name: value for name, value in os.environ.items() if name.startswith("TF_NUM_")}
print(json.dumps([told, len(os.listdir("/proc/self/task"))]))
"""


def variables_and_threads(num_inter_op: str) -> tuple[dict[str, str], int]:
    environment = os.environ | {"TF_NUM_INTEROP_THREADS": num_inter_op}
    program = [sys.executable, "-c", LEAN_IMPORT + _PROGRAM]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    told, num_threads = json.loads(done.stdout.splitlines()[-1])
    return told, num_threads


def test_threads_are_as_many_as_processors_unless_the_user_says_otherwise() -> None:
    told, num_threads = variables_and_threads("3")
    assert told == {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "3"}
    # By their difference, not by their names: TensorFlow 2.17 gives its threads none.
    assert num_threads - variables_and_threads("1")[1] == 2
