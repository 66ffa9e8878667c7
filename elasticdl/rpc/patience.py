"""How long a PS or worker continues without its master, and its error after that."""

from __future__ import annotations

import os

from elasticdl_client.errors import JobError

MASTER_TIMEOUT_VARIABLE = "ELASTICDL_MASTER_TIMEOUT_S"
_MASTER_TIMEOUT_S = 300.0


class MasterGone(JobError):
    """The master has not answered for too long; the process leaves."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(
            f"the master at {address} has not answered for {timeout_s:g} s (--master_timeout)",
            "its log says why it ended; `elasticdl resume JOB` starts it again, and the job continues",
        )


def read_master_timeout_s() -> float:
    """Seconds, from the environment.

    Raises:
        JobError: it is no such number.
    """
    text = os.environ.get(MASTER_TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else _MASTER_TIMEOUT_S
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise JobError(f"{MASTER_TIMEOUT_VARIABLE}={text} is not a number of seconds")
    return seconds
