"""A damaged journal of a master: an error, never another snapshot."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

import pytest

from elasticdl.master.journal import decode, encode
from elasticdl_client.errors import JobError
from tests.fuzz import mutations
from tests.fuzz.scale import rounds

_SNAPSHOT = {
    "generation": 3,
    "pods": {f"worker-{n}": {"id": n, "uid": f"{n:032x}", "failures": [n, 2 * n]} for n in range(20)},
    "text": 'a "quoted" é \\ text',
}


def test_a_journal_that_is_whole_is_decoded() -> None:
    assert decode(encode(_SNAPSHOT), "there", "remove it") == _SNAPSHOT


def test_a_journal_written_before_there_were_checksums_is_decoded() -> None:
    before = json.dumps({"format": 2, "snapshot": _SNAPSHOT}, separators=(",", ":")).encode()
    assert decode(before, "there", "remove it") == _SNAPSHOT


@pytest.mark.parametrize("mutate", [mutations.flip, mutations.truncate, mutations.extend, mutations.splice])
def test_a_damaged_journal_is_an_error_and_never_another_snapshot(mutate: Callable[[bytes, Random], bytes]) -> None:
    good = encode(_SNAPSHOT)
    for seed in range(rounds(2000)):
        damaged = mutate(good, Random(seed))
        if damaged == good:
            continue
        with pytest.raises(JobError, match="the journal there") as caught:
            decode(damaged, "there", "remove it")
        assert caught.value.hint
