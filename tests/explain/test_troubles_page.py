"""docs/troubles.md names every trouble once, in the words of `explain`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticdl_client.explain.diagnosis import PENDING, SLOW, Trouble

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubles.md").read_text()
ROWS = re.findall(r"^\| `([A-Z]\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
SOURCE = "".join(path.read_text() for path in (ROOT / "elasticdl_client/explain").glob("*.py"))
WORDS = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # a sentence over several lines of code


def test_every_trouble_has_one_row_and_no_row_is_of_another() -> None:
    assert [row[0] for row in ROWS] == [trouble.value for trouble in Trouble]


@pytest.mark.parametrize(("trouble", "says"), [(row[0], row[1]) for row in ROWS])
def test_a_row_quotes_the_words_of_explain(trouble: str, says: str) -> None:
    quoted = [part.strip(" :") for part in re.split(r"…|, (?=[A-Z…])", says)]
    assert [part for part in quoted if len(part) > 8], trouble
    for part in quoted:
        assert part in WORDS, f"{trouble}: explain never says {part!r}"


def test_the_keys_of_the_json_are_explained() -> None:
    keys = {
        "trouble",
        "subjects",
        "at",
        "count",
        "is_fatal",
        "seen",
        "why",
        "done",
        "advice",
        "cost",
        "evidence",
        "events",
    }
    assert keys <= set(re.findall(r"`(\w+)`", PAGE))


def test_no_trouble_is_both_of_starting_and_of_speed() -> None:
    assert not PENDING & SLOW
