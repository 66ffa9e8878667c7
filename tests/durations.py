"""How long the files of tests take, so that processes beside each other begin with the longest.

pytest-xdist begins with the files of the most tests: whole jobs, of which a file has a few, would come last, and one
process would still run them when the others have ended.  `make test` names the file in which to record how long they
took, in ELASTICDL_DURATIONS: copy it to `tests/durations.txt` when tests were added that take long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "durations.txt"
VARIABLE = "ELASTICDL_DURATIONS"
MIN_RECORDED_S = 5.0  # of a file


def read(path: Path = RECORDED) -> dict[str, float]:
    """Return the seconds by file that a run has recorded."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return {file: float(seconds) for seconds, file in lines}


def write(durations: Iterable[tuple[str, float]], path: Path) -> None:
    """Record the files that take long, the longest first, from (nodeid, seconds) of tests."""
    sums: dict[str, float] = {}
    for nodeid, seconds in durations:
        file = file_of(nodeid)
        sums[file] = sums.get(file, 0.0) + seconds
    lines = [f"{s:.0f} {file}\n" for file, s in sorted(sums.items(), key=lambda item: -item[1]) if s >= MIN_RECORDED_S]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))


def longest_first(recorded: Mapping[str, float]) -> Callable[[str], float]:
    """Return the key, of a nodeid, that sorts tests: those of a file without a record stay behind, in their order."""
    return lambda nodeid: -recorded.get(file_of(nodeid), 0.0)


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]
