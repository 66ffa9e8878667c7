"""What the files of tests take, so that processes beside each other begin with the longest.

pytest-xdist begins with the files of the most tests: whole jobs, of which a file has a few, would come last, and one
process would still run them when the others have ended.  `make test` names the file in which to record how long they
took, in ELASTICDL_DURATIONS: copy it to `tests/durations.txt` when tests were added that take long.  A line has the
seconds of a file, those of processors in it (its own and those of the processes that it waited for), and its name.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "durations.txt"
VARIABLE = "ELASTICDL_DURATIONS"
MIN_RECORDED_S = 1.0  # of a file


def read(path: Path = RECORDED) -> dict[str, float]:
    """Return the seconds by file that a run has recorded."""
    lines = (line.split(maxsplit=2) for line in path.read_text().splitlines())
    return {file: float(seconds) for seconds, _, file in lines}


def write(durations: Iterable[tuple[str, float, float]], path: Path) -> None:
    """Record the files that take long, the longest first, from (nodeid, seconds, processor seconds) of tests."""
    sums: dict[str, tuple[float, float]] = {}
    for nodeid, seconds, of_processors in durations:
        file = file_of(nodeid)
        before = sums.get(file, (0.0, 0.0))
        sums[file] = before[0] + seconds, before[1] + of_processors
    longest = sorted(((*both, file) for file, both in sums.items() if both[0] >= MIN_RECORDED_S), reverse=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{seconds:.0f} {of_processors:.0f} {file}\n" for seconds, of_processors, file in longest))


def processor_seconds() -> float:
    """Of this process and of its descendants that have been waited for."""
    used = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def longest_first(recorded: Mapping[str, float]) -> Callable[[str], float]:
    """Return the key, of a nodeid, that sorts tests: those of a file without a record stay behind, in their order."""
    return lambda nodeid: -recorded.get(file_of(nodeid), 0.0)


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]
