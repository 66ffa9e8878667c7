"""Errors, warnings and phases are colored on terminals, and nowhere else."""

from __future__ import annotations

import io

import pytest

from elasticdl_client.progress import Color, are_wanted, paint, paint_log_line, paint_phases

TABLE = "NAME   PHASE\nRunning   Failed   1/2\na   Running\nPhase:        Stopped\nPhase  FailedMount   x"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_phases_are_colored_where_they_stand_in_a_cell() -> None:
    painted = paint_phases(TABLE, Terminal())
    assert painted == (
        "NAME   PHASE\nRunning   \x1b[1;31mFailed\x1b[0m   1/2\na   \x1b[32mRunning\x1b[0m\n"
        "Phase:        \x1b[33mStopped\x1b[0m\nPhase  FailedMount   x"
    )


def test_log_lines_are_colored_by_their_level_also_behind_the_name_of_a_pod() -> None:
    stamp = "2026-11-24 15:52:15,958"
    assert paint_log_line(f"{stamp} INFO ERROR is no level here", Terminal()).startswith(stamp)
    assert paint_log_line(f"{stamp} WARNING w", Terminal()) == f"\x1b[33m{stamp} WARNING w\x1b[0m"
    assert paint_log_line(f"[worker-1] {stamp} ERROR e", Terminal()) == f"\x1b[1;31m[worker-1] {stamp} ERROR e\x1b[0m"
    assert paint_log_line("printed", Terminal()) == "printed"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_nothing_is_colored_where_that_is_not_wanted(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert are_wanted(Terminal())
    monkeypatch.setenv(name, value)
    assert paint("text", Color.RED, Terminal()) == "text"


def test_nothing_is_colored_in_a_file() -> None:
    assert paint_phases(TABLE, io.StringIO()) == TABLE
