"""How many threads TensorFlow computes with: as many as this container has processors, not this machine."""

from __future__ import annotations

import os

from elasticdl.frameworks.processors import num_processors

_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def limit_threads() -> None:
    """Heeds the control group's limit, unless the user has said how many threads there shall be.

    TensorFlow itself counts the machine's processors; it reads the variables at its first operation.
    """
    for name in _VARIABLES:
        os.environ.setdefault(name, str(num_processors()))
