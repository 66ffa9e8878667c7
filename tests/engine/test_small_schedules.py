"""Thousands of small jobs, each with one to three faults: most errors show with few members and few minibatches.

A failure names its seed: `python -m tests.engine small SEED` replays it with its log.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from tests.engine.schedules import play_small

_AT_ONCE = 100
_COLLECT_EACH = 5


@pytest.fixture
def frozen() -> Iterator[None]:
    """Spare what a small job does not need: logs, and the garbage collector's looks at what lives."""
    gc.freeze()
    gc.disable()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.enable()
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("first", range(0, 10_000, _AT_ONCE))
def test_whatever_happens_to_small_jobs_every_record_is_in_the_model_once(first: int) -> None:
    for seed in range(first, first + _AT_ONCE):
        play_small(seed)
        if seed % _COLLECT_EACH == 0:
            gc.collect(0)  # whole jobs at once, which are over: nothing older can have become garbage


def test_members_begin_though_every_task_has_a_record_that_is_set_aside() -> None:
    play_small(37)
