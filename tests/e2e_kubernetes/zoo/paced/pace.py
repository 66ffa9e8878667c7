"""How slow the models of these tests read: seconds for a record, in the file of PACE_FILE.

It can be changed while the job runs, so a job lasts exactly as long as a test has use for it, and waiting costs no CPU.
"""

import os
import threading
import time
from pathlib import Path

_PACE = Path(os.environ.get("PACE_FILE", "/job/pace"))
_LOOK_S = 0.1


def pause(num_records: int = 1) -> None:
    """Waits for as long as this number of records takes by the file's newest word."""
    began = time.monotonic()
    while (left := began + _pace() * num_records - time.monotonic()) > 0:
        threading.Event().wait(min(left, _LOOK_S))


def _pace() -> float:
    try:
        return float(_PACE.read_text() or 0)
    except FileNotFoundError:
        return 0.0
