"""How long the files of tests take, so that processes beside each other begin with the longest.

pytest-xdist begins with the files of the most tests: whole jobs, of which a file has a few, would come last, and one
process would still run them when the others have ended.  Each run of several processes writes `build/durations.txt`;
copy it to `tests/durations.txt` when tests were added that take long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "durations.txt"
MEASURED = ROOT / "build" / "durations.txt"
_LEAST_S = 5.0  # of a file that is recorded
_OF_A_TEST_S = 0.05  # in a file that is not


def read(path: Path = RECORDED) -> dict[str, float]:
    """Return the seconds by file that a run has recorded."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return {file: float(seconds) for seconds, file in lines}


def write(durations: Iterable[tuple[str, float]], path: Path = MEASURED) -> None:
    """Record the files that take long, the longest first, from (nodeid, seconds) of tests."""
    sums: dict[str, float] = {}
    for nodeid, seconds in durations:
        file = nodeid.partition("::")[0]
        sums[file] = sums.get(file, 0.0) + seconds
    lines = [f"{s:.0f} {file}\n" for file, s in sorted(sums.items(), key=lambda item: -item[1]) if s >= _LEAST_S]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))


def longest_first(nodeids: Iterable[str], recorded: Mapping[str, float]) -> dict[str, float]:
    """Return the files of the tests in the order in which to begin them, with their seconds."""
    counts: dict[str, int] = {}
    for nodeid in nodeids:
        file = nodeid.partition("::")[0]
        counts[file] = counts.get(file, 0) + 1
    seconds = {file: recorded.get(file, count * _OF_A_TEST_S) for file, count in counts.items()}
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
