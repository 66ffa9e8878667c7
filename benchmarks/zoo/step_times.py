"""Writes down when the steps of a process are done, for benchmarks that ask for it.

With ``$ELASTICDL_STEP_TIMES`` each step of an optimizer appends a record to the file of its process in that directory.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "ELASTICDL_STEP_TIMES"
# Seconds of the machine's monotonic clock, CPU seconds of this process, the optimizer's own step, processes.
RECORD = struct.Struct("<ddqq")


def watched(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the same optimizer; it records the time of its steps if the environment asks for that."""
    directory = os.environ.get(VARIABLE)
    if directory:
        optimizer.register_step_post_hook(_writer(directory))
    return optimizer


def _writer(directory: str) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    world_size = int(os.environ.get("WORLD_SIZE", "0"))
    files: list[int] = []

    def write(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not files:  # not before: this process may be a fork of the one that made the optimizer
            name = os.path.join(directory, str(os.getpid()))
            files.append(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC))
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        os.write(files[0], RECORD.pack(time.monotonic(), time.process_time(), int(state.get("step", 0)), world_size))

    return write
