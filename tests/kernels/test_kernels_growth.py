"""A table grows without a long stop, to ten million rows."""

from __future__ import annotations

import time

import numpy as np
import pytest

from elasticdl.kernels import _native

NUM_ROWS, DIM, NEW_ROWS = 10_000_000, 16, 500
LONGEST_STOP_S = 0.05


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_call_waits_long_for_growth() -> None:
    """By the processor time of each call, which other work on the machine disturbs less."""
    uniform = _native.Initializer("uniform", 1, -0.05, 0.05)
    table = _native.Table(DIM, uniform, _native.Optimizer("Adagrad", {}), [0.1], _native.Constraint())
    ids = np.random.default_rng(0).permutation(NUM_ROWS)
    seconds = np.empty(NUM_ROWS // NEW_ROWS)
    for number, part in enumerate(ids.reshape(-1, NEW_ROWS)):
        begun = time.thread_time()
        table.pull(part, True)
        seconds[number] = time.thread_time() - begun
    assert len(table) == NUM_ROWS
    assert seconds.max() <= LONGEST_STOP_S, np.sort(seconds)[-10:]
