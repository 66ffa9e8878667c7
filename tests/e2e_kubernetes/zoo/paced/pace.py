"""How slow the models of these tests read: seconds for a record, in the file of PACE_FILE.

It can be changed while the job runs, so a job lasts exactly as long as a test has use for it, and waiting costs no CPU.
The file of WORK_FILE holds seconds of processor time for a record: a worker is then as fast as its CPU limit allows.
"""

import os
import threading
import time
from pathlib import Path

import numpy as np

_PACE = Path(os.environ.get("PACE_FILE", "/job/pace"))
_WORK = Path(os.environ.get("WORK_FILE", "/job/work"))
_LOOK_S = 0.1
_MATRIX = np.ones((64, 64), np.float32)  # small: no product is given to several threads


def pause(num_records: int = 1) -> None:
    """Waits, and computes, for as long as this number of records takes by the newest word of both files."""
    began = time.monotonic()
    while (left := began + _seconds(_PACE) * num_records - time.monotonic()) > 0:
        threading.Event().wait(min(left, _LOOK_S))
    end = time.thread_time() + _seconds(_WORK) * num_records
    while time.thread_time() < end:
        _ = _MATRIX @ _MATRIX


def _seconds(file: Path) -> float:
    try:
        return float(file.read_text() or 0)
    except FileNotFoundError:
        return 0.0
