"""The name of a process that is started plainly: masters, servers, and workers without a standby."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CODE = """
from pathlib import Path
from elasticdl.cluster.local.process_title import name_process
name_process()
print(Path("/proc/self/cmdline").read_text().rstrip(chr(0)), Path("/proc/self/comm").read_text().strip(), sep="|")
"""


@pytest.mark.parametrize(
    ("pod", "shown"),
    [
        ("elasticdl-my-job-master", "elasticdl master of my-job|master my-job"),
        ("elasticdl-j-ps-0", "elasticdl ps-0 of j|ps-0 j"),
        ("another", "elasticdl another|another"),
    ],
)
def test_a_process_is_called_after_its_pod(pod: str, shown: str) -> None:
    environment = {**os.environ, "ELASTICDL_POD_NAME": pod}
    done = subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{shown}\n"


def test_a_process_of_no_pod_keeps_its_name() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ELASTICDL_POD_NAME"}
    done = subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(sys.executable)
