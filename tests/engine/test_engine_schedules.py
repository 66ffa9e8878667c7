"""Random schedules of everything that can happen to the worker's own code: every record is in the model once, it ends.

A failure names its seed: `python -m tests.engine SEED` replays it with its log.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from elasticdl.worker.ledger import Ledger
from tests.engine.schedules import play

_AT_ONCE = 8  # schedules of a test: the suite runs in several processes


def play_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        play(seed)


@pytest.mark.parametrize("first", range(0, 64, _AT_ONCE))
def test_whatever_happens_to_members_every_record_is_in_the_model_once(first: int) -> None:
    play_all(range(first, first + _AT_ONCE))


@pytest.mark.full  # six minutes: what 64 schedules do not meet
@pytest.mark.timeout(1800)
def test_whatever_happens_to_members_for_long_every_record_is_in_the_model_once() -> None:
    play_all(range(1000, 3400))


def test_a_seed_replays_its_schedule() -> None:
    assert [play(7).log, play(7).scheduler.now] == [play(7).log, play(7).scheduler.now]


def test_a_ledger_that_forgets_is_found_with_the_seed_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ledger, "add", lambda ledger, name, num_samples: None)
    found = r"^python -m tests\.engine \d+\n.*(in the model twice|committed, and not in the model)"
    with pytest.raises(AssertionError, match=found):
        play_all(range(10))
