"""TensorFlow computes with as many threads as a worker's container has processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_PROGRAM = """
import json, os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from elasticdl.frameworks.keras import first_op
first_op()
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
told = {name: value for name, value in os.environ.items() if name.startswith("TF_NUM_")}
print(json.dumps([told, sum("Compute" in name for name in names)]))
"""


def test_threads_are_as_many_as_processors_unless_the_user_says_otherwise() -> None:
    environment = os.environ | {"TF_NUM_INTEROP_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True)
    told, num_computing = json.loads(done.stdout.splitlines()[-1])
    assert told == {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "3"}
    assert num_computing == 3
