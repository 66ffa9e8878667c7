"""Other launchers of processes that train together: refused, for their groups can neither grow nor shrink."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from elasticdl_client.errors import JobError

_HINT = (
    "start the script with `python`, without a distributed strategy (Lightning: Trainer(devices=1)): alone it is one "
    "process, and in a job --num_workers says how many train together"
)


def refuse_other_launchers() -> None:
    """Called before the job is joined.

    Raises:
        JobError: this process is one of a launcher's.
    """
    is_another_address = "MASTER_PORT" in os.environ and ":" not in os.environ.get("MASTER_ADDR", ":")
    if is_another_address or os.environ.get("WORLD_SIZE", "1") != "1" or "TORCHELASTIC_RUN_ID" in os.environ:
        names = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
        found = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise JobError(f"this process was started by torchrun, `accelerate launch` or Lightning ({found})", _HINT)


def refuse_their_group() -> None:
    """From now on PyTorch's default group is refused where it would meet at the address of the master."""
    make: Callable[..., Any] = torch.distributed.init_process_group

    def init_process_group(backend: Any = None, init_method: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if init_method in (None, "env://") and keywords.get("store") is None:
            raise JobError(
                "init_process_group() makes a group of a fixed size, and the workers of a job come and go", _HINT
            )
        return make(backend, init_method, *arguments, **keywords)

    torch.distributed.init_process_group = init_process_group
