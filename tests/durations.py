"""What the files of tests take, so that processes beside each other begin with the longest.

pytest-xdist begins with the files of the most tests: whole jobs, of which a file has a few, would come last, and one
process would still run them when the others have ended.  `make test` names the file in which to record how long they
took, in ELASTICDL_DURATIONS: copy it to `tests/durations.txt` when tests were added that take long.  A line has the
seconds of a file, those of processors in it (its own and those of the processes that it waited for), and its name.

Tests on a cluster go to processes one by one, so `make e2e-together` records each of them, for
`tests/durations_on_cluster.txt`.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDED = (ROOT / "tests" / "durations.txt", ROOT / "tests" / "durations_on_cluster.txt")
VARIABLE = "ELASTICDL_DURATIONS"
MIN_RECORDED_S = 1.0


def read(*paths: Path) -> dict[str, float]:
    """Return the seconds by name that runs have recorded."""
    lines = (line.split(maxsplit=2) for path in paths or RECORDED for line in path.read_text().splitlines())
    return {name: float(seconds) for seconds, _, name in lines}


def write(durations: Iterable[tuple[str, float, float]], path: Path) -> None:
    """Record what takes long, the longest first, from (name, seconds, processor seconds) of parts of tests."""
    sums: dict[str, tuple[float, float]] = {}
    for name, seconds, of_processors in durations:
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + seconds, before[1] + of_processors
    longest = sorted(((*both, name) for name, both in sums.items() if both[0] >= MIN_RECORDED_S), reverse=True)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{seconds:.0f} {of_processors:.0f} {name}\n" for seconds, of_processors, name in longest))


def processor_seconds() -> float:
    """Of this process and of its descendants that have been waited for."""
    used = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def longest_first(recorded: Mapping[str, float]) -> Callable[[str], float]:
    """Return the key, of a name, that sorts tests: those without a record stay behind, in their order."""
    return lambda name: -recorded.get(name, 0.0)


def recorded_name(nodeid: str, on_cluster: bool) -> str:
    """Of the test or, without a cluster, of its file."""
    return nodeid if on_cluster else nodeid.partition("::")[0]
